// jitgen 0.1.0: template attention/attention.cpp.j2
// target x86-64-v4: rows in the lanes of vectors
// stages: contract over d; map; 2 x reduce over n; contract over n; map
// (N0, N1, N2, N3): score int64 key, score int64 row, query bfloat16 contiguous, key bfloat16 contiguous, score bfloat16 task, score int64 key, score int64 row, value bfloat16 contiguous, store
//     bfloat16 contiguous
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <jitgen/attention.hpp>
#include <jitgen/entry.hpp>

namespace {

struct Attention {
  using Compute = float;
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int64_t lanes = jitgen::attention::lanes_of<Compute>;
  static constexpr bool key_contiguous = true;
  static constexpr bool value_contiguous = true;
  static constexpr bool masked = true;

  const jitgen::bfloat16* p2;
  const jitgen::bfloat16* p3;
  const jitgen::bfloat16* p4;
  const jitgen::bfloat16* p7;
  jitgen::bfloat16* p8;
  int64_t rows;
  int64_t keys;
  int64_t depth;
  int64_t width;
  int64_t b0;
  int64_t b1;
  int64_t o0;
  int64_t s0_0;
  int64_t s0_1;
  int64_t s0_2;
  int64_t s0_3;
  int64_t o1;
  int64_t s1_0;
  int64_t s1_1;
  int64_t s1_2;
  int64_t s1_3;
  int64_t s2_0;
  int64_t s2_1;
  int64_t s2_2;
  int64_t s2_3;
  int64_t s3_0;
  int64_t s3_1;
  int64_t s3_2;
  int64_t s3_3;
  int64_t s4_0;
  int64_t s4_1;
  int64_t s4_2;
  int64_t s4_3;
  int64_t o5;
  int64_t s5_0;
  int64_t s5_1;
  int64_t s5_2;
  int64_t s5_3;
  int64_t o6;
  int64_t s6_0;
  int64_t s6_1;
  int64_t s6_2;
  int64_t s6_3;
  int64_t s7_0;
  int64_t s7_1;
  int64_t s7_2;
  int64_t s7_3;
  int64_t s8_0;
  int64_t s8_1;
  int64_t s8_2;
  int64_t s8_3;
  // Of a task.
  const int64_t key_stride = s3_2, key_step = s3_3, value_stride = s7_3, value_step = s7_2;
  int64_t at0 = 0;
  int64_t at1 = 0;
  int64_t at2 = 0;
  int64_t at3 = 0;
  int64_t at4 = 0;
  int64_t at5 = 0;
  int64_t at6 = 0;
  int64_t at7 = 0;
  int64_t at8 = 0;
  float x4 = {};
  int64_t tasks() const { return b0 * b1; }
  int64_t packed_rows() const { return rows; }

  void at(int64_t task) {
    const int64_t z0 = task / (b1);
    const int64_t z1 = task % b1;
    at0 = o0 + z0 * s0_0 + z1 * s0_1;
    at1 = o1 + z0 * s1_0 + z1 * s1_1;
    at2 = z0 * s2_0 + z1 * s2_1;
    at3 = z0 * s3_0 + z1 * s3_1;
    at4 = z0 * s4_0 + z1 * s4_1;
    at5 = o5 + z0 * s5_0 + z1 * s5_1;
    at6 = o6 + z0 * s6_0 + z1 * s6_1;
    at7 = z0 * s7_0 + z1 * s7_1;
    at8 = z0 * s8_0 + z1 * s8_1;
    x4 = jitgen::load(p4[at4]);
  }

  // Of the rows of a chunk: operands with one value for a row, and where a row of the others begins.
  struct Rows {
    alignas(64) int32_t x1[lanes];
    alignas(64) int32_t x6[lanes];
    int64_t low1, high1;
  };
  void place(Rows& to, int64_t lane, int64_t row) const {
    const int64_t m = row;
    to.x1[lane] = at1 + m * s1_2;
    to.x6[lane] = at6 + m * s6_2;
  }
  void settle(Rows& to) const {
    to.low1 = to.high1 = to.x1[0];
    for (int64_t lane = 1; lane < lanes; ++lane) {
      const int64_t value = to.x1[lane];
      to.low1 = value < to.low1 ? value : to.low1;
      to.high1 = value > to.high1 ? value : to.high1;
    }
  }

  const Key* key(int64_t n) const { return p3 + at3 + n * s3_2; }
  const Value* value(int64_t n) const { return p7 + at7 + n * s7_3; }

  void query(int64_t row, Compute* to) const {
    const int64_t m = row;
    const jitgen::bfloat16* const from2 = p2 + at2 + m * s2_2;
#pragma omp simd
    for (int64_t d = 0; d < depth; ++d) {
      const float q0 = jitgen::load(from2[d]);
      to[d] = q0;
    }
  }

  // Whether the rows see none of the keys from `first` to `last`, some, or all of them.
  jitgen::attention::State state(const Rows& chunk_rows, int64_t first, int64_t last) const {
    using jitgen::attention::min;
    using jitgen::attention::max;
    const int64_t low_of1 = chunk_rows.low1, high_of1 = chunk_rows.high1;
    const int64_t end0[2] = {at0 + first * s0_3, at0 + last * s0_3};
    const int64_t low_of0 = min(end0[0], end0[1]), high_of0 = max(end0[0], end0[1]);
    const int64_t low0 = low_of0;
    const int64_t high0 = high_of0;
    const int64_t low1 = low_of1;
    const int64_t high1 = high_of1;
    const bool may2 = high0 > low1;
    const bool must2 = low0 > high1;
    if (must2) return jitgen::attention::hidden;
    return (may2 == false) ? jitgen::attention::open : jitgen::attention::mixed;
  }

  // Scores of products, [keys][lanes]; `open` where no mask hides any.
  void scores_open(const Rows& chunk_rows, int64_t first, int64_t count, Compute* to) const {
    const float s3 = x4;
    const float s1 = 0.125f;
    for (int64_t n = 0; n < count; ++n) {
      const int32_t s4 = at5 + (first + n) * s5_3;
#pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const Compute acc0 = to[n * lanes + lane];
        const int32_t s5 = chunk_rows.x6[lane];
        const float s2 = acc0 * s1;
        const int32_t s6 = jitgen::sub(s4, s5);
        const float s7 = jitgen::cast<float>(s6);
        const float s8 = jitgen::load(jitgen::store<jitgen::bfloat16>(s7));
        const float s9 = s3 * s8;
        const float s10 = s2 + s9;
        to[n * lanes + lane] = s10;
      }
    }
  }
  // Scores of products, [keys][lanes]; `open` where no mask hides any.
  void scores_mixed(const Rows& chunk_rows, int64_t first, int64_t count, Compute* to) const {
    const float s7 = x4;
    const float s3 = -__builtin_huge_valf();
    const float s5 = 0.125f;
    for (int64_t n = 0; n < count; ++n) {
      const int32_t s0 = at0 + (first + n) * s0_3;
      const int32_t s8 = at5 + (first + n) * s5_3;
#pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const Compute acc0 = to[n * lanes + lane];
        const int32_t s1 = chunk_rows.x1[lane];
        const int32_t s9 = chunk_rows.x6[lane];
        const bool s2 = s0 > s1;
        const float s6 = acc0 * s5;
        const int32_t s10 = jitgen::sub(s8, s9);
        const float s11 = jitgen::cast<float>(s10);
        const float s12 = jitgen::load(jitgen::store<jitgen::bfloat16>(s11));
        const float s13 = s7 * s12;
        const float s14 = s6 + s13;
        const float s15 = s2 ? s3 : s14;
        to[n * lanes + lane] = s15;
      }
    }
  }
  template <bool open, class... Arguments>
  void scores(const Arguments&... arguments) const {
    open ? scores_open(arguments...) : scores_mixed(arguments...);
  }

  void row_results(int64_t row, Compute row_max, Compute row_sum) const {
  }
  void results(int64_t row, const Compute* sums, Compute row_max, Compute row_sum) const {
    const int64_t m = row;
    const Compute v1 = row_sum;
    const float v2 = jitgen::reciprocal(v1);
    jitgen::bfloat16* const to8 = p8 + at8 + m * s8_2;
#pragma omp simd
    for (int64_t e = 0; e < width; ++e) {
      const Compute acc1 = sums[e];
      const float v3 = acc1 * v2;
      to8[e] = jitgen::store<jitgen::bfloat16>(v3);
    }
  }
};

void jitgen_attention_6078920f(const jitgen::bfloat16* p2, const jitgen::bfloat16* p3, const jitgen::bfloat16* p4, const jitgen::bfloat16* p7, jitgen::bfloat16* p8, int32_t threads, int64_t rows, int64_t keys, int64_t depth, int64_t width, int64_t b0, int64_t b1, int64_t o0, int64_t s0_0, int64_t s0_1, int64_t s0_2, int64_t s0_3, int64_t o1, int64_t s1_0, int64_t s1_1, int64_t s1_2, int64_t s1_3, int64_t s2_0, int64_t s2_1, int64_t s2_2, int64_t s2_3, int64_t s3_0, int64_t s3_1, int64_t s3_2, int64_t s3_3, int64_t s4_0, int64_t s4_1, int64_t s4_2, int64_t s4_3, int64_t o5, int64_t s5_0, int64_t s5_1, int64_t s5_2, int64_t s5_3, int64_t o6, int64_t s6_0, int64_t s6_1, int64_t s6_2, int64_t s6_3, int64_t s7_0, int64_t s7_1, int64_t s7_2, int64_t s7_3, int64_t s8_0, int64_t s8_1, int64_t s8_2, int64_t s8_3, int32_t streaming) {
  const Attention attention{p2, p3, p4, p7, p8, rows, keys, depth, width, b0, b1, o0, s0_0, s0_1, s0_2, s0_3, o1, s1_0, s1_1, s1_2, s1_3, s2_0, s2_1, s2_2, s2_3, s3_0, s3_1, s3_2, s3_3, s4_0, s4_1, s4_2, s4_3, o5, s5_0, s5_1, s5_2, s5_3, o6, s6_0, s6_1, s6_2, s6_3, s7_0, s7_1, s7_2, s7_3, s8_0, s8_1, s8_2, s8_3};
  jitgen::attention::attend<jitgen::attention::Tiles<Attention>>(attention, threads);
}

}  // namespace

JITGEN_PACKED_ENTRY(jitgen_attention_6078920f)
