"""The walks of the CUDA attention kernel, compiled for the CPU: each piece of work once, each seen tile once, in order.

A warp is 32 threads of the CPU, which meet where the lanes of a warp exchange something.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from jitgen._data import templates_directory

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BASE = r"""
#pragma once
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>
#include <tuple>
#include <vector>
#define JITGEN_DEVICE inline
struct Dim { int x; };
inline thread_local Dim threadIdx;
inline std::barrier<> warp(32);
inline int64_t lanes[32];
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  lanes[threadIdx.x] = mine;
  warp.arrive_and_wait();
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= uint32_t(lanes[lane]) << lane;
  warp.arrive_and_wait();
  return found;
}
inline int64_t __shfl_xor_sync(uint32_t, int64_t mine, int step) {
  lanes[threadIdx.x] = mine;
  warp.arrive_and_wait();
  const int64_t found = lanes[threadIdx.x ^ step];
  warp.arrive_and_wait();
  return found;
}
inline int __clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }
namespace jitgen {
inline int smaller(int a, int b) { return a < b ? a : b; }
}
"""
MAIN = r"""
#include "jitgen/attention_walk.cuh"
#define CHECK(condition) if (!(condition)) { std::printf("line %d\n", __LINE__); std::exit(1); }

void pieces(int tasks, int row_blocks, int ranges, int section, int blocks) {
  std::set<std::tuple<int, int, int>> seen;
  for (int block = 0; block < blocks; ++block) {
    jitgen::PieceWalk walk{tasks, row_blocks, ranges, section, block, blocks};
    for (; walk.more(); ++walk.round) {
      if (!walk.live()) continue;
      const jitgen::Piece piece = walk.piece();
      CHECK(piece.task >= 0 && piece.task < tasks && piece.row_block >= 0 && piece.row_block < row_blocks);
      CHECK(piece.range >= 0 && piece.range < ranges);
      CHECK(seen.insert({piece.task, piece.row_block, piece.range}).second);
    }
  }
  CHECK(int(seen.size()) == tasks * row_blocks * ranges);
}

void tiles(int begin, int end, int seed, int rarity) {
  std::vector<uint32_t> kinds(end + 64);
  std::srand(seed);
  for (auto& kind : kinds) kind = std::rand() % rarity ? 0 : std::rand() % 2 ? 3 : 1;
  std::vector<std::thread> threads;
  for (int lane = 0; lane < 32; ++lane) {
    threads.emplace_back([&, lane] {
      threadIdx.x = lane;
      jitgen::MaskedTiles walk(begin, end);
      const auto look = [&](int tile) { return kinds.at(tile); };
      for (int tile = end - 1; tile >= begin; --tile) {
        if (!(kinds[tile] & 1)) continue;
        CHECK(walk.next(look) && walk.tile == tile && walk.open == bool(kinds[tile] & 2));
        const jitgen::TileTicket ticket(jitgen::TileTicket(walk.tile, walk.open, tile == begin).packed());
        CHECK(ticket.tile == tile && ticket.open == walk.open && ticket.last == (tile == begin));
      }
      CHECK(!walk.next(look));
      const jitgen::Ends ends = jitgen::ends_of_warp({lane - 7, 5 - lane});
      CHECK(ends.low == -7 && ends.high == 5);
    });
  }
  for (auto& each : threads) each.join();
  jitgen::AllTiles all(begin, end);
  for (int tile = end - 1; tile >= begin; --tile) CHECK(all.next([&](int) { return 1u; }) && all.tile == tile);
  CHECK(!all.next([&](int) { return 1u; }));
}

int main() {
@CASES@
}
"""


def test_every_piece_and_every_tile_once(tmp_path: Path) -> None:
    source = random.Random(3)
    cases = []
    for _ in range(60):
        tasks = source.randrange(1, 40)
        sizes = (tasks, source.randrange(1, 30), source.choice((1, 1, 4)), source.choice((1, tasks, 7)))
        cases.append(f"  pieces({', '.join(map(str, sizes))}, {source.randrange(1, 140)});")
    for begin, end, rarity in ((0, 0, 1), (0, 1, 1), (3, 3, 1), (0, 32, 2), (31, 33, 1), (5, 200, 3), (64, 300, 40)):
        cases.append(f"  tiles({begin}, {end}, {source.randrange(1000)}, {rarity});")
    header = templates_directory() / "attention/include/jitgen/attention_walk.cuh"
    (tmp_path / "jitgen").mkdir()
    (tmp_path / "jitgen/attention_walk.cuh").write_text(header.read_text())
    (tmp_path / "jitgen/ptx.cuh").write_text(BASE)
    (tmp_path / "main.cpp").write_text(MAIN.replace("@CASES@", "\n".join(cases)))
    program = tmp_path / "main"
    command = ["g++", "-std=c++20", "-O1", "-pthread", f"-I{tmp_path}", str(tmp_path / "main.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
