// jitgen 0.1.0: decode, template attention/attention.cu.j2
// target sm_90a: mma.sync, 8 rows a block, 8 warps, tiles of 128 keys, shared by clusters of up to 8 blocks
// stages: contract over d; map; 2 x reduce over n; contract over n; map
// (s0_0, s1_1, (s0_1 // s1_1), 1, s2_3): score int64 key, score int64 task, query bfloat16 contiguous, key bfloat16 contiguous, value bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/attention_codes.cuh>
#include <jitgen/attention_decode.cuh>

using Index = int32_t;

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
  const int64_t* p1;
  const jitgen::bfloat16* p2;
  const jitgen::bfloat16* p3;
  const jitgen::bfloat16* p4;
  jitgen::bfloat16* p5;
  Index rows;
  Index keys;
  Index depth;
  Index width;
  Index b0;
  Index b1;
  Index g0;
  Index o0;
  Index s0_0;
  Index s0_1;
  Index s0_2;
  Index s0_3;
  Index s0_4;
  Index s1_0;
  Index s1_1;
  Index s1_2;
  Index s1_3;
  Index s1_4;
  Index s2_0;
  Index s2_1;
  Index s2_2;
  Index s2_3;
  Index s2_4;
  Index s3_0;
  Index s3_1;
  Index s3_2;
  Index s3_3;
  Index s3_4;
  Index s4_0;
  Index s4_1;
  Index s4_2;
  Index s4_3;
  Index s4_4;
  Index s5_0;
  Index s5_1;
  Index s5_2;
  Index s5_3;
  Index s5_4;
  float a0;
  static constexpr int ranges = 1;

  // One batch index; `at<i>` is where operand i begins, `x<i>` its only value.
  struct Task {
    Index z0;
    Index z1;
    Index at0;
    Index at1;
    Index at2;
    Index at3;
    Index at4;
    Index at5;
    int64_t x1;
  };
  // The ends of what the rows of a block have.
  struct Block {
  };
  // What a thread's rows r and r + 1 have.
  struct Rows {
  };

  JITGEN_DEVICE int tasks() const { return int(b0 * b1); }
  JITGEN_DEVICE Index packed_rows() const { return g0 * rows; }

  JITGEN_DEVICE Task task(int number) const {
    Task found;
    const Index z0 = number / (b1);
    found.z0 = z0;
    const Index z1 = number % b1;
    found.z1 = z1;
    found.at0 = o0 + z0 * s0_0 + z1 * s0_1;
    found.at1 = z0 * s1_0 + z1 * s1_1;
    found.at2 = z0 * s2_0 + z1 * s2_1;
    found.at3 = z0 * s3_0 + z1 * s3_1;
    found.at4 = z0 * s4_0 + z1 * s4_1;
    found.at5 = z0 * s5_0 + z1 * s5_1;
    found.x1 = jitgen::load(p1[found.at1]);
    return found;
  }

  // Called by whole warps.
  JITGEN_DEVICE Block rows_of_block(const Task& task, int first, int count) const {
    Block found;
    return found;
  }

  // Bit 0: some score of the tile is seen; bit 1: all are.
  template <int tile_keys>
  JITGEN_DEVICE uint32_t look(const Task& task, const Block& block, int tile) const {
    const bool whole = (int64_t(tile) + 1) * tile_keys <= keys;
    const int64_t first = int64_t(tile) * tile_keys, last = jitgen::lesser(first + tile_keys, keys) - 1;
    const int64_t x1 = task.x1;
    const int64_t from0 = task.at0 + first * s0_4, to0 = task.at0 + last * s0_4;
    const int64_t low_of0 = jitgen::lesser(from0, to0), high_of0 = jitgen::greater(from0, to0);
    const int64_t low0 = low_of0;
    const int64_t high0 = high_of0;
    const int64_t low1 = x1;
    const int64_t high1 = x1;
    const int64_t low2 = low0;
    const int64_t high2 = high0;
    const bool may3 = low2 < high1;
    const bool must3 = high2 < low1;
    const bool hidden = (may3 == false);
    const bool open = must3;
    return hidden ? 0u : open && whole ? 3u : 1u;
  }

  JITGEN_DEVICE Rows rows_of_thread(const Task& task, int first) const {
    Rows found;
    return found;
  }

  // A positive number that scores are still to be multiplied with.
  JITGEN_DEVICE float scale_of_scores() const {
    return a0;
  }
  JITGEN_DEVICE bool is_folded() const {
    const float scale = scale_of_scores();
    return scale > 0.0f && scale < -jitgen::minus_infinity();
  }
  JITGEN_DEVICE float fold() const { return is_folded() ? scale_of_scores() : 1.0f; }
  // From products to scores: those of a thread of a wgmma, whose first column is `first`.
  template <int n>
  JITGEN_DEVICE void open_rule(float (&scores)[n], const Task& task, const Rows& of_rows, Index first) const {
    if (!is_folded()) {
      const float scale = scale_of_scores();
#pragma unroll
      for (int i = 0; i < n; ++i) scores[i] *= scale;
    }
  }
  template <int n>
  JITGEN_DEVICE void masked_rule(float (&scores)[n], const Task& task, const Rows& of_rows, Index first) const {
    if (!is_folded()) {
      const float scale = scale_of_scores();
#pragma unroll
      for (int i = 0; i < n; ++i) scores[i] *= scale;
    }
    const int live = jitgen::bound_of(int64_t(keys) - first);
    int bound3[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t s1 = int64_t(task.x1);
      bound3[r] = jitgen::smaller(jitgen::bound_of(int64_t(s1) - int64_t(int64_t(int32_t(task.at0 + first)))), live);
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
    const float q0 = jitgen::load(p2[task.at2 + y0 * s2_2 + m * s2_3 + d]);
    return jitgen::store<Element>(q0);
  }
  // Eight neighbours of a row of the query.
  JITGEN_DEVICE uint4 query_run(const Task& task, Index row, Index d) const {
    const Index y0 = (row / rows);
    const Index m = row % rows;
    return *reinterpret_cast<const uint4*>(p2 + (task.at2 + y0 * s2_2 + m * s2_3 + d));
  }

  // What all elements of a key have: where they are, and what they are computed with.
  struct KeyRow {
    const jitgen::bfloat16* elements;
  };
  JITGEN_DEVICE KeyRow key_row(const Task& task, Index n) const {
    return {p3 + (task.at3 + n * s3_3)};
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
    return {p4 + (task.at4 + n * s4_4)};
  }
  using ValueRun = uint4;
  JITGEN_DEVICE ValueRun value_run(const ValueRow& row, Index i) const {
    return jitgen::read_own_line(reinterpret_cast<const uint4*>(row.elements + i));
  }
  JITGEN_DEVICE uint4 value_words(const ValueRow& row, const ValueRun& run) const { return run; }
  JITGEN_DEVICE void row_results(const Task& task, int range, Index row, float top, float total) const {
  }

  // `live` neighbours from column e of a row, at most 8.
  JITGEN_DEVICE void results(
      const Task& task, int range, Index row, Index e, const float (&sums)[8], float top, float total, int live) const {
    const Index y0 = (row / rows);
    const Index m = row % rows;
    // A product over no keys is zero, whatever its factors.
    const float v1 = keys == 0 ? 0.0f : top;
    const float v12 = keys == 0 ? 1.0f : total;
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
    jitgen::store_vector(p5 + task.at5 + y0 * s5_2 + m * s5_3 + e, y5);
  }
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
jitgen_decode(const int64_t* p1, const jitgen::bfloat16* p2, const jitgen::bfloat16* p3, const jitgen::bfloat16* p4, jitgen::bfloat16* p5, Index rows, Index keys, Index depth, Index width, Index b0, Index b1, Index g0, Index o0, Index s0_0, Index s0_1, Index s0_2, Index s0_3, Index s0_4, Index s1_0, Index s1_1, Index s1_2, Index s1_3, Index s1_4, Index s2_0, Index s2_1, Index s2_2, Index s2_3, Index s2_4, Index s3_0, Index s3_1, Index s3_2, Index s3_3, Index s3_4, Index s4_0, Index s4_1, Index s4_2, Index s4_3, Index s4_4, Index s5_0, Index s5_1, Index s5_2, Index s5_3, Index s5_4, float a0) {
  const Operands operands = {p1, p2, p3, p4, p5, rows, keys, depth, width, b0, b1, g0, o0, s0_0, s0_1, s0_2, s0_3, s0_4, s1_0, s1_1, s1_2, s1_3, s1_4, s2_0, s2_1, s2_2, s2_3, s2_4, s3_0, s3_1, s3_2, s3_3, s3_4, s4_0, s4_1, s4_2, s4_3, s4_4, s5_0, s5_1, s5_2, s5_3, s5_4, a0};
  jitgen::attention_decode<Config>(operands);
}
