// What a thread of a wgmma has of its two rows: probabilities by the online softmax, and results, which go through shared
// memory, so that a thread has neighbours of a row. For attention_wgmma.cuh and attention_resident.cuh.
#pragma once

#include "jitgen/attention_scores.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

// Rows lane / 4 and lane / 4 + 8 of its warp's 16. Probabilities are 2^(score * factor - base).
struct WgmmaRows {
  float row_max[2], row_sum[2], base[2];
};

// Where results are staged: some columns of a warp's 16 rows; each row is padded by 8 floats (banks). Behind them are a
// row's greatest score and its sum.
template <class Config>
struct RowStaging {
  static constexpr int chunk = Config::staged;
  static constexpr int pitch = chunk + 8;
  static constexpr int warp_floats = 16 * pitch + 32;
  static_assert(32 % (chunk / 8) == 0 && Config::width % chunk == 0, "a lane has the same columns of each row it stores");
};

// Keeps the compiler from moving accesses of accumulators across: a wgmma writes them until it was waited for.
template <int n>
JITGEN_DEVICE void settle(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// One step of the online softmax (Milakov and Gimelshein, 2018): scores become probabilities, `rows` follow, and `scale`
// is what earlier sums have to be multiplied with. Returns whether the base of one of the warp's rows has moved.
template <int n>
JITGEN_DEVICE bool online_softmax(float (&scores)[n], WgmmaRows& rows, float (&scale)[2], float factor) {
  bool moves = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_max = rows.row_max[r];
#pragma unroll
    for (int i = 0; i < n / 4; ++i) row_max = fmaxf(row_max, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
    row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
    rows.row_max[r] = row_max;
    moves |= move_base(rows.base[r], scale[r], row_max, factor);
    const float base = finite_base(rows.base[r]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& probability = scores[i * 4 + r * 2 + j];
        probability = exp2_normal(__fmaf_rn(probability, factor, -base));
        sum += probability;
      }
    }
    rows.row_sum[r] = __fmaf_rn(rows.row_sum[r], scale[r], sum);
  }
  return __any_sync(0xffffffffu, moves);
}
// Probabilities as the left operand of a product.
template <class Value, int n>
JITGEN_DEVICE void pack(uint32_t (&probabilities)[n / 8][4], const float (&scores)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) {
    probabilities[i / 4][i % 4] = packed_pair<Value>(scores[i * 2], scores[i * 2 + 1]);
  }
}

// What consumers do with sums. `Block` has the operands, the shared memory, and in its `Shape` where results are staged.
template <class Config, class Operands, class Block>
struct RowResults : Block {
  using Task = typename Operands::Task;
  using Staging = RowStaging<Config>;

  JITGEN_DEVICE float* staging() const {
    return reinterpret_cast<float*>(Block::memory + Block::Shape::staging_at) + threadIdx.x / 32 * Staging::warp_floats;
  }
  // The greatest scores and the sums of this warp's rows, staged behind the columns; `scale` is what its products are
  // still to be multiplied with, so that probabilities are exp(score - row_max), as results know them: 1 where `exact`,
  // when bases are the greatest scores.
  template <bool exact = false>
  static JITGEN_DEVICE void stage_rows(float* of_rows, WgmmaRows& rows, float fold, float (&scale)[2]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_one = exact || rows.base[r] == minus_infinity();
      scale[r] = is_one ? 1.0f : exp2_normal(rows.base[r] - rows.row_max[r] * (fold * log2_e));
      rows.row_sum[r] += __shfl_xor_sync(0xffffffffu, rows.row_sum[r], 1);
      rows.row_sum[r] += __shfl_xor_sync(0xffffffffu, rows.row_sum[r], 2);
      if (lane % 4 == 0) {
        of_rows[lane / 4 + r * 8] = rows.row_max[r] * fold;
        of_rows[16 + lane / 4 + r * 8] = rows.row_sum[r] * scale[r];
      }
    }
  }
  template <bool exact = false>
  JITGEN_DEVICE void finish(
      const Task& task, int range, int first, const float (&sums)[Config::width / 2], WgmmaRows& rows, float fold) const {
    constexpr int chunk = Staging::chunk, pitch = Staging::pitch, runs = chunk / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *const staging = this->staging(), *const of_rows = staging + 16 * pitch;
    const int row = first + warp * 16, packed_rows = int(Block::operands.packed_rows());
    if (row >= packed_rows) return;
    float scale[2];
    stage_rows<exact>(of_rows, rows, fold, scale);
    __syncwarp();
    if (lane < 16 && row + lane < packed_rows) {
      Block::operands.row_results(task, range, row + lane, of_rows[lane], of_rows[16 + lane]);
    }
    // A lane has the same one or two rows of every turn.
    constexpr int rows_of_lane = runs / 2;
    static_assert(rows_of_lane == 1 || rows_of_lane == 2, "staged columns of a warp");
    const int m = lane / runs, second = m + (rows_of_lane - 1) * 8, column = lane % runs * 8;
    const auto of_row = [&](int of_lane) {
      const int number = smaller(row + of_lane, packed_rows - 1);
      return Block::operands.results_of_row(task, range, number, of_rows[of_lane], of_rows[16 + of_lane]);
    };
    const auto results = of_row(m), second_results = of_row(second);
    const auto store = [&](const auto& results_of_row, int of_lane, int e) {
      const int live = smaller(8, int(Block::operands.width) - e);
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
