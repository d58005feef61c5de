"""Of the CUDA attention kernel, compiled for the CPU: each piece of work, seen tile and result once, in its place.

A warp is 32 threads of the CPU, which meet where the lanes of a warp exchange something.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from jitgen.families.attention.forward.wgmma import WIDTHS
from tests.attention_on_host import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

WALKS = r"""
#include "jitgen/attention_shown.cuh"
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
      jitgen::MaskedTiles<2> walk(begin, end);
      const auto kind = [&](int tile, int w) { return kinds.at(w ? tile : end + begin - 1 - tile); };
      const auto look = [&](int tile, bool exists, int w) { return exists ? kind(tile, w) : 0; };
      for (int tile = end - 1; tile >= begin; --tile) {
        if (!((kind(tile, 0) | kind(tile, 1)) & 1)) continue;
        CHECK(walk.next(look) && walk.tile == tile && walk.open == bool(kind(tile, 0) & 2));
        for (int w = 0; w < 2; ++w) {
          const jitgen::TileTicket ticket(walk.ticket, w);
          CHECK(ticket.tile == tile && ticket.seen == bool(kind(tile, w) & 1));
          CHECK(ticket.open == bool(kind(tile, w) & 2));
          CHECK(!ticket.ends && jitgen::TileTicket(walk.ticket | jitgen::TileTicket::of_end, w).last);
          bool more = false, in_group = tile / 32 == begin / 32;
          for (int later = tile - 1; later >= begin; --later) more |= kind(later, w) & 1;
          CHECK(ticket.last == (!more && in_group));
        }
      }
      CHECK(!walk.next(look));
      const jitgen::Ends ends = jitgen::ends_of_warp({lane - 7, 5 - lane});
      CHECK(ends.low == -7 && ends.high == 5);
    });
  }
  for (auto& each : threads) each.join();
  jitgen::AllTiles<1> all(begin, end);
  const auto sees = [](int, bool, int) { return 1u; };
  for (int tile = end - 1; tile >= begin; --tile) {
    CHECK(all.next(sees) && all.tile == tile && jitgen::TileTicket(all.ticket, 0).last == (tile == begin));
  }
  CHECK(!all.next(sees));
}

// A mask that begins `skew` bytes behind an aligned address and shows about one key in `rarity` of `begin` to `end`:
// what is found has the first and the last of these, and is at most 15 keys longer at either end.
void shown(int keys, int skew, int begin, int end, int rarity, bool inverted) {
  std::vector<uint8_t> memory(keys + 64, 1 - inverted);
  const int aligned = int(-reinterpret_cast<uintptr_t>(memory.data()) & 15);
  uint8_t* const mask = memory.data() + aligned + skew;
  int first = keys, last = -1;
  for (int key = 0; key < keys; ++key) {
    const bool is_shown = key >= begin && key < end && std::rand() % rarity == 0;
    mask[key] = is_shown != inverted;
    if (is_shown) first = std::min(first, key), last = key;
  }
  const auto shows = [&](int64_t from, int64_t to, const jitgen::Flags& flags) {
    CHECK(from >= 0 && from <= to && to < keys && to - from < 16);
    return inverted ? !flags.all : flags.some;
  };
  std::vector<std::thread> threads;
  for (int lane = 0; lane < 32; ++lane) {
    threads.emplace_back([&, lane] {
      threadIdx.x = 64 + lane;
      const jitgen::Ends found = jitgen::shown_keys(mask, keys, shows);
      if (last < 0) {
        CHECK(found.low == found.high);
      } else {
        CHECK(found.low >= 0 && found.low <= first && first - found.low < 16);
        CHECK(found.high <= keys && found.high > last && found.high - last <= 16);
      }
    });
  }
  for (auto& each : threads) each.join();
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
  auto results_of_row(const Task& task, int range, int row, float top, float total) const {
    return [=, this](int e, const float (&sums)[8], int live) { results(task, range, row, e, sums, top, total, live); };
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
            of_rows.row_max[r] = float(row);
            of_rows.base[r] = float(row) * jitgen::log2_e;
            of_rows.row_sum[r] = float(row + 1);
          }
          for (int i = 0; i < C::width / 2; ++i) {
            sums[i] = sum_of(number * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
          }
          if (splits > 1) {
            kernel.leave(sums, of_rows, 1.0f);
          } else {
            kernel.finish({}, 0, 0, sums, of_rows, 1.0f);
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

WHOLE = r"""
#include "jitgen/attention_decode.cuh"
#include "jitgen/attention_resident.cuh"
#include "jitgen/attention_wgmma.cuh"
using jitgen::bfloat16;

// (tasks, rows or keys, columns) of a batch; every fourth row of the mask sees no key at all.
// `row_tiles`: those of attention_decode.cuh, or 0 for the others: they differ in which scores a lane has. `box_keys`:
// of a box that attention_resident.cuh copies. Each `group` tasks have the same keys and values.
template <int row_tiles, int box_keys = 0, int group = 1>
struct Operands {
  static constexpr int own_rows = row_tiles ? 2 * row_tiles : 2;
  struct Task { int number; };
  struct Block { int first, last; };
  struct Rows { int row[own_rows]; };
  struct KeyRow { int task, n; };
  using ValueRow = KeyRow;
  using KeyRun = uint4;
  using ValueRun = uint4;
  static constexpr int ranges = 1;
  static constexpr bool query_is_vector = true;
  int count, rows, keys, depth, width, shift;
  const std::vector<bfloat16>&q, &k, &v;
  std::vector<float>&out, &tops, &totals;

  int tasks() const { return count; }
  int packed_rows() const { return rows; }
  Task task(int number) const { return {number}; }
  Block rows_of_block(const Task&, int first, int size) const {
    return {first, jitgen::smaller(first + size, rows) - 1};
  }
  bool hides(int row, int key) const { return row % 4 == 3 || key > row + shift; }
  template <int tile_keys>
  uint32_t visibility(const Task&, const Block& block, int tile) const {
    return tile * tile_keys > block.last + shift ? 0u : 1u;
  }
  Rows rows_of_thread(const Task&, int first) const {
    Rows found;
    for (int r = 0; r < own_rows; ++r) found.row[r] = first + (row_tiles ? r / 2 * 8 + r % 2 : 8 * r);
    return found;
  }
  float fold() const { return 0.25f; }
  template <bool open, int n>
  void rule(float (&scores)[n], const Task&, const Rows& of_rows, int first) const {
    if (open) std::abort();
    for (int i = 0; i < (row_tiles ? 2 : n / 2); ++i) {
      const int key = first + (row_tiles ? 8 * i : i / 2 * 8 + i % 2);
      for (int r = 0; r < own_rows; ++r) {
        float& score = scores[row_tiles ? r / 2 * 4 + i * 2 + r % 2 : i / 2 * 4 + r * 2 + i % 2];
        if (key >= keys || hides(of_rows.row[r], key)) score = jitgen::minus_infinity();
      }
    }
  }
  template <class T> T query(const Task& task, int m, int d) const { return q[(task.number * rows + m) * depth + d]; }
  bool shares_keys(const Task& one, const Task& other) const { return one.number / group == other.number / group; }
  // A box of 64 columns of a matrix of `all` rows, zero beyond the matrix.
  void box(const std::vector<bfloat16>& from, int matrix, int all, int columns, uint32_t to, int column, int row,
           int rows, uint32_t barrier) const {
    for (int i = 0; i < rows * 64; ++i) {
      const int m = row + i / 64, d = column + i % 64;
      const uint32_t at = to + i * 2, swizzled = at ^ (at >> 7 & 7) << 4;
      const bfloat16 element = m < all && d < columns ? from[(matrix * all + m) * columns + d] : bfloat16{0};
      memcpy(block->memory + swizzled, &element, 2);
    }
    jitgen::barrier_copied(barrier, rows * 128);
  }
  void copy_query(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    box(q, task.number, rows, depth, to, column, row, 64, barrier);
  }
  void copy_key(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    box(k, task.number / group, keys, depth, to, column, row, box_keys, barrier);
  }
  void copy_value(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    box(v, task.number / group, keys, width, to, column, row, box_keys, barrier);
  }
  bfloat16 key(const Task& task, int n, int d) const { return k[(task.number * keys + n) * depth + d]; }
  uint4 run(const std::vector<bfloat16>& from, int at) const {
    uint4 found;
    memcpy(&found, from.data() + at, 16);
    return found;
  }
  uint4 query_run(const Task& task, int m, int d) const { return run(q, (task.number * rows + m) * depth + d); }
  KeyRow key_row(const Task& task, int n) const { return {task.number, n}; }
  ValueRow value_row(const Task& task, int n) const { return {task.number, n}; }
  uint4 key_run(const KeyRow& row, int d) const { return run(k, (row.task * keys + row.n) * depth + d); }
  uint4 value_run(const ValueRow& row, int e) const { return run(v, (row.task * keys + row.n) * width + e); }
  uint4 key_words(const KeyRow&, const uint4& found) const { return found; }
  uint4 value_words(const ValueRow&, const uint4& found) const { return found; }
  bfloat16 value(const Task& task, int n, int e) const { return v[(task.number * keys + n) * width + e]; }
  void row_results(const Task& task, int, int row, float top, float total) const {
    tops[task.number * rows + row] = top, totals[task.number * rows + row] = total;
  }
  auto results_of_row(const Task& task, int range, int row, float top, float total) const {
    return [=, this](int e, const float (&sums)[8], int live) { results(task, range, row, e, sums, top, total, live); };
  }
  auto results_in_pairs(const Task&, int, float, float total) const {
    return [=](float low, float high) {
      const auto result = [&](float sum) { return jitgen::store<bfloat16>(total > 0 ? sum / total : 0.0f).bits; };
      return uint32_t(result(high)) << 16 | result(low);
    };
  }
  void store_run(const Task& task, int row, int e, const uint4& words) const {
    bfloat16 run[8];
    memcpy(run, &words, 16);
    for (int j = 0; j < 8; ++j) out[(task.number * rows + row) * width + e + j] = jitgen::load(run[j]);
  }
  void results(const Task& task, int, int row, int e, const float (&sums)[8], float, float total, int live) const {
    for (int j = 0; j < live; ++j) out[(task.number * rows + row) * width + e + j] = total > 0 ? sums[j] / total : 0.0f;
  }
};

template <int warps, int tile, int block_d, int block_e, int stage_columns, int splits, bool overlaps = true>
struct Config {
  using Key = bfloat16;
  using Value = bfloat16;
  static constexpr int warpgroups = warps, keys = tile, depth = block_d, width = block_e, stages = 2;
  static constexpr int staged = stage_columns, most_splits = splits;
  static constexpr bool query_copied = false, key_copied = false, value_copied = false, masked = true;
  static constexpr bool overlap = overlaps, take_turns = overlaps;
};

template <int warps_of_block, int tiles, int block_d, int block_e, int splits, bool is_whole>
struct Decode {
  using Key = bfloat16;
  using Value = bfloat16;
  static constexpr int warps = warps_of_block, row_tiles = tiles, ahead = 3 - tiles, most_splits = splits;
  static constexpr int depth = block_d, width = block_e;
  static constexpr bool whole = is_whole, masked = true;
};

template <
    int warps, int tile, int block_d, int block_e, int stage_count, int slot_count, int tasks_that_share,
    bool pairs = false>
struct Resident {
  using Key = bfloat16;
  using Value = bfloat16;
  static constexpr int warpgroups = warps, keys = tile, depth = block_d, width = block_e;
  static constexpr int fewest = 1, stages = stage_count, slots = slot_count, group = tasks_that_share;
  static constexpr int staged = block_e < 32 ? block_e : 32;
  static constexpr bool masked = true, in_pairs = pairs;
};

template <class C>
struct Wgmma {
  static constexpr int group = 1;
  static constexpr bool in_pairs = false;
  using Data = Operands<0>;
  using Shape = jitgen::AttentionShape<C>;
  using Kernel = jitgen::AttentionKernel<C, Data>;
  static int blocks(int, int, int clusters) { return clusters; }
  static void run(const Kernel& kernel) {
    if (threadIdx.x == 0) kernel.initialise();
    cluster->all->arrive_and_wait();
    if (threadIdx.x >= Shape::consumers) {
      kernel.produce();
    } else {
      kernel.consume();
    }
  }
  static uint8_t* memory() { return block->memory; }
};
template <class C>
struct FewKeys {
  static constexpr int group = C::group;
  static constexpr bool in_pairs = C::in_pairs;
  using Data = Operands<0, C::keys, C::group>;
  using Shape = jitgen::ResidentShape<C>;
  struct Kernel : jitgen::ResidentKernel<C, Data> {
    Kernel(const Data& data, uint8_t* memory, uint32_t base, int, int)
        : jitgen::ResidentKernel<C, Data>{data, memory, base} {}
  };
  static int blocks(int, int, int clusters) { return clusters; }
  static void run(const Kernel& kernel) {
    if (threadIdx.x == 0) kernel.initialise();
    cluster->all->arrive_and_wait();
    if (threadIdx.x < Shape::consumers) {
      kernel.consume();
    } else if (threadIdx.x < Shape::consumers + 32) {
      kernel.produce();
    }
  }
  static uint8_t* memory() { return block->memory; }
};
template <class C>
struct FewRows {
  static constexpr int group = 1;
  static constexpr bool in_pairs = false;
  using Data = Operands<C::row_tiles>;
  using Shape = jitgen::DecodeShape<C>;
  using Kernel = jitgen::DecodeKernel<C, Data>;
  static int blocks(int tasks, int rows, int) { return tasks * ((rows + Shape::rows - 1) / Shape::rows); }
  static void run(const Kernel& kernel) { kernel.run(); }
  static float* memory() { return reinterpret_cast<float*>(block->memory); }
};

template <class Of>
void whole(int tasks, int rows, int keys, int depth, int width, int shift, int clusters, int splits) {
  using Shape = typename Of::Shape;
  clusters = Of::blocks(tasks, rows, clusters);
  std::srand(rows + keys);
  const auto random = [](size_t count) {
    std::vector<bfloat16> found(count);
    for (auto& each : found) each = jitgen::store<bfloat16>(float(std::rand() % 2001 - 1000) / 500.0f);
    return found;
  };
  const int sets = tasks / Of::group;
  const auto q = random(tasks * rows * depth), k = random(sets * keys * depth), v = random(sets * keys * width);
  std::vector<float> out(tasks * rows * width, NAN), tops(tasks * rows, NAN), totals(tasks * rows, NAN);
  const typename Of::Data operands{tasks, rows, keys, depth, width, shift, q, k, v, out, tops, totals};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Meeting>> meetings;
  std::vector<Cluster> all(clusters);
  for (int number = 0; number < clusters * splits; ++number) blocks.push_back(std::make_unique<Block>(Shape::bytes));
  for (int number = 0; number < clusters; ++number) {
    meetings.push_back(std::make_unique<Meeting>(Shape::threads * splits));
    all[number].all = meetings.back().get();
    for (int rank = 0; rank < splits; ++rank) {
      all[number].blocks.push_back(blocks[number * splits + rank].get());
      meetings.push_back(std::make_unique<Meeting>(Shape::threads));
      all[number].blocks.back()->all = meetings.back().get();
    }
  }
  for (int number = 0; number < clusters * splits; ++number) {
    for (int thread = 0; thread < Shape::threads; ++thread) {
      threads.emplace_back([&, number, thread] {
        threadIdx.x = thread, blockIdx.x = number, gridDim.x = clusters * splits;
        block = blocks[number].get(), cluster = &all[number / splits], warp = &block->warps[thread / 32];
        Of::run(typename Of::Kernel{operands, Of::memory(), 0, number % splits, splits});
      });
    }
  }
  for (auto& each : threads) each.join();
  for (int row = 0; row < tasks * rows; ++row) {
    const int task = row / rows, m = row % rows, set = task / Of::group;
    double top = -INFINITY, total = 0, most = 0;
    std::vector<double> scores(keys), sums(width);
    for (int n = 0; n < keys; ++n) {
      for (int d = 0; d < depth; ++d) {
        scores[n] += 0.25 * jitgen::load(q[row * depth + d]) * jitgen::load(k[(set * keys + n) * depth + d]);
      }
      if (operands.hides(m, n)) scores[n] = -INFINITY;
      top = std::max(top, scores[n]);
    }
    for (int n = 0; n < keys && top > -INFINITY; ++n) {
      const double weight = std::exp(scores[n] - top);
      total += weight;
      for (int e = 0; e < width; ++e) sums[e] += weight * jitgen::load(v[(set * keys + n) * width + e]);
    }
    // Weights are rounded to 8 bits, and results in pairs; values are at most 2.
    bool right = total > 0 ? std::abs(tops[row] - top) < 1e-4 * (1 + std::abs(top)) : tops[row] == -INFINITY;
    right = right && std::abs(totals[row] - total) <= 1e-4 * total;
    for (int e = 0; e < width; ++e) {
      const double wanted = total > 0 ? sums[e] / total : 0.0;
      right = right && std::abs(out[row * width + e] - wanted) <= (Of::in_pairs ? 2 : 1) * 2.0 / 256 + 1e-4;
    }
    if (!right) {
      std::printf("task %d row %d: top %g for %g, total %g for %g\\n", task, m, tops[row], top, totals[row], total);
      std::exit(1);
    }
  }
}

int main() {
@CASES@
}
"""


@pytest.mark.quick(where=lambda width: width == 96)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_result_once_in_its_place(width: int, tmp_path: Path) -> None:
    cases = [f"results<{width}, {min(width, 32)}, 1>(64, {width}, 1);", f"results<{width}, 16, 1>(50, {width - 7}, 1);"]
    cases.append(f"results<{width}, 16, 8>(33, {width - 3}, 1);")
    cases.append(f"results<{width}, {min(width, 32)}, 8>(7, {width - 8}, 3);")
    run(RESULTS.replace("@CASES@", "\n".join(cases)), tmp_path, "attention")


CASES = {
    "a cluster of three, two blocks of rows, several rounds": (
        "Wgmma<Config<1, 32, 64, 64, 32, 8>>",
        "5, 70, 100, 64, 64, 30, 2, 3",
    ),
    "more blocks of a cluster than tiles": ("Wgmma<Config<1, 64, 64, 128, 32, 8>>", "2, 9, 60, 64, 128, 100, 2, 4"),
    "a cluster of two warpgroups, 96 columns": ("Wgmma<Config<2, 64, 32, 96, 32, 8>>", "3, 150, 333, 20, 90, 20, 1, 3"),
    "a cluster of three warpgroups, the last of which has no row": (
        "Wgmma<Config<3, 16, 32, 32, 32, 8>>",
        "2, 250, 400, 32, 32, 100, 1, 2",
    ),
    "one warpgroup, 96 columns": ("Wgmma<Config<1, 32, 32, 96, 32, 1>>", "3, 40, 70, 20, 90, 20, 2, 1"),
    "two warpgroups": ("Wgmma<Config<2, 32, 64, 64, 32, 1>>", "3, 150, 200, 64, 64, 5, 2, 1"),
    "three warpgroups, no turns": ("Wgmma<Config<3, 32, 32, 32, 32, 1, false>>", "2, 200, 90, 24, 30, 400, 1, 1"),
    "warpgroups that see other tiles": ("Wgmma<Config<3, 16, 32, 32, 32, 1>>", "2, 192, 700, 32, 32, 0, 2, 1"),
    "few keys": ("FewKeys<Resident<1, 32, 32, 32, 2, 1, 1>>", "3, 150, 20, 24, 30, 400, 2, 1"),
    "few keys, in pairs": ("FewKeys<Resident<2, 32, 64, 96, 4, 2, 1, true>>", "3, 150, 30, 64, 88, 20, 2, 1"),
    "few keys, in pairs, narrow": ("FewKeys<Resident<1, 16, 32, 16, 2, 1, 1, true>>", "2, 70, 9, 32, 16, 400, 1, 1"),
    "few keys, which two tasks share": ("FewKeys<Resident<2, 64, 64, 64, 4, 2, 2>>", "6, 100, 47, 64, 64, 30, 2, 1"),
    "few keys, more sets of them than stages": (
        "FewKeys<Resident<3, 16, 32, 96, 3, 2, 1>>",
        "11, 64, 7, 32, 90, 400, 1, 1",
    ),
    "a key, more blocks than pieces": ("FewKeys<Resident<2, 16, 80, 32, 2, 2, 1>>", "2, 70, 1, 72, 32, 400, 5, 1"),
    "few rows": ("FewRows<Decode<2, 1, 64, 128, 8, true>>", "3, 5, 300, 64, 128, 250, 0, 1"),
    "few rows in a cluster, of no whole runs": (
        "FewRows<Decode<2, 2, 64, 64, 8, false>>",
        "2, 14, 333, 40, 56, 400, 0, 3",
    ),
    "few rows, more blocks of a cluster than tiles": (
        "FewRows<Decode<4, 1, 96, 64, 8, true>>",
        "2, 11, 70, 96, 64, 60, 0, 4",
    ),
}
"""The kernel and its Config; tasks, M, N, D, E, the mask's shift, clusters and blocks of each."""


@pytest.mark.quick(where=lambda case: case.startswith(("a cluster", "few rows in", "few keys, ")))
@pytest.mark.parametrize("case", CASES)
def test_the_whole_kernel(case: str, tmp_path: Path) -> None:
    """All of its threads, barriers and exchanges on the CPU, over shared memory that is poisoned."""
    config, sizes = CASES[case]
    run(WHOLE.replace("@CASES@", f"  whole<{config}>({sizes});"), tmp_path, "attention")


def test_every_piece_and_every_tile_once(tmp_path: Path) -> None:
    source = random.Random(3)
    cases = []
    for _ in range(60):
        tasks = source.randrange(1, 40)
        sizes = (tasks, source.randrange(1, 30), source.choice((1, 1, 4)), source.choice((1, tasks, 7)))
        cases.append(f"  pieces({', '.join(map(str, sizes))}, {source.randrange(1, 140)});")
    for begin, end, rarity in ((0, 0, 1), (0, 1, 1), (3, 3, 1), (0, 32, 2), (31, 33, 1), (5, 200, 3), (64, 300, 40)):
        cases.append(f"  tiles({begin}, {end}, {source.randrange(1000)}, {rarity});")
    for keys in (0, 1, 15, 16, 17, 500, 2049, 6200):
        for begin, end in ((0, keys), (keys // 3, keys // 2), (keys - 1, keys), (0, min(keys, 1)), (0, 0)):
            arguments = (keys, source.randrange(16), begin, end, source.choice((1, 1, 20)))
            cases.append(f"  shown({', '.join(map(str, arguments))}, {source.choice(('true', 'false'))});")
    run(WALKS.replace("@CASES@", "\n".join(cases)), tmp_path, "attention")
