// Results of the attention kernel on wgmma where a cluster shares keys: it adds up what its blocks have. See
// attention_wgmma.cuh.
#pragma once

#include "jitgen/attention_wgmma_produce.cuh"

namespace jitgen {

// What consumers do with sums.
template <class Config, class Operands>
struct AttentionResults : RowResults<Config, Operands, AttentionProducer<Config, Operands>> {
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
  using Stored = RowResults<Config, Operands, AttentionProducer<Config, Operands>>;
  using Stored::stage_rows;

  // Where a cluster shares keys: each block leaves what it has where its query and tiles were; block r adds up its share of
  // the results, by rank.
  JITGEN_DEVICE void leave(const float (&sums)[Config::width / 2], Rows& rows, float fold) const {
    if constexpr (Config::most_splits > 1) {
      float* const to = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * Shape::split_floats;
      float scale[2];
      stage_rows(to + 16 * Shape::split_pitch, rows, fold, scale);
      Stored::template spread<0, Config::width>(0, to, sums, scale);
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
};

}  // namespace jitgen
