// Attention of many rows and few keys on Hopper's wgmma, as to a short text: all keys of a task are one tile, which stays
// in shared memory while a block walks the task's rows. Time is that of reading queries and writing results.
//
// A piece of work is 64 rows of a task. A block has neighbouring pieces, so that keys and values are read once for all
// tasks that share them. A producer warp keeps a ring of query tiles full, with a ticket beside each; consumer warpgroups
// take the pieces in turns. Nothing else joins these: one computes or stores while the tiles of all are on their way. A
// stage is free again once its piece has read the keys, so that the ring also says when those may be replaced.
//
//   struct Config {
//     using Key = jitgen::bfloat16;           // of keys and the query: bfloat16 or float16
//     using Value = jitgen::bfloat16;         // of values, and probabilities are rounded to it
//     static constexpr int warpgroups = 3;    // consumers
//     static constexpr int keys = 64;         // of the tile: n of a wgmma
//     static constexpr int fewest = 1;        // keys at least
//     static constexpr int depth = 128;       // of a key, rounded up to a multiple of 16
//     static constexpr int width = 128;       // of a value, rounded up to n of a wgmma
//     static constexpr int stages = 6;        // tiles of the query: a multiple of `warpgroups`
//     static constexpr int slots = 2;         // tiles of keys and values: the next ones arrive while some are read
//     static constexpr int staged = 32;       // columns of results that a warp stages in shared memory at once
//     static constexpr bool in_pairs = false; // whether results are computed where sums are, two neighbours at a time
//     static constexpr bool masked = false;   // whether a mask may hide scores of keys that exist
//   };
//
// `Operands` is generated (attention.cu.j2). Shared memory: as attention_wgmma.cuh.
#pragma once

#include "jitgen/attention_walk.cuh"
#include "jitgen/attention_wgmma_rows.cuh"

namespace jitgen {

template <class Config>
struct ResidentShape {
  static constexpr int rows = 64;  // of a piece
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // of the last warpgroup one warp copies
  static constexpr int depth_chunks = (Config::depth + 63) / 64, width_chunks = (Config::width + 63) / 64;
  static constexpr int query_bytes = rows * 128 * depth_chunks;
  static constexpr int key_bytes = Config::keys * 128 * depth_chunks;
  static constexpr int value_bytes = Config::keys * 128 * width_chunks;
  static_assert(Config::stages % Config::warpgroups == 0, "a warpgroup takes stages in turns");
  static constexpr int copier_registers = Config::warpgroups == 3 ? 32 : 40;

  static constexpr int keys_at = Config::stages * query_bytes;
  static constexpr int staging_at = keys_at + Config::slots * (key_bytes + value_bytes);
  // Of results, as they are stored, 64 columns of a warp's 16 rows with the 128-byte swizzle; else see RowStaging.
  static constexpr int warp_bytes = Config::in_pairs ? 16 * 128 : RowStaging<Config>::warp_floats * 4;
  static constexpr int tickets_at = staging_at + consumers / 32 * warp_bytes;
  static constexpr int barriers_at = tickets_at + Config::stages * 16;
  static constexpr int bytes = barriers_at + (2 * Config::stages + Config::slots) * 8;
};

template <class Config, class Operands_>
struct ResidentBlock {
  using Operands = Operands_;
  using Shape = ResidentShape<Config>;

  const Operands& operands;
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`

  JITGEN_DEVICE uint32_t query_full(int stage) const { return base + Shape::barriers_at + stage * 16; }
  JITGEN_DEVICE uint32_t query_empty(int stage) const { return query_full(stage) + 8; }
  JITGEN_DEVICE uint32_t keys_full(int slot) const { return query_full(Config::stages) + slot * 8; }
  JITGEN_DEVICE uint32_t query(int stage) const { return base + stage * Shape::query_bytes; }
  JITGEN_DEVICE uint32_t keys(int slot) const {
    return base + Shape::keys_at + slot * (Shape::key_bytes + Shape::value_bytes);
  }
  // The task and the block of rows of a piece, and how many sets of keys came before its own.
  JITGEN_DEVICE int4* ticket(int stage) const { return reinterpret_cast<int4*>(memory + Shape::tickets_at) + stage; }
  JITGEN_DEVICE int row_blocks() const { return int((operands.packed_rows() + Shape::rows - 1) / Shape::rows); }
  // Of all blocks, which have equally many up to one; `block` may be the one behind the last.
  JITGEN_DEVICE int first_piece(int block) const {
    return int(int64_t(operands.tasks()) * row_blocks() * block / int(gridDim.x));
  }

  JITGEN_DEVICE void initialise() const {
    for (int stage = 0; stage < Config::stages; ++stage) {
      barrier_init(query_full(stage), 1);
      barrier_init(query_empty(stage), 4 * warp_arrivals);
    }
    for (int slot = 0; slot < Config::slots; ++slot) barrier_init(keys_full(slot), 1);
    barrier_init_fence();
  }
};

template <class Config, class Operands>
struct ResidentKernel : RowResults<Config, Operands, ResidentBlock<Config, Operands>> {
  using Block = ResidentBlock<Config, Operands>;
  using Shape = ResidentShape<Config>;
  using Task = typename Operands::Task;
  using Value = typename Config::Value;
  using Scores = Wgmma<typename Config::Key, Config::keys>;
  using Sums = Wgmma<Value, Config::width>;
  using Block::operands;
  using Block::memory;
  using Block::base;
  using Block::query_full;
  using Block::query_empty;
  using Block::keys_full;
  using Block::query;
  using Block::keys;
  using Block::ticket;
  using Block::row_blocks;
  using Block::first_piece;

  // One warp.
  JITGEN_DEVICE void produce() const {
    const int blocks = row_blocks(), begin = first_piece(blockIdx.x), count = first_piece(blockIdx.x + 1) - begin;
    int read = 0;           // pieces that have read their keys
    int first[Config::slots] = {};  // the first piece of the keys in a slot; `first[0]` is of the latest ones
    int sets = -1;
    Task task = {};
    const auto wait_for = [&](int pieces) {
      for (; read < pieces; ++read) {
        barrier_wait_in_place(query_empty(read % Config::stages), read / Config::stages & 1, "query_empty");
      }
    };
    for (int i = 0; i < count; ++i) {
      const int stage = i % Config::stages, number = (begin + i) / blocks, row_block = (begin + i) % blocks;
      bool other_keys = i == 0;
      if (i == 0 || row_block == 0) {
        const Task next = operands.task(number);
        other_keys = other_keys || !operands.shares_keys(task, next);
        task = next;
      }
      if (other_keys) {
        // The keys that are replaced were read by the pieces before those of the set behind them.
        wait_for(Config::slots > 1 ? first[Config::slots > 1 ? Config::slots - 2 : 0] : i);
#pragma unroll
        for (int slot = Config::slots - 1; slot > 0; --slot) first[slot] = first[slot - 1];
        first[0] = i;
        ++sets;
        if (threadIdx.x % 32 == 0) copy_keys(task, sets % Config::slots);
      }
      wait_for(i + 1 - Config::stages);
      if (threadIdx.x % 32 == 0) {
        *ticket(stage) = {number, row_block, sets, 0};
        barrier_arrive_expect(query_full(stage), Shape::query_bytes);
#pragma unroll
        for (int c = 0; c < Shape::depth_chunks; ++c) {
          operands.copy_query(query(stage) + c * 8192, task, c * 64, row_block * Shape::rows, query_full(stage));
        }
      }
    }
  }
  JITGEN_DEVICE void copy_keys(const Task& task, int slot) const {
    const uint32_t full = keys_full(slot);
    barrier_arrive_expect(full, Shape::key_bytes + Shape::value_bytes);
#pragma unroll
    for (int c = 0; c < Shape::depth_chunks; ++c) {
      operands.copy_key(keys(slot) + c * (Config::keys * 128), task, c * 64, 0, full);
    }
#pragma unroll
    for (int c = 0; c < Shape::width_chunks; ++c) {
      operands.copy_value(keys(slot) + Shape::key_bytes + c * (Config::keys * 128), task, c * 64, 0, full);
    }
  }

  JITGEN_DEVICE void consume() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    const int count = first_piece(blockIdx.x + 1) - first_piece(blockIdx.x);
    const float fold = operands.fold(), factor = fold * log2_e;
    const bool open = !Config::masked && operands.keys == Config::keys;
    int stage = warpgroup;
    uint32_t phase = 0;
#pragma unroll 1
    for (int i = warpgroup; i < count; i += Config::warpgroups) {
      barrier_wait_in_place(query_full(stage), phase, "query_full");
      const int4 piece = *ticket(stage);
      const int slot = piece.z % Config::slots, row = piece.y * Shape::rows;
      const Task task = operands.task(piece.x);
      const auto of_rows = operands.rows_of_thread(task, row + warp % 4 * 16 + lane / 4);
      barrier_wait_in_place(keys_full(slot), piece.z / Config::slots & 1, "keys_full");
      float scores[Config::keys / 2];
#pragma unroll
      for (int j = 0; j < Config::keys / 2; ++j) scores[j] = 0.0f;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Config::depth / 16; ++step) {
        const uint64_t a = descriptor_k_major(query(stage) + step / 4 * 8192) + step % 4 * 2;
        const uint64_t b = descriptor_k_major(keys(slot) + step / 4 * (Config::keys * 128)) + step % 4 * 2;
        Scores::template shared<0>(scores, a, b, step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(scores);
      if (open) {
        operands.template rule<true>(scores, task, of_rows, lane % 4 * 2);
      } else {
        operands.template rule<false>(scores, task, of_rows, lane % 4 * 2);
      }
      WgmmaRows rows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.row_max[r] = rows.base[r] = minus_infinity();
        rows.row_sum[r] = 0.0f;
      }
      float scale[2];
      online_softmax(scores, rows, scale, factor);
      uint32_t probabilities[Config::keys / 16][4];
      pack<Value>(probabilities, scores);
      float sums[Config::width / 2];
#pragma unroll
      for (int j = 0; j < Config::width / 2; ++j) sums[j] = 0.0f;
      const uint64_t values = descriptor_transposed(keys(slot) + Shape::key_bytes, Config::keys * 128);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Config::keys / 16; ++step) {
        Sums::template registers<1>(sums, probabilities[step], values + step * 128, step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(sums);
      warp_arrive(query_empty(stage));
      if constexpr (Config::in_pairs) {
        finish_in_pairs(task, row + warp % 4 * 16, sums, rows, fold);
      } else {
        this->template finish<true>(task, 0, row - warpgroup * Shape::rows, sums, rows, fold);
      }
      stage += Config::warpgroups;
      if (stage >= Config::stages) stage -= Config::stages, phase ^= 1;
    }
  }
  // Results that need no others of their row are computed in registers and staged as they are stored: half of the bytes,
  // and whole lines of memory at once.
  JITGEN_DEVICE void finish_in_pairs(
      const Task& task, int row, const float (&sums)[Config::width / 2], WgmmaRows& rows, float fold) const {
    const int lane = threadIdx.x % 32, packed_rows = int(operands.packed_rows());
    if (row >= packed_rows) return;
    const auto results = [&](int r) {
      const int own = row + lane / 4 + r * 8;
      float row_sum = rows.row_sum[r] + __shfl_xor_sync(0xffffffffu, rows.row_sum[r], 1);
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
      if (lane % 4 == 0 && own < packed_rows) operands.row_results(task, 0, own, rows.row_max[r] * fold, row_sum);
      return operands.results_in_pairs(task, smaller(own, packed_rows - 1), rows.row_max[r] * fold, row_sum);
    };
    const auto first = results(0), second = results(1);
    const int staging = Shape::staging_at + int(threadIdx.x / 32) * Shape::warp_bytes;
    const uint32_t to = base + staging + lane % 16 * 128;
#pragma unroll
    for (int column = 0; column < Config::width; column += 64) {
#pragma unroll
      for (int run = 0; run < 8 && column + run * 8 < Config::width; run += 2) {
        const float* const from = sums + (column / 8 + run) * 4;
        const uint32_t words[4] = {
            first(from[0], from[1]), second(from[2], from[3]), first(from[4], from[5]), second(from[6], from[7])};
        store_matrices(to + ((run + lane / 16) ^ lane % 8) * 16, words);
      }
      __syncwarp();
      uint4 runs[4];
#pragma unroll
      for (int turn = 0; turn < 4; ++turn) {
        const int m = turn * 4 + lane / 8;
        runs[turn] = *reinterpret_cast<const uint4*>(memory + staging + m * 128 + (lane % 8 ^ m % 8) * 16);
      }
      __syncwarp();
      const int e = column + lane % 8 * 8;
#pragma unroll
      for (int turn = 0; turn < 4; ++turn) {
        const int m = row + turn * 4 + lane / 8;
        if (m < packed_rows && e < int(operands.width)) operands.store_run(task, m, e, runs[turn]);
      }
    }
  }
};

template <class Config, class Operands>
JITGEN_DEVICE void attention_resident(const Operands& operands) {
  using Shape = ResidentShape<Config>;
  extern __shared__ __align__(1024) uint8_t attention_memory[];
  const ResidentKernel<Config, Operands> kernel{operands, attention_memory, shared_address(attention_memory)};
  waits_begin<false>();
  if (threadIdx.x == 0) kernel.initialise();
  if (threadIdx.x == Shape::consumers) operands.prefetch_maps();
  __syncthreads();
  next_kernel_may_start();
  previous_kernel_wait();
  if (threadIdx.x >= Shape::consumers) {
    registers_deal<Config::warpgroups, 1, true, Shape::copier_registers>();
    if (threadIdx.x < Shape::consumers + 32) kernel.produce();
  } else {
    registers_deal<Config::warpgroups, 1, false, Shape::copier_registers>();
    kernel.consume();
  }
}

}  // namespace jitgen
