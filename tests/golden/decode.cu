// jitgen 0.1.0: template attention/attention.cu.j2
// target sm_90a: mma.sync, 8 rows a block, 8 warps, tiles of 128 keys, shared by clusters of up to 8 blocks
// stages: contract over d; map; 2 x reduce over n; contract over n; map
// (N0, N1, N2, 1, N3): score int64 key, score int64 task, query bfloat16 contiguous, key bfloat16 contiguous, value bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/attention_codes.cuh>
#include <jitgen/attention_decode.cuh>

using Index = int32_t;

struct Params {
  jitgen::Ramp<Index, 5> key_index;
  jitgen::Operand<const int64_t, Index, 5> score_input;
  jitgen::Operand<const jitgen::bfloat16, Index, 5> query;
  jitgen::Operand<const jitgen::bfloat16, Index, 5> key;
  jitgen::Operand<const jitgen::bfloat16, Index, 5> value;
  jitgen::Operand<jitgen::bfloat16, Index, 5> result;
  Index rows;
  Index keys;
  Index depth;
  Index width;
  Index batch_size0;
  Index batch_size1;
  Index group_size0;
  float scalar0;
};
static_assert(
    sizeof(Params) == 216 && JITGEN_OFFSET(key_index) == 0 && JITGEN_OFFSET(score_input) == 24 &&
    JITGEN_OFFSET(query) == 56 && JITGEN_OFFSET(key) == 88 && JITGEN_OFFSET(value) == 120 &&
    JITGEN_OFFSET(result) == 152 && JITGEN_OFFSET(rows) == 184 && JITGEN_OFFSET(keys) == 188 &&
    JITGEN_OFFSET(depth) == 192 && JITGEN_OFFSET(width) == 196 && JITGEN_OFFSET(batch_size0) == 200 &&
    JITGEN_OFFSET(batch_size1) == 204 && JITGEN_OFFSET(group_size0) == 208 && JITGEN_OFFSET(scalar0) == 212, "the launch packs it so");

struct Config {
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int warps = 8;
  static constexpr int row_tiles = 1;
  static constexpr int ahead = 2;
  static constexpr int depth = 128;
  static constexpr int width = 128;
  static constexpr int most_splits = 8;
  static constexpr bool whole = true;
  static constexpr bool masked = true;
};
using Shape = jitgen::DecodeShape<Config>;
static_assert(Shape::bytes == 39424, "shared memory as the launch has it");
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
    Index score_input_at;
    Index query_at;
    Index key_at;
    Index value_at;
    Index result_at;
    int64_t score_input_value;
  };
  // The ends of what the rows of a block have.
  struct Block {
  };
  // What a thread's rows r and r + 1 have.
  struct Rows {
  };

  JITGEN_DEVICE int tasks() const { return int(params.batch_size0 * params.batch_size1); }
  JITGEN_DEVICE Index packed_rows() const { return params.group_size0 * rows; }

  JITGEN_DEVICE Task task(int number) const {
    Task task;
    const Index z0 = number / (params.batch_size1);
    task.z0 = z0;
    const Index z1 = number % params.batch_size1;
    task.z1 = z1;
    task.key_index_at = params.key_index.first + z0 * params.key_index.strides[0] + z1 * params.key_index.strides[1];
    task.score_input_at = z0 * params.score_input.strides[0] + z1 * params.score_input.strides[1];
    task.query_at = z0 * params.query.strides[0] + z1 * params.query.strides[1];
    task.key_at = z0 * params.key.strides[0] + z1 * params.key.strides[1];
    task.value_at = z0 * params.value.strides[0] + z1 * params.value.strides[1];
    task.result_at = z0 * params.result.strides[0] + z1 * params.result.strides[1];
    task.score_input_value = jitgen::load(params.score_input.pointer[task.score_input_at]);
    return task;
  }

  // Called by whole warps.
  JITGEN_DEVICE Block rows_of_block(const Task& task, int first, int count) const {
    Block block;
    return block;
  }

  // Bit 0: some score of the tile is seen; bit 1: all are.
  template <int tile_keys>
  JITGEN_DEVICE uint32_t visibility(const Task& task, const Block& block, int tile) const {
    const bool whole = (int64_t(tile) + 1) * tile_keys <= keys;
    const int64_t first = int64_t(tile) * tile_keys, last = jitgen::lesser(first + tile_keys, keys) - 1;
    const int64_t x1 = task.score_input_value;
    const int64_t from0 = task.key_index_at + first * params.key_index.strides[4], to0 = task.key_index_at + last * params.key_index.strides[4];
    const int64_t low_of0 = jitgen::lesser(from0, to0), high_of0 = jitgen::greater(from0, to0);
    const int64_t low0 = low_of0;
    const int64_t high0 = high_of0;
    const int64_t low1 = x1;
    const int64_t high1 = x1;
    const int64_t low2 = low0;
    const int64_t high2 = high0;
    const bool somewhere3 = low2 < high1;
    const bool everywhere3 = high2 < low1;
    const bool hidden = somewhere3 == false;
    const bool open = everywhere3;
    return hidden ? 0u : open && whole ? 3u : 1u;
  }

  JITGEN_DEVICE Rows rows_of_thread(const Task& task, int first) const {
    Rows thread_rows;
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
    int bound3[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t s1 = int64_t(task.score_input_value);
      bound3[r] = jitgen::smaller(jitgen::bound_of(int64_t(s1) - int64_t(int64_t(int32_t(task.key_index_at + first)))), live);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = scores[r / 2 * 4 + i * 2 + r % 2];
        const float acc0 = score;
        const bool s3 = 8 * i < bound3[r];
        const float s5 = -__int_as_float(0x7f800000);
        const float s6 = s3 ? acc0 : s5;
        score = s6;
      }
    }
  }

  template <class Element>
  JITGEN_DEVICE Element query(const Task& task, Index row, Index d) const {
    const Index y0 = (row / rows);
    const Index m = row % rows;
    const float q0 = jitgen::load(params.query.pointer[task.query_at + y0 * params.query.strides[2] + m * params.query.strides[3] + d]);
    return jitgen::store<Element>(q0);
  }
  // Eight neighbours of a row of the query.
  JITGEN_DEVICE uint4 query_run(const Task& task, Index row, Index d) const {
    const Index y0 = (row / rows);
    const Index m = row % rows;
    return *reinterpret_cast<const uint4*>(params.query.pointer + (task.query_at + y0 * params.query.strides[2] + m * params.query.strides[3] + d));
  }

  // What all elements of a key have: where they are, and what they are computed with.
  struct KeyRow {
    const jitgen::bfloat16* elements;
  };
  JITGEN_DEVICE KeyRow key_row(const Task& task, Index n) const {
    return {params.key.pointer + (task.key_at + n * params.key.strides[3])};
  }
  using KeyRun = uint4;
  JITGEN_DEVICE KeyRun key_run(const KeyRow& row, Index i) const {
    return jitgen::read_own_line(reinterpret_cast<const uint4*>(row.elements + i));
  }
  JITGEN_DEVICE uint4 key_words(const KeyRow& row, const KeyRun& run) const { return run; }
  // What all elements of a value have: where they are, and what they are computed with.
  struct ValueRow {
    const jitgen::bfloat16* elements;
  };
  JITGEN_DEVICE ValueRow value_row(const Task& task, Index n) const {
    return {params.value.pointer + (task.value_at + n * params.value.strides[4])};
  }
  using ValueRun = uint4;
  JITGEN_DEVICE ValueRun value_run(const ValueRow& row, Index i) const {
    return jitgen::read_own_line(reinterpret_cast<const uint4*>(row.elements + i));
  }
  JITGEN_DEVICE uint4 value_words(const ValueRow& row, const ValueRun& run) const { return run; }
  JITGEN_DEVICE void row_results(const Task& task, int range, Index row, float row_max, float row_sum) const {
  }

  // `live` neighbours from column e of a row, at most 8.
  JITGEN_DEVICE void results(
      const Task& task, int range, Index row, Index e, const float (&sums)[8], float row_max, float row_sum, int live) const {
    const Index y0 = (row / rows);
    const Index m = row % rows;
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
    jitgen::Vector<jitgen::bfloat16, 8> y5;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float acc1 = sums[j];
      const float v8 = acc1 * v7;
      const float v17 = v8 * v16;
      y5[j] = jitgen::store<jitgen::bfloat16>(v17);
    }
    jitgen::store_vector_whole(params.result.pointer + task.result_at + y0 * params.result.strides[2] + m * params.result.strides[3] + e, y5);
  }
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
jitgen_attention_7a6e3caf(const __grid_constant__ Params params) {
  const Operands operands = {params};
  jitgen::attention_decode<Config>(operands);
}
