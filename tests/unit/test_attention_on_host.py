"""Of the CUDA attention kernel, compiled for the CPU: each piece of work, seen tile and result once, in its place.

A warp is 32 threads of the CPU, which meet where the lanes of a warp exchange something.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from jitgen._data import templates_directory
from jitgen.families.attention.wgmma import CLUSTER_WIDTHS, WIDTHS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

WALKS = r"""
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

RESULTS = r"""
#include <mutex>
#include "jitgen/attention_wgmma.cuh"
#define CHECK(condition) if (!(condition)) { std::printf("line %d\n", __LINE__); std::exit(1); }

float sum_of(int row, int column) { return float(row * 300 + column); }
std::mutex mutex;

struct Operands {
  struct Task {};
  static constexpr int ranges = 1;
  int rows, width;
  std::set<std::pair<int, int>>& seen;
  std::set<int>& seen_rows;
  float scale;

  int packed_rows() const { return rows; }
  Task task(int) const { return {}; }
  void row_results(const Task&, int, int row, float top, float total) const {
    const std::lock_guard<std::mutex> guard(mutex);
    CHECK(row < rows && seen_rows.insert(row).second);
    CHECK(top == float(row) && std::abs(total - 4 * scale * float(row + 1)) < 1e-3f * total);
  }
  void results(const Task&, int, int row, int e, const float (&sums)[8], float top, float total, int live) const {
    const std::lock_guard<std::mutex> guard(mutex);
    CHECK(row < rows && e % 8 == 0 && live > 0 && live <= 8 && e + live <= width);
    CHECK(top == float(row) && std::abs(total - 4 * scale * float(row + 1)) < 1e-3f * total);
    for (int j = 0; j < live; ++j) {
      CHECK(std::abs(sums[j] - scale * sum_of(row, e + j)) <= 1e-3f * std::abs(scale * sum_of(row, e + j)));
      CHECK(seen.insert({row, e + j}).second);
    }
  }
};

template <int block_e, int stage_columns, int splits>
struct Config {
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int warpgroups = 1, keys = 64, depth = 64, width = block_e, stages = 2, staged = stage_columns;
  static constexpr int most_splits = splits;
  static constexpr bool query_copied = true, key_copied = true, value_copied = true, masked = false;
  static constexpr bool overlap = true, take_turns = true;
};

template <int block_e, int staged, int most_splits>
void results(int rows, int width, int splits) {
  using C = Config<block_e, staged, most_splits>;
  using Kernel = jitgen::AttentionKernel<C, Operands>;
  std::set<std::pair<int, int>> seen;
  std::set<int> seen_rows;
  const Operands operands{rows, width, seen, seen_rows, float(splits)};
  std::vector<std::vector<float4>> storage(splits);
  for (int rank = 0; rank < splits; ++rank) {
    const float4 poison = {NAN, NAN, NAN, NAN};
    storage[rank].assign(jitgen::AttentionShape<C>::bytes / 16 + 1, poison);
    memories[rank] = reinterpret_cast<uint8_t*>(storage[rank].data());
  }
  for (int rank = 0; rank < splits; ++rank) {
    const Kernel kernel{operands, memories[rank], 0, rank, splits};
    for (int number = 0; number < 4; ++number) {
      std::vector<std::thread> threads;
      for (int lane = 0; lane < 32; ++lane) {
        threads.emplace_back([&, lane] {
          threadIdx.x = number * 32 + lane;
          typename Kernel::Rows of_rows;
          float sums[C::width / 2];
          for (int r = 0; r < 2; ++r) {
            const int row = number * 16 + lane / 4 + r * 8;
            of_rows.top[r] = float(row);
            of_rows.base[r] = float(row) * Kernel::log2_e;
            of_rows.total[r] = float(row + 1);
          }
          for (int i = 0; i < C::width / 2; ++i) {
            sums[i] = sum_of(number * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
          }
          if (splits > 1) {
            kernel.leave(sums, of_rows, 1.0f);
          } else {
            kernel.finish(0, 0, 0, sums, of_rows, 1.0f);
          }
        });
      }
      for (auto& each : threads) each.join();
    }
  }
  for (int rank = 0; rank < splits && splits > 1; ++rank) {
    const Kernel kernel{operands, memories[rank], 0, rank, splits};
    for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) kernel.finish_split(0, 0, 0);
  }
  CHECK(int(seen.size()) == rows * width && int(seen_rows.size()) == rows);
}

int main() {
@CASES@
}
"""


def run(main: str, folder: Path) -> None:
    """Compile and run ``main`` with the headers of the kernel."""
    (folder / "jitgen").mkdir()
    for name in ("walk", "wgmma"):
        header = templates_directory() / f"attention/include/jitgen/attention_{name}.cuh"
        (folder / f"jitgen/attention_{name}.cuh").write_text(header.read_text())
    for name in ("ptx", "wgmma_ptx"):
        (folder / f"jitgen/{name}.cuh").write_text((Path(__file__).parents[1] / "host_warp.hpp").read_text())
    (folder / "main.cpp").write_text(main)
    program = folder / "main"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-pthread",
        f"-I{folder}",
        str(folder / "main.cpp"),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_every_result_once_in_its_place(tmp_path: Path) -> None:
    cases = []
    for width in WIDTHS:
        cases.append(f"  results<{width}, {min(width, 32)}, 1>(64, {width}, 1);")
        if width in CLUSTER_WIDTHS:
            cases.append(f"  results<{width}, {width}, 8>(33, {width - 3}, 1);")
            cases.append(f"  results<{width}, {width}, 8>(7, {width - 8}, 3);")
    cases.append("  results<128, 16, 1>(50, 121, 1);")
    cases.append("  results<64, 64, 8>(64, 64, 8);")
    run(RESULTS.replace("@CASES@", "\n".join(cases)), tmp_path)


def test_every_piece_and_every_tile_once(tmp_path: Path) -> None:
    source = random.Random(3)
    cases = []
    for _ in range(60):
        tasks = source.randrange(1, 40)
        sizes = (tasks, source.randrange(1, 30), source.choice((1, 1, 4)), source.choice((1, tasks, 7)))
        cases.append(f"  pieces({', '.join(map(str, sizes))}, {source.randrange(1, 140)});")
    for begin, end, rarity in ((0, 0, 1), (0, 1, 1), (3, 3, 1), (0, 32, 2), (31, 33, 1), (5, 200, 3), (64, 300, 40)):
        cases.append(f"  tiles({begin}, {end}, {source.randrange(1000)}, {rarity});")
    run(WALKS.replace("@CASES@", "\n".join(cases)), tmp_path)
