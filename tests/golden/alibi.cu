// jitgen 0.1.0: template attention/attention.cu.j2
// target sm_90a: wgmma, 64 rows a block, 1 warpgroups, 2 stages of 112 keys, 2 blocks a multiprocessor, shared by clusters of up to 8 blocks
// stages: contract over d; map; 2 x reduce over n; contract over n; map
// (N0, N1, N2, N3): score int64 key, score int64 row, query bfloat16 contiguous, key bfloat16 contiguous, score bfloat16 task, score int64 key, score int64 row, value bfloat16 contiguous, store
//     bfloat16 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/attention_wgmma.cuh>

using Index = int32_t;

struct Params {
  jitgen::TensorMap query_map;
  jitgen::TensorMap key_map;
  jitgen::TensorMap value_map;
  jitgen::Ramp<Index, 4> key_index;
  jitgen::Ramp<Index, 4> row_index;
  jitgen::Operand<const jitgen::bfloat16, Index, 4> query;
  jitgen::Operand<const jitgen::bfloat16, Index, 4> key;
  jitgen::Operand<const jitgen::bfloat16, Index, 4> score_input;
  jitgen::Ramp<Index, 4> key_index_2;
  jitgen::Ramp<Index, 4> row_index_2;
  jitgen::Operand<const jitgen::bfloat16, Index, 4> value;
  jitgen::Operand<jitgen::bfloat16, Index, 4> result;
  Index rows;
  Index keys;
  Index depth;
  Index width;
  Index batch_size0;
  Index batch_size1;
};
static_assert(
    sizeof(Params) == 640 && JITGEN_OFFSET(query_map) == 0 && JITGEN_OFFSET(key_map) == 128 &&
    JITGEN_OFFSET(value_map) == 256 && JITGEN_OFFSET(key_index) == 384 && JITGEN_OFFSET(row_index) == 404 &&
    JITGEN_OFFSET(query) == 424 && JITGEN_OFFSET(key) == 448 && JITGEN_OFFSET(score_input) == 472 &&
    JITGEN_OFFSET(key_index_2) == 496 && JITGEN_OFFSET(row_index_2) == 516 && JITGEN_OFFSET(value) == 536 &&
    JITGEN_OFFSET(result) == 560 && JITGEN_OFFSET(rows) == 584 && JITGEN_OFFSET(keys) == 588 &&
    JITGEN_OFFSET(depth) == 592 && JITGEN_OFFSET(width) == 596 && JITGEN_OFFSET(batch_size0) == 600 &&
    JITGEN_OFFSET(batch_size1) == 604, "the launch packs it so");

struct Config {
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int warpgroups = 1;
  static constexpr int blocks = 2;
  static constexpr int keys = 112;
  static constexpr int depth = 64;
  static constexpr int width = 64;
  static constexpr int stages = 2;
  static constexpr int staged = 32;
  static constexpr int most_splits = 8;
  static constexpr bool query_copied = true;
  static constexpr bool key_copied = true;
  static constexpr bool value_copied = true;
  static constexpr bool masked = true;
  static constexpr bool overlap = true;
  static constexpr bool take_turns = true;
};
using Shape = jitgen::AttentionShape<Config>;
static_assert(Shape::bytes == 76400, "shared memory as the launch has it");
static_assert(Shape::threads == 256, "threads as the launch has them");

struct Operands {
  const Params& constants;  // where the tensor maps are
  const Params params = constants;  // in registers
  Index rows = params.rows, keys = params.keys, depth = params.depth, width = params.width;
  static constexpr int ranges = 1;

  // One batch index: the offsets at which operands begin, and the values of those that have one alone.
  struct Task {
    Index z0;
    Index z1;
    Index key_index_at;
    Index row_index_at;
    Index query_at;
    Index key_at;
    Index score_input_at;
    Index key_index_2_at;
    Index row_index_2_at;
    Index value_at;
    Index result_at;
    float score_input_value;
  };
  // The ends of what the rows of a block have.
  struct Block {
    jitgen::Ends row_index_value;
  };
  // What a thread's rows r and r + 8 have.
  struct Rows {
    Index row_index_value[2];
    Index row_index_2_value[2];
  };

  JITGEN_DEVICE int tasks() const { return int(params.batch_size0 * params.batch_size1); }
  JITGEN_DEVICE Index packed_rows() const { return rows; }

  JITGEN_DEVICE Task task(int number) const {
    Task task;
    const Index z0 = number / (params.batch_size1);
    task.z0 = z0;
    const Index z1 = number % params.batch_size1;
    task.z1 = z1;
    task.key_index_at = params.key_index.first + z0 * params.key_index.strides[0] + z1 * params.key_index.strides[1];
    task.row_index_at = params.row_index.first + z0 * params.row_index.strides[0] + z1 * params.row_index.strides[1];
    task.query_at = z0 * params.query.strides[0] + z1 * params.query.strides[1];
    task.key_at = z0 * params.key.strides[0] + z1 * params.key.strides[1];
    task.score_input_at = z0 * params.score_input.strides[0] + z1 * params.score_input.strides[1];
    task.key_index_2_at = params.key_index_2.first + z0 * params.key_index_2.strides[0] + z1 * params.key_index_2.strides[1];
    task.row_index_2_at = params.row_index_2.first + z0 * params.row_index_2.strides[0] + z1 * params.row_index_2.strides[1];
    task.value_at = z0 * params.value.strides[0] + z1 * params.value.strides[1];
    task.result_at = z0 * params.result.strides[0] + z1 * params.result.strides[1];
    task.score_input_value = jitgen::load(params.score_input.pointer[task.score_input_at]);
    return task;
  }

  // Called by whole warps.
  JITGEN_DEVICE Block rows_of_block(const Task& task, int first, int count) const {
    Block block;
    const Index last = Index(jitgen::lesser(int64_t(first) + count, packed_rows())) - 1;
    {
      jitgen::Ends ends = {int64_t(1) << 62, -(int64_t(1) << 62)};
      for (int end = 0; end < 2; ++end) {
        const Index row = end ? last : Index(first);
        const Index m = row;
        const int64_t value = int64_t(task.row_index_at + m * params.row_index.strides[2]);
        ends = {jitgen::lesser(ends.low, value), jitgen::greater(ends.high, value)};
      }
      block.row_index_value = ends;
    }
    return block;
  }

  // Bit 0: some score of the tile is seen; bit 1: all are.
  template <int tile_keys>
  JITGEN_DEVICE uint32_t visibility(const Task& task, const Block& block, int tile) const {
    const bool whole = (int64_t(tile) + 1) * tile_keys <= keys;
    const int64_t first = int64_t(tile) * tile_keys, last = jitgen::lesser(first + tile_keys, keys) - 1;
    const int64_t low_of1 = block.row_index_value.low, high_of1 = block.row_index_value.high;
    const int64_t from0 = task.key_index_at + first * params.key_index.strides[3], to0 = task.key_index_at + last * params.key_index.strides[3];
    const int64_t low_of0 = jitgen::lesser(from0, to0), high_of0 = jitgen::greater(from0, to0);
    const int64_t low0 = low_of0;
    const int64_t high0 = high_of0;
    const int64_t low1 = low_of1;
    const int64_t high1 = high_of1;
    const bool somewhere2 = high0 > low1;
    const bool everywhere2 = low0 > high1;
    const bool hidden = everywhere2;
    const bool open = somewhere2 == false;
    return hidden ? 0u : open && whole ? 3u : 1u;
  }

  JITGEN_DEVICE Rows rows_of_thread(const Task& task, int first) const {
    Rows thread_rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Index row = Index(jitgen::lesser(int64_t(first) + 8 * r, packed_rows() - 1));
      const Index m = row;
      thread_rows.row_index_value[r] = task.row_index_at + m * params.row_index.strides[2];
      thread_rows.row_index_2_value[r] = task.row_index_2_at + m * params.row_index_2.strides[2];
    }
    return thread_rows;
  }

  // A positive number that scores are still to be multiplied with.
  JITGEN_DEVICE float fold() const { return 1.0f; }
  // From products to scores: those of a thread of a wgmma, whose first column is `first`. Where `open`, no mask hides any.
  template <bool open, int n>
  JITGEN_DEVICE void rule(float (&scores)[n], const Task& task, const Rows& of_rows, Index first) const {
    if constexpr (open) {
      float start7[2];
      float step7[2];
  #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t s5 = int32_t(of_rows.row_index_2_value[r]);
        start7[r] = float((int32_t(task.key_index_2_at + first) - s5));
        step7[r] = float(1);
      }
  #pragma unroll
      for (int i = 0; i < n / 2; ++i) {
        const float s3 = float(task.score_input_value);
  #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& score = scores[i / 2 * 4 + r * 2 + i % 2];
          const float acc0 = score;
          const float s1 = 0.125f;
          const float s2 = acc0 * s1;
          const float s7 = __fmaf_rn(float(i / 2 * 8 + i % 2), step7[r], start7[r]);
          const float s8 = jitgen::load(jitgen::store<jitgen::bfloat16>(s7));
          const float s9 = s3 * s8;
          const float s10 = s2 + s9;
          score = s10;
        }
      }
      return;
    }
    const int live = jitgen::bound_of(int64_t(keys) - first);
    int bound2[2];
    float start11[2];
    float step11[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t s1 = int32_t(of_rows.row_index_value[r]);
      const int32_t s9 = int32_t(of_rows.row_index_2_value[r]);
      bound2[r] = jitgen::smaller(jitgen::bound_of(int64_t(s1) - int64_t(int32_t(task.key_index_at + first))), live - 1);
      start11[r] = float((int32_t(task.key_index_2_at + first) - s9));
      step11[r] = float(1);
    }
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float s7 = float(task.score_input_value);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = scores[i / 2 * 4 + r * 2 + i % 2];
        const float acc0 = score;
        const bool s2 = i / 2 * 8 + i % 2 > bound2[r];
        const float s3 = -__int_as_float(0x7f800000);
        const float s5 = 0.125f;
        const float s6 = acc0 * s5;
        const float s11 = __fmaf_rn(float(i / 2 * 8 + i % 2), step11[r], start11[r]);
        const float s12 = jitgen::load(jitgen::store<jitgen::bfloat16>(s11));
        const float s13 = s7 * s12;
        const float s14 = s6 + s13;
        const float s15 = s2 ? s3 : s14;
        score = s15;
      }
    }
  }

  JITGEN_DEVICE void prefetch_maps() const {
    jitgen::prefetch_map(constants.query_map);
    jitgen::prefetch_map(constants.key_map);
    jitgen::prefetch_map(constants.value_map);
  }

  JITGEN_DEVICE void copy_query(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    const int batch[] = {0, params.query.strides[0] != 0 ? int(task.z0) : 0, params.query.strides[1] != 0 ? int(task.z1) : 0};
    jitgen::copy_box_of_batch(to, constants.query_map, column, row, batch, barrier);
  }
  JITGEN_DEVICE void copy_key(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    const int batch[] = {0, params.key.strides[0] != 0 ? int(task.z0) : 0, params.key.strides[1] != 0 ? int(task.z1) : 0};
    jitgen::copy_box_of_batch(to, constants.key_map, column, row, batch, barrier);
  }
  JITGEN_DEVICE void copy_value(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    const int batch[] = {0, params.value.strides[0] != 0 ? int(task.z0) : 0, params.value.strides[1] != 0 ? int(task.z1) : 0};
    jitgen::copy_box_of_batch(to, constants.value_map, column, row, batch, barrier);
  }
  JITGEN_DEVICE void row_results(const Task& task, int range, Index row, float row_max, float row_sum) const {
  }

  // Of a row, a function of `live` neighbours from column e, at most 8.
  JITGEN_DEVICE auto results_of_row(const Task& task, int range, Index row, float row_max, float row_sum) const {
    const Index m = row;
    // A product over no keys is zero, whatever its factors.
    const float v1 = keys == 0 ? 1.0f : row_sum;
    const float v2 = jitgen::reciprocal(v1);
    return [=](Index e, const float (&sums)[8], int live) {
    jitgen::Vector<jitgen::bfloat16, 8> y8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float acc1 = sums[j];
      const float v3 = acc1 * v2;
      y8[j] = jitgen::store<jitgen::bfloat16>(v3);
    }
    jitgen::store_vector_whole(params.result.pointer + task.result_at + m * params.result.strides[2] + e, y8);
    };
  }
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 2)
jitgen_attention_7a1254b4(const __grid_constant__ Params params) {
  const Operands operands = {params};
  jitgen::attention_wgmma<Config>(operands);
}
