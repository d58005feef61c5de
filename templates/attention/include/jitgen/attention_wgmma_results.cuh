// Results of the attention kernel on wgmma: sums go through shared memory, so that a thread has neighbours of a row, and a
// cluster that shares keys adds up what its blocks have. See attention_wgmma.cuh.
#pragma once

#include "jitgen/attention_wgmma_produce.cuh"

namespace jitgen {

// What consumers do with sums.
template <class Config, class Operands>
struct AttentionResults : AttentionProducer<Config, Operands> {
  using Block = AttentionBlock<Config, Operands>;
  using Shape = AttentionShape<Config>;
  using Task = typename Operands::Task;
  using Rows = typename Block::Rows;
  using Block::operands;
  using Block::memory;
  using Block::base;
  using Block::rank;
  using Block::splits;
  using Block::range;

  JITGEN_DEVICE float* staging() const {
    return reinterpret_cast<float*>(memory + Shape::staging_at) + threadIdx.x / 32 * Shape::warp_floats;
  }
  // The greatest scores and the sums of this warp's rows, staged behind the columns; `scale` is what its products are
  // still to be multiplied with, so that probabilities are exp(score - row_max), as results know them.
  static JITGEN_DEVICE void stage_rows(float* of_rows, Rows& rows, float fold, float (&scale)[2]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = rows.base[r] == minus_infinity() ? 1.0f : exp2_normal(rows.base[r] - rows.row_max[r] * (fold * log2_e));
      rows.row_sum[r] += __shfl_xor_sync(0xffffffffu, rows.row_sum[r], 1);
      rows.row_sum[r] += __shfl_xor_sync(0xffffffffu, rows.row_sum[r], 2);
      if (lane % 4 == 0) {
        of_rows[lane / 4 + r * 8] = rows.row_max[r] * fold;
        of_rows[16 + lane / 4 + r * 8] = rows.row_sum[r] * scale[r];
      }
    }
  }
  JITGEN_DEVICE void finish(
      int number, int range, int first, const float (&sums)[Config::width / 2], Rows& rows, float fold) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, runs = chunk / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Task task = operands.task(number);
    float *const staging = this->staging(), *const of_rows = staging + 16 * pitch;
    const int row = first + warp * 16, packed_rows = int(operands.packed_rows());
    if (row >= packed_rows) return;
    float scale[2];
    stage_rows(of_rows, rows, fold, scale);
    __syncwarp();
    if (lane < 16 && row + lane < packed_rows) {
      operands.row_results(task, range, row + lane, of_rows[lane], of_rows[16 + lane]);
    }
    // A lane has the same one or two rows of every turn.
    constexpr int rows_of_lane = runs / 2;
    static_assert(rows_of_lane == 1 || rows_of_lane == 2, "staged columns of a warp");
    const int m = lane / runs, second = m + (rows_of_lane - 1) * 8, column = lane % runs * 8;
    const auto of_row = [&](int of_lane) {
      const int number = smaller(row + of_lane, packed_rows - 1);
      return operands.results_of_row(task, range, number, of_rows[of_lane], of_rows[16 + of_lane]);
    };
    const auto results = of_row(m), second_results = of_row(second);
    const auto store = [&](const auto& results_of_row, int of_lane, int e) {
      const int live = smaller(8, int(operands.width) - e);
      if (row + of_lane >= packed_rows || live <= 0) return;
      const float4* const from = reinterpret_cast<const float4*>(staging + of_lane * pitch + column);
      const float4 low = from[0], high = from[1];
      const float of_run[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      results_of_row(e, of_run, live);
    };
#pragma unroll 1
    for (int turn = 0; turn < Config::width / chunk; ++turn) {
      if (turn > 0) __syncwarp();
      spread<0, chunk>(turn, staging, sums, scale);
      __syncwarp();
      store(results, m, turn * chunk + column);
      if constexpr (rows_of_lane > 1) store(second_results, second, turn * chunk + column);
    }
  }

  // Where a cluster shares keys: each block leaves what it has where its query and tiles were; block r adds up its share of
  // the results, by rank.
  JITGEN_DEVICE void leave(const float (&sums)[Config::width / 2], Rows& rows, float fold) const {
    if constexpr (Config::most_splits > 1) {
      float* const to = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * Shape::split_floats;
      float scale[2];
      stage_rows(to + 16 * Shape::split_pitch, rows, fold, scale);
      spread<0, Config::width>(0, to, sums, scale);
      proxy_fence();  // the next piece's tiles are copied there
    }
  }
  JITGEN_DEVICE void finish_split(int number, int range, int first) const {
    if constexpr (Config::most_splits > 1) {
      constexpr int pitch = Shape::split_pitch, runs = Config::width / 8;
      const Task task = operands.task(number);
      const int all = smaller(int(operands.packed_rows()) - first, Shape::rows) * runs;
      const int last = all * (rank + 1) / splits;
#pragma unroll 1
      for (int i = all * rank / splits + threadIdx.x; i < last; i += Shape::consumers) {
        const int m = i / runs, e = i % runs * 8, live = smaller(8, int(operands.width) - e);
        const uint32_t staged = base + m / 16 * (Shape::split_floats * 4);
        const uint32_t of_row = staged + (16 * pitch + m % 16) * 4, from = staged + (m % 16 * pitch + e) * 4;
        float row_max = minus_infinity(), row_sum = 0.0f, of_run[8];
        // Four blocks are asked at once; beyond the last one, the last one again.
#pragma unroll 1
        for (int first_rank = 0; first_rank < splits; first_rank += 4) {
          float maxima[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) maxima[k] = load_remote_float(of_row, smaller(first_rank + k, splits - 1));
#pragma unroll
          for (int k = 0; k < 4; ++k) row_max = fmaxf(row_max, maxima[k]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) of_run[j] = 0.0f;
#pragma unroll 1
        for (int first_rank = 0; first_rank < splits; first_rank += 4) {
          float maxima[4], totals[4];
          float4 low[4], high[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int r = smaller(first_rank + k, splits - 1);
            maxima[k] = load_remote_float(of_row, r), totals[k] = load_remote_float(of_row + 64, r);
            low[k] = load_remote(from, r), high[k] = load_remote(from + 16, r);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (first_rank + k >= splits) break;
            const float scale = maxima[k] == minus_infinity() ? 1.0f : exp2_normal((maxima[k] - row_max) * log2_e);
            row_sum = __fmaf_rn(scale, totals[k], row_sum);
            const float more[8] = {low[k].x, low[k].y, low[k].z, low[k].w, high[k].x, high[k].y, high[k].z, high[k].w};
#pragma unroll
            for (int j = 0; j < 8; ++j) of_run[j] = __fmaf_rn(scale, more[j], of_run[j]);
          }
        }
        if (e == 0) operands.row_results(task, range, first + m, row_max, row_sum);
        if (live > 0) operands.results_of_row(task, range, first + m, row_max, row_sum)(e, of_run, live);
      }
    }
  }
  // Registers can be indexed by constants only. So there is code for every turn, and only that of `wanted` is executed.
  template <int turn, int chunk>
  static JITGEN_DEVICE void spread(
      int wanted, float* staging, const float (&sums)[Config::width / 2], const float (&scale)[2]) {
    constexpr int pitch = chunk + 8;
    if constexpr (turn < Config::width / chunk) {
      if (wanted == turn) {
        const int lane = threadIdx.x % 32;
        float* const corner = staging + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < chunk / 8; ++i) {
          const float* const from = sums + (turn * (chunk / 8) + i) * 4;
          *reinterpret_cast<float2*>(corner + i * 8) = make_float2(from[0] * scale[0], from[1] * scale[0]);
          *reinterpret_cast<float2*>(corner + i * 8 + 8 * pitch) = make_float2(from[2] * scale[1], from[3] * scale[1]);
        }
      }
      spread<turn + 1, chunk>(wanted, staging, sums, scale);
    }
  }
};

}  // namespace jitgen
