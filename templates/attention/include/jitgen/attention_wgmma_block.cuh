// Shared memory of the attention kernel on wgmma, its barriers, and what a block knows of its work. See attention_wgmma.cuh.
#pragma once

#include "jitgen/attention_walk.cuh"
#include "jitgen/attention_wgmma_rows.cuh"

namespace jitgen {

template <class Config>
struct AttentionShape : RowStaging<Config> {
  using Staging = RowStaging<Config>;
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // the last warpgroup copies
  static constexpr int rows = Config::warpgroups * 64;
  static constexpr int depth_chunks = (Config::depth + 63) / 64, width_chunks = (Config::width + 63) / 64;

  static constexpr int query_bytes = rows * 128 * depth_chunks;
  static constexpr int key_bytes = Config::keys * 128 * depth_chunks;
  static constexpr int value_bytes = Config::keys * 128 * width_chunks;

  // A cluster exchanges all columns of a warp's rows, where the query and the tiles were; wide rows take more than these.
  static constexpr int split_pitch = Config::width + 8;
  static constexpr int split_floats = 16 * split_pitch + 32;
  static constexpr int exchanged = Config::most_splits > 1 ? consumers / 32 * split_floats * 4 : 0;

  static constexpr int keys_at = query_bytes;
  static constexpr int values_at = keys_at + Config::stages * key_bytes;
  static constexpr int staging_at = values_at + Config::stages * value_bytes;
  static constexpr int staging_end = staging_at + consumers / 32 * Staging::warp_floats * 4;
  static constexpr int barriers_at = staging_end > exchanged ? staging_end : exchanged;
  static constexpr int tickets_at = barriers_at + (2 + 4 * Config::stages) * 8;
  static constexpr int bytes = tickets_at + 16 + (Config::stages + 1) / 2 * 16;

  // Registers of a thread that copies; those that compute share the rest.
  static constexpr int copier_registers = Config::warpgroups == 3 ? 32 : Config::keys > 128 || Config::blocks > 2 ? 24 : 40;
};

// Writes `rows` rows of `columns` elements to [chunk][row] in shared memory, whose chunks have `pitch` rows, with zeros
// beyond `live_rows` and `live_columns`; element(row, column) gives them. Called by 128 threads.
template <class Element, class At>
JITGEN_DEVICE void copy_elements(
    uint8_t* to, int pitch, int rows, int columns, int live_rows, int live_columns, const At& element) {
  const int pieces = columns / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < rows * pieces; i += 128) {
    const int row = i / pieces, piece = i % pieces;
    Vector<Element, 8> elements;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      elements[j] = row < live_rows && piece * 8 + j < live_columns ? element(row, piece * 8 + j) : Element{};
    }
    const int at = (piece / 8 * pitch + row) * 128 + ((piece % 8) ^ (row % 8)) * 16;
    store_vector(reinterpret_cast<Element*>(to + at), elements);
  }
}

// The same of runs of eight elements, `ahead` of which a thread reads at once; run(row, column) gives them.
template <int rows, int columns, int ahead, class At>
JITGEN_DEVICE void copy_runs(uint8_t* to, int pitch, int live_rows, int live_columns, const At& run) {
  constexpr int pieces = columns / 8;
  static_assert(rows * pieces % 128 == 0, "each thread copies as many");
#pragma unroll ahead
  for (int i = 0; i < rows * pieces; i += 128) {
    const int row = (i + int(threadIdx.x % 128)) / pieces, piece = (i + int(threadIdx.x % 128)) % pieces;
    const bool live = row < live_rows && piece * 8 < live_columns;
    const uint4 words = live ? run(row, piece * 8) : uint4{0u, 0u, 0u, 0u};
    *reinterpret_cast<uint4*>(to + (piece / 8 * pitch + row) * 128 + ((piece % 8) ^ (row % 8)) * 16) = words;
  }
}

// A block, as each of its threads sees it.
template <class Config, class Operands>
struct AttentionBlock {
  using Shape = AttentionShape<Config>;
  using Task = typename Operands::Task;
  static constexpr int stages = Config::stages;

  const Operands& operands;
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`
  const int rank;       // this block's, in a cluster that shares keys
  const int splits;     // blocks of that cluster; else 1

  struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    JITGEN_DEVICE void next() {
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  };

  JITGEN_DEVICE uint32_t query_full() const { return base + Shape::barriers_at; }
  JITGEN_DEVICE uint32_t query_empty() const { return query_full() + 8; }
  JITGEN_DEVICE uint32_t key_full(int stage) const { return query_full() + 16 + stage * 32; }
  JITGEN_DEVICE uint32_t key_empty(int stage) const { return key_full(stage) + 8; }
  JITGEN_DEVICE uint32_t value_full(int stage) const { return key_full(stage) + 16; }
  JITGEN_DEVICE uint32_t value_empty(int stage) const { return key_full(stage) + 24; }
  JITGEN_DEVICE int4* piece_ticket() const { return reinterpret_cast<int4*>(memory + Shape::tickets_at); }
  JITGEN_DEVICE volatile uint64_t* tile_ticket(int stage) const {
    return reinterpret_cast<volatile uint64_t*>(memory + Shape::tickets_at + 16) + stage;
  }
  JITGEN_DEVICE int keys_at(int stage) const { return Shape::keys_at + stage * Shape::key_bytes; }
  JITGEN_DEVICE int values_at(int stage) const { return Shape::values_at + stage * Shape::value_bytes; }

  JITGEN_DEVICE void initialise() const {
    barrier_init(query_full(), 1);
    barrier_init(query_empty(), Shape::consumers / 32 * warp_arrivals);
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(key_full(stage), Config::key_copied ? 1 : 128);
      barrier_init(value_full(stage), Config::value_copied ? 1 : 128);
      barrier_init(key_empty(stage), Shape::consumers / 32 * warp_arrivals);
      barrier_init(value_empty(stage), Shape::consumers / 32 * warp_arrivals);
    }
    barrier_init_fence();
  }

  // `sharing`: blocks that share each piece.
  JITGEN_DEVICE PieceWalk pieces(int sharing) const {
    const int tasks = operands.tasks();
    const int blocks = int((operands.packed_rows() + Shape::rows - 1) / Shape::rows);
    const int section = Config::masked ? tasks : 1;
    return {tasks, blocks, Operands::ranges, section, int(blockIdx.x) / sharing, int(gridDim.x) / sharing};
  }
  JITGEN_DEVICE TileRange range(int number) const {
    const int all = int((operands.keys + Config::keys - 1) / Config::keys);
    const int each = (all + Operands::ranges - 1) / Operands::ranges;
    const int begin = smaller(number * each, all);
    return {begin, smaller(begin + each, all)};
  }
  using Rows = WgmmaRows;
};

}  // namespace jitgen
