// jitgen 0.1.0: template attention/attention.cu.j2
// target sm_90a: wgmma, 128 rows a block, 2 warpgroups, 2 stages of 128 keys, shared by clusters of up to 8 blocks
// stages: contract over d; map; 2 x reduce over n; contract over n; map
// (N0, N1, N2, N3, N4): score int64 key, score int64 row, query bfloat16 contiguous, key bfloat16 contiguous, value bfloat16 contiguous, store bfloat16 contiguous
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
  jitgen::Operand<const jitgen::bfloat16, Index, 4> value;
  jitgen::Operand<jitgen::bfloat16, Index, 4> result;
  Index rows;
  Index keys;
  Index depth;
  Index width;
  Index batch_size0;
  Index batch_size1;
  float scalar0;
};
static_assert(
    sizeof(Params) == 576 && JITGEN_OFFSET(query_map) == 0 && JITGEN_OFFSET(key_map) == 128 &&
    JITGEN_OFFSET(value_map) == 256 && JITGEN_OFFSET(key_index) == 384 && JITGEN_OFFSET(row_index) == 404 &&
    JITGEN_OFFSET(query) == 424 && JITGEN_OFFSET(key) == 448 && JITGEN_OFFSET(value) == 472 &&
    JITGEN_OFFSET(result) == 496 && JITGEN_OFFSET(rows) == 520 && JITGEN_OFFSET(keys) == 524 &&
    JITGEN_OFFSET(depth) == 528 && JITGEN_OFFSET(width) == 532 && JITGEN_OFFSET(batch_size0) == 536 &&
    JITGEN_OFFSET(batch_size1) == 540 && JITGEN_OFFSET(scalar0) == 544, "the launch packs it so");

struct Config {
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int warpgroups = 2;
  static constexpr int blocks = 1;
  static constexpr int keys = 128;
  static constexpr int depth = 128;
  static constexpr int width = 128;
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
static_assert(Shape::bytes == 185456, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

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
    Index value_at;
    Index result_at;
  };
  // The ends of what the rows of a block have.
  struct Block {
    jitgen::Ends row_index_value;
  };
  // What a thread's rows r and r + 8 have.
  struct Rows {
    Index row_index_value[2];
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
    task.value_at = z0 * params.value.strides[0] + z1 * params.value.strides[1];
    task.result_at = z0 * params.result.strides[0] + z1 * params.result.strides[1];
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
    }
    return thread_rows;
  }

  // A positive number that scores are still to be multiplied with.
  JITGEN_DEVICE float scale_of_scores() const {
    return params.scalar0;
  }
  JITGEN_DEVICE bool is_folded() const {
    const float scale = scale_of_scores();
    return scale > 0.0f && scale < -jitgen::minus_infinity();
  }
  JITGEN_DEVICE float fold() const { return is_folded() ? scale_of_scores() : 1.0f; }
  // From products to scores: those of a thread of a wgmma, whose first column is `first`. Where `open`, no mask hides any.
  template <bool open, int n>
  JITGEN_DEVICE void rule(float (&scores)[n], const Task& task, const Rows& of_rows, Index first) const {
    if (!is_folded()) {
      const float scale = scale_of_scores();
#pragma unroll
      for (int i = 0; i < n; ++i) scores[i] *= scale;
    }
    if constexpr (open) return;
    const int live = jitgen::bound_of(int64_t(keys) - first);
    int bound2[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t s1 = int32_t(of_rows.row_index_value[r]);
      bound2[r] = jitgen::smaller(jitgen::bound_of(int64_t(s1) - int64_t(int32_t(task.key_index_at + first))), live - 1);
    }
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = scores[i / 2 * 4 + r * 2 + i % 2];
        const float acc0 = score;
        const bool s2 = i / 2 * 8 + i % 2 > bound2[r];
        const float s3 = -__int_as_float(0x7f800000);
        const float s5 = s2 ? s3 : acc0;
        score = s5;
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
    const float v1 = keys == 0 ? 0.0f : row_max;
    const float v12 = keys == 0 ? 1.0f : row_sum;
    const float v2 = -__int_as_float(0x7f800000);
    const bool v3 = v1 == v2;
    const float v4 = 0.0f;
    const float v5 = v3 ? v4 : v1;
    const float v6 = v1 - v5;
    const float v7 = jitgen::coarse_exp(v6);
    const float v9 = __int_as_float(0x7f800000);
    const bool v10 = v1 == v9;
    const float v11 = 1.0f;
    const float v13 = v10 ? v11 : v12;
    const float v14 = v13 * v7;
    const float v15 = jitgen::reciprocal(v14);
    const float v16 = v3 ? v4 : v15;
    return [=](Index e, const float (&sums)[8], int live) {
    jitgen::Vector<jitgen::bfloat16, 8> y5;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float acc1 = sums[j];
      const float v8 = acc1 * v7;
      const float v17 = v8 * v16;
      y5[j] = jitgen::store<jitgen::bfloat16>(v17);
    }
    jitgen::store_vector_whole(params.result.pointer + task.result_at + m * params.result.strides[2] + e, y5);
    };
  }
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
jitgen_attention_0c63cc53(const __grid_constant__ Params params) {
  const Operands operands = {params};
  jitgen::attention_wgmma<Config>(operands);
}
