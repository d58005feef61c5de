"""The kernel of attention's gradients on the CPU: its threads, barriers and copies, against sums in double."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.attention_on_host import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

WHOLE = r"""
#include <functional>
#include "jitgen/attention_backward.cuh"

using jitgen::bfloat16;

template <int warps, int rows_of_tile, int d, int e, bool of_keys, bool overlaps, bool copied>
struct Config {
  using Element = bfloat16;
  static constexpr int warpgroups = warps, tile = rows_of_tile, stages = 2, products = 2;
  static constexpr int depth0 = d, depth1 = e, columns0 = d, columns1 = of_keys ? e : 0;
  static constexpr int slot0 = copied ? 0 : 2, slot1 = copied ? 1 : 3, block_copied = copied ? 3 : 1;
  static constexpr int tile_words = of_keys ? 2 : 0, block_words = of_keys ? 0 : 2, tile_copied = copied ? 3 : 4;
  static constexpr bool early = copied, masked = true, first_are_long = of_keys, overlap = overlaps, by_keys = of_keys;
};

// Heads of Q share those of K. A score is hidden where its key is more than `shift` above its row, and in stripes.
struct Problem {
  int tasks, heads, rows, keys, depth, width, shift;
  std::vector<bfloat16> q, k, v, g;
  std::vector<double> lse, delta;
  bool hides(int m, int n) const { return n > m + shift || (m + n) % 5 == 0; }
};

template <class Config>
struct Operands {
  static constexpr bool of_keys = Config::by_keys;
  struct Task { int row_head, key_head; };
  const Problem& problem;
  int rows, keys, depth, width;  // of the block's side and of the tile's
  std::vector<float>&out0, &out1;

  int tasks() const { return problem.tasks * (of_keys ? 1 : problem.heads); }
  int heads() const { return of_keys ? problem.heads : 1; }
  Task task(int number, int head) const {
    return of_keys ? Task{number * problem.heads + head, number} : Task{number, number / problem.heads};
  }
  struct BlockEnds { int first, end; };
  BlockEnds block_ends(const Task&, int first, int end) const { return {first, end}; }
  uint32_t visibility(const Task&, const BlockEnds& block, int tile_first, int tile_end) const {
    const int row_end = of_keys ? tile_end : block.end, key_first = of_keys ? block.first : tile_first;
    return key_first > row_end - 1 + problem.shift ? 0u : 1u;
  }
  template <int slot>
  int columns() const { return slot % 2 ? width : depth; }
  template <int number>
  int result_columns() const { return number ? width : depth; }
  template <int count>
  void words(uint32_t (&found)[count], const Task& task, int row) const {
    if constexpr (count == 2) {
      const int at = task.row_head * problem.rows + row;
      found[0] = uint32_t(__float_as_int(float(problem.lse[at])));
      found[1] = uint32_t(__float_as_int(float(problem.delta[at])));
    }
  }
  template <int count>
  void tile_words(uint32_t (&found)[count], const Task& task, int row) const { words(found, task, row); }
  template <int count>
  void block_words(uint32_t (&found)[count], const Task& task, int row) const { words(found, task, row); }
  template <class Block, class Tile>
  float weight(float product, const Block& of_block, const Tile& of_tile, int a, int b) const {
    const bool hidden = b >= keys || problem.hides(of_keys ? b : a, of_keys ? a : b);
    return hidden ? 0.0f : std::exp(product * 0.25f - __int_as_float(int(of_keys ? of_tile[0] : of_block[0])));
  }
  template <bool masked, class Block, class Tile>
  float first(
      float product, float& other, const Task&, const Block& of_block, const Tile& of_tile, int a, int b) const {
    if (!masked) std::abort();
    if (!Config::early) return product;
    other = weight(product, of_block, of_tile, a, b);
    return other;
  }
  template <bool masked, class Block, class Tile>
  float second(
      float kept, float dp, float& other, const Task&, const Block& of_block, const Tile& of_tile, int a, int b) const {
    if (!Config::early) other = kept = weight(kept, of_block, of_tile, a, b);
    return kept * (dp - __int_as_float(int(of_keys ? of_tile[1] : of_block[1]))) * 0.25f;
  }
  void copy(const std::vector<bfloat16>& from, int matrix, int count, int length, uint32_t to, int column, int row,
            int box, uint32_t barrier) const {
    for (int r = 0; r < box; ++r) {
      for (int c = 0; c < 64; ++c) {
        const bool exists = row + r < count && column + c < length;
        const uint32_t at = to + r * 128 + c * 2;
        const bfloat16 element = exists ? from[(size_t(matrix) * count + row + r) * length + column + c] : bfloat16{0};
        memcpy(block->memory + (at ^ (at >> 7 & 7) << 4), &element, 2);
      }
    }
    jitgen::barrier_copied(barrier, box * 128);
  }
  void copy_side(
      bool keys_side, int pair, uint32_t to, const Task& task, int column, int row, int box, uint32_t barrier) const {
    const int length = pair ? problem.width : problem.depth;
    if (keys_side) {
      copy(pair ? problem.v : problem.k, task.key_head, problem.keys, length, to, column, row, box, barrier);
    } else {
      copy(pair ? problem.g : problem.q, task.row_head, problem.rows, length, to, column, row, box, barrier);
    }
  }
  template <int pair>
  void copy_block(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    copy_side(of_keys, pair, to, task, column, row, jitgen::BackwardShape<Config>::block, barrier);
  }
  template <int slot>
  void copy_tile(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    copy_side(!of_keys, slot % 2, to, task, column, row, Config::tile, barrier);
  }
  template <int pair>
  bfloat16 element(bool keys_side, const Task& task, int row, int column) const {
    const int length = pair % 2 ? problem.width : problem.depth;
    const size_t of_key = size_t(task.key_head) * problem.keys + row;
    const size_t of_row = size_t(task.row_head) * problem.rows + row;
    const auto& from = keys_side ? (pair % 2 ? problem.v : problem.k) : (pair % 2 ? problem.g : problem.q);
    return from[(keys_side ? of_key : of_row) * length + column];
  }
  template <int pair>
  bfloat16 block_element(const Task& task, int row, int column) const {
    return element<pair>(of_keys, task, row, column);
  }
  template <int pair>
  bfloat16 tile_element(const Task& task, int row, int column) const {
    return element<pair>(!of_keys, task, row, column);
  }
  template <int number>
  void results(const Task& task, int row, int column, const float (&run)[8], int live) const {
    const int length = number ? width : depth, matrix = of_keys ? task.key_head : task.row_head;
    std::vector<float>& out = number ? out1 : out0;
    for (int j = 0; j < live; ++j) {
      float& element = out[(size_t(matrix) * rows + row) * length + column + j];
      if (!std::isnan(element)) std::printf("written twice\n"), std::exit(1);
      element = run[j];
    }
  }
};

void compare(const char* name, const std::vector<float>& found, const std::vector<double>& wanted) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]), norm += wanted[i] * wanted[i];
  }
  if (difference <= 1e-4 * norm) return;
  std::printf("%s: %g of %g\n", name, std::sqrt(difference), std::sqrt(norm));
  std::exit(1);
}

template <class C>
void run(const Problem& problem, std::vector<float>& out0, std::vector<float>& out1, int blocks) {
  using Shape = jitgen::BackwardShape<C>;
  const int a = C::by_keys ? problem.keys : problem.rows, b = C::by_keys ? problem.rows : problem.keys;
  const Operands<C> operands{problem, a, b, problem.depth, problem.width, out0, out1};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Block>> all;
  std::vector<std::unique_ptr<Meeting>> meetings;
  for (int number = 0; number < blocks; ++number) {
    all.push_back(std::make_unique<Block>(Shape::bytes));
    meetings.push_back(std::make_unique<Meeting>(Shape::threads));
    all[number]->all = meetings[number].get();
    for (int thread = 0; thread < Shape::threads; ++thread) {
      threads.emplace_back([&, number, thread] {
        threadIdx.x = thread, blockIdx.x = number, gridDim.x = blocks;
        block = all[number].get(), warp = &block->warps[thread / 32];
        const jitgen::BackwardKernel<C, Operands<C>> kernel{operands, block->memory, 0};
        if (thread == 0) kernel.initialise();
        __syncthreads();
        if (thread >= Shape::consumers) {
          kernel.produce();
        } else {
          kernel.consume();
        }
      });
    }
  }
  for (auto& each : threads) each.join();
}

template <int warps, int tile_of_rows, int tile_of_keys, int block_d, int block_e, bool overlaps, bool copied = true>
void whole(int tasks, int heads, int rows, int keys, int depth, int width, int shift, int blocks) {
  std::srand(rows + keys);
  const auto random = [](size_t count) {
    std::vector<bfloat16> found(count);
    for (auto& each : found) each = jitgen::store<bfloat16>(float(std::rand() % 2001 - 1000) / 500.0f);
    return found;
  };
  const size_t of_rows = size_t(tasks) * heads * rows, of_keys = size_t(tasks) * keys;
  Problem problem{tasks, heads, rows, keys, depth, width, shift, random(of_rows * depth), random(of_keys * depth),
                  random(of_keys * width), random(of_rows * width), {}, {}};
  std::vector<double> dq(of_rows * depth), dk(of_keys * depth), dv(of_keys * width);
  for (size_t row = 0; row < of_rows; ++row) {
    const int m = row % rows;
    const size_t first = row / rows / heads * keys;
    std::vector<double> scores(keys), products(keys);
    double total = 0, delta = 0;
    for (int n = 0; n < keys; ++n) {
      for (int d = 0; d < depth; ++d) {
        scores[n] += 0.25 * jitgen::load(problem.q[row * depth + d]) * jitgen::load(problem.k[(first + n) * depth + d]);
      }
      for (int e = 0; e < width; ++e) {
        products[n] += jitgen::load(problem.g[row * width + e]) * jitgen::load(problem.v[(first + n) * width + e]);
      }
      if (!problem.hides(m, n)) total += std::exp(scores[n]);
    }
    for (int n = 0; n < keys; ++n) {
      if (!problem.hides(m, n)) delta += std::exp(scores[n]) / total * products[n];
    }
    problem.lse.push_back(std::log(total)), problem.delta.push_back(delta);
    for (int n = 0; n < keys; ++n) {
      if (problem.hides(m, n)) continue;
      const double weight = std::exp(scores[n]) / total, ds = weight * (products[n] - delta) * 0.25;
      for (int d = 0; d < depth; ++d) {
        dq[row * depth + d] += ds * jitgen::load(problem.k[(first + n) * depth + d]);
        dk[(first + n) * depth + d] += ds * jitgen::load(problem.q[row * depth + d]);
      }
      for (int e = 0; e < width; ++e) dv[(first + n) * width + e] += weight * jitgen::load(problem.g[row * width + e]);
    }
  }
  std::vector<float> found_q(dq.size(), NAN), found_k(dk.size(), NAN), found_v(dv.size(), NAN);
  run<Config<warps, tile_of_keys, block_d, block_e, false, overlaps, copied>>(problem, found_q, found_q, blocks);
  run<Config<warps, tile_of_rows, block_d, block_e, true, overlaps, copied>>(problem, found_k, found_v, blocks);
  compare("dQ", found_q, dq), compare("dK", found_k, dk), compare("dV", found_v, dv);
}

int main() { @CASE@ }
"""


CASES = {
    "one warpgroup": "whole<1, 32, 32, 64, 64, false>(2, 1, 70, 40, 64, 64, 1000, 1);",
    "overlapped, causal, two blocks": "whole<2, 64, 32, 32, 96, true>(1, 1, 150, 260, 24, 88, 0, 2);",
    "heads that share keys": "whole<1, 64, 64, 64, 32, false>(2, 3, 65, 63, 40, 32, 3, 2);",
    "keys that no row sees": "whole<2, 32, 64, 64, 64, true>(1, 2, 20, 300, 64, 64, 1, 2);",
    "element by element": "whole<1, 64, 32, 64, 96, true, false>(2, 2, 70, 90, 60, 70, 3, 2);",
    "one row, one key": "whole<1, 32, 32, 64, 64, false>(1, 1, 2, 1, 8, 8, 9, 1);",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case: case == "one row, one key")
def test_the_whole_kernel(case: str, tmp_path: Path) -> None:
    run(WHOLE.replace("@CASE@", CASES[case]), tmp_path, "attention_backward")
