// Results of the attention kernel of few rows: what warps have is added up in their order, then what the blocks of a cluster
// have, by rank. See attention_decode.cuh.
#pragma once

#include "jitgen/attention_scores.cuh"

namespace jitgen {

template <class Config>
struct DecodeShape {
  static constexpr int threads = Config::warps * 32;
  static constexpr int keys = Config::warps * 16;  // of a tile
  static constexpr int rows = Config::row_tiles * 8;

  // What a warp has: sums, each row padded by 4 floats (banks), and each row's greatest score, base and sum of probabilities.
  static constexpr int pitch = Config::width + 4;
  static constexpr int warp_floats = rows * pitch + 3 * rows;
  // What a block gets from its cluster: its share of the runs of 8 columns, and the greatest scores and sums of all rows.
  static constexpr int runs = rows * (Config::width / 8);
  static constexpr int inbox_floats =
      Config::most_splits > 1 ? (runs + Config::most_splits) * 8 + Config::most_splits * rows * 2 : 0;
  static constexpr int bytes = (Config::warps * warp_floats + inbox_floats) * 4;
};

// A block, as each of its threads sees it.
template <class Config, class Operands>
struct DecodeResults {
  using Shape = DecodeShape<Config>;
  using Task = typename Operands::Task;
  static constexpr int row_tiles = Config::row_tiles, own_rows = 2 * row_tiles;  // rows of a lane
  static constexpr int value_runs = Config::width / 64;

  const Operands& operands;
  float* const memory;
  const uint32_t base;  // the address of `memory`
  const int rank;       // this block's, in a cluster that shares keys
  const int splits;     // blocks of that cluster; else 1

  struct Rows {
    float row_max[own_rows], row_sum[own_rows], base[own_rows];  // the sums of this lane's keys alone
  };
  using Sums = float[value_runs][4][row_tiles][4];

  JITGEN_DEVICE float* of_warp(int warp) const { return memory + warp * Shape::warp_floats; }
  // Of a row of a warp: the greatest score, the base and the sum of probabilities, `Shape::rows` floats apart.
  JITGEN_DEVICE float* of_row(int warp, int row) const { return of_warp(warp) + Shape::rows * Shape::pitch + row; }

  JITGEN_DEVICE void leave(const Sums& sums, Rows& rows) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      const int tile = r / 2, row = tile * 8 + lane % 4 * 2 + r % 2;
#pragma unroll
      for (int step = 4; step < 32; step *= 2) rows.row_sum[r] += __shfl_xor_sync(0xffffffffu, rows.row_sum[r], step);
      if (lane / 4 == 0) {
        float* const to = of_row(warp, row);
        to[0] = rows.row_max[r];
        to[Shape::rows] = rows.base[r];
        to[2 * Shape::rows] = rows.row_sum[r];
      }
#pragma unroll
      for (int run = 0; run < value_runs; ++run) {
        float4* const to = reinterpret_cast<float4*>(of_warp(warp) + row * Shape::pitch + run * 64 + lane / 4 * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto& low = sums[run][half * 2][tile];
          const auto& high = sums[run][half * 2 + 1][tile];
          to[half] = float4{low[r % 2], low[r % 2 + 2], high[r % 2], high[r % 2 + 2]};
        }
      }
    }
  }
  struct Run {
    float sums[8], row_max, row_sum;  // of probabilities 2^(score * factor - row_max * factor)
  };
  // What all warps of this block have of 8 neighbouring columns of a row.
  JITGEN_DEVICE Run joined(int row, int e, float factor) const {
    Run run;
    run.row_max = minus_infinity();
    run.row_sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::warps; ++w) run.row_max = fmaxf(run.row_max, of_row(w, row)[0]);
    const float from = finite_base(__fmul_rn(run.row_max, factor));
#pragma unroll
    for (int j = 0; j < 8; ++j) run.sums[j] = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::warps; ++w) {
      const float* const rows = of_row(w, row);
      const float scale = exp2_normal(rows[Shape::rows] - from);
      run.row_sum = __fmaf_rn(scale, rows[2 * Shape::rows], run.row_sum);
      const float4* const at = reinterpret_cast<const float4*>(of_warp(w) + row * Shape::pitch + e);
      const float4 low = at[0], high = at[1];
      const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) run.sums[j] = __fmaf_rn(scale, more[j], run.sums[j]);
    }
    return run;
  }
  JITGEN_DEVICE void store(const Task& task, int range, int row, int e, const Run& run, float fold) const {
    const int live = smaller(8, int(operands.width) - e);
    if (e == 0) operands.row_results(task, range, row, run.row_max * fold, run.row_sum);
    if (live > 0) operands.results(task, range, row, e, run.sums, run.row_max * fold, run.row_sum, live);
  }
  JITGEN_DEVICE void finish(int task_number, int range, int first, float fold) const {
    constexpr int of_columns = Config::width / 8;
    const float factor = fold * log2_e;
    const bool exists = task_number < operands.tasks();
    const int rows = exists ? smaller(int(operands.packed_rows()) - first, Shape::rows) : 0, all = rows * of_columns;
    if (Config::most_splits == 1 || splits == 1) {
      if (!exists) return;
      const Task task = operands.task(task_number);
#pragma unroll 1
      for (int i = threadIdx.x; i < all; i += Shape::threads) {
        const int m = i / of_columns, e = i % of_columns * 8;
        store(task, range, first + m, e, joined(m, e, factor), fold);
      }
      return;
    }
    // Block r of the cluster gets the runs r, r + splits, ...; from each block behind one another.
    const int each = (all + splits - 1) / splits;
    float* const inbox = memory + Config::warps * Shape::warp_floats;
    const uint32_t inbox_at = base + Config::warps * Shape::warp_floats * 4;
    const int rows_at = (Shape::runs + Config::most_splits) * 8;
    cluster_wait_acquire("the start of the cluster's blocks");
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += Shape::threads) {
      const Run run = joined(i / of_columns, i % of_columns * 8, factor);
      const uint32_t to = inbox_at + (rank * each + i / splits) * 32, owner = i % splits;
      store_to_block(to, owner, float4{run.sums[0], run.sums[1], run.sums[2], run.sums[3]});
      store_to_block(to + 16, owner, float4{run.sums[4], run.sums[5], run.sums[6], run.sums[7]});
      if (i % of_columns == 0) {
        const uint32_t of_rows = inbox_at + (rows_at + (rank * Shape::rows + i / of_columns) * 2) * 4;
        for (int other = 0; other < splits; ++other) {
          store_to_block(of_rows, uint32_t(other), run.row_max);
          store_to_block(of_rows + 4, uint32_t(other), run.row_sum);
        }
      }
    }
    __syncwarp();
    cluster_arrive_release();
    cluster_wait_acquire("sums of the cluster's blocks");
    if (!exists) return;
    const Task task = operands.task(task_number);
#pragma unroll 1
    for (int i = rank + threadIdx.x * splits; i < all; i += Shape::threads * splits) {
      const int m = i / of_columns;
      Run run;
      run.row_max = minus_infinity();
      run.row_sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) run.sums[j] = 0.0f;
      for (int r = 0; r < splits; ++r) run.row_max = fmaxf(run.row_max, inbox[rows_at + (r * Shape::rows + m) * 2]);
      const float from = finite_base(__fmul_rn(run.row_max, factor));
      for (int r = 0; r < splits; ++r) {
        const float* const of_rows = inbox + rows_at + (r * Shape::rows + m) * 2;
        const float scale = exp2_normal(__fmul_rn(of_rows[0], factor) - from);
        const float* const more = inbox + (r * each + i / splits) * 8;
        run.row_sum = __fmaf_rn(scale, of_rows[1], run.row_sum);
#pragma unroll
        for (int j = 0; j < 8; ++j) run.sums[j] = __fmaf_rn(scale, more[j], run.sums[j]);
      }
      store(task, range, first + m, i % of_columns * 8, run, fold);
    }
  }
};

}  // namespace jitgen
