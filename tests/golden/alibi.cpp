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

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const jitgen::bfloat16* query_pointer;
  const jitgen::bfloat16* key_pointer;
  const jitgen::bfloat16* score_input_pointer;
  const jitgen::bfloat16* value_pointer;
  jitgen::bfloat16* result_pointer;
  alignas(8) int32_t threads;
  int64_t rows, keys, depth, width;
  int64_t batch_size0, batch_size1;
  int64_t key_index_first, key_index_stride0, key_index_stride1, key_index_stride2, key_index_stride3;
  int64_t row_index_first, row_index_stride0, row_index_stride1, row_index_stride2, row_index_stride3;
  int64_t query_stride0, query_stride1, query_stride2, query_stride3;
  int64_t key_stride0, key_stride1, key_stride2, key_stride3;
  int64_t score_input_stride0, score_input_stride1, score_input_stride2, score_input_stride3;
  int64_t key_index_2_first, key_index_2_stride0, key_index_2_stride1, key_index_2_stride2, key_index_2_stride3;
  int64_t row_index_2_first, row_index_2_stride0, row_index_2_stride1, row_index_2_stride2, row_index_2_stride3;
  int64_t value_stride0, value_stride1, value_stride2, value_stride3;
  int64_t result_stride0, result_stride1, result_stride2, result_stride3;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 424, "the launch packs it so");

struct Attention : Params {
  using Compute = float;
  using Key = jitgen::bfloat16;
  using Value = jitgen::bfloat16;
  static constexpr int64_t lanes = jitgen::attention::lanes_of<Compute>;
  static constexpr bool key_contiguous = true;
  static constexpr bool value_contiguous = true;
  static constexpr bool masked = true;

  const int64_t next_key = key_stride2, key_step = key_stride3, next_value = value_stride3, value_step = value_stride2;
  // Where each operand of a task begins, and values that a task has one of.
  int64_t at0 = 0, at1 = 0, at2 = 0, at3 = 0, at4 = 0, at5 = 0, at6 = 0, at7 = 0, at8 = 0;
  float x4 = {};

  int64_t tasks() const { return batch_size0 * batch_size1; }
  int64_t packed_rows() const { return rows; }

  void at(int64_t task) {
    const int64_t z0 = task / (batch_size1);
    const int64_t z1 = task % batch_size1;
    at0 = key_index_first + z0 * key_index_stride0 + z1 * key_index_stride1;
    at1 = row_index_first + z0 * row_index_stride0 + z1 * row_index_stride1;
    at2 = z0 * query_stride0 + z1 * query_stride1;
    at3 = z0 * key_stride0 + z1 * key_stride1;
    at4 = z0 * score_input_stride0 + z1 * score_input_stride1;
    at5 = key_index_2_first + z0 * key_index_2_stride0 + z1 * key_index_2_stride1;
    at6 = row_index_2_first + z0 * row_index_2_stride0 + z1 * row_index_2_stride1;
    at7 = z0 * value_stride0 + z1 * value_stride1;
    at8 = z0 * result_stride0 + z1 * result_stride1;
    x4 = jitgen::load(score_input_pointer[at4]);
  }

  // Of the rows of a chunk: operands with one value for a row, and where a row of the others begins.
  struct Rows {
    alignas(64) int32_t x1[lanes];
    alignas(64) int32_t x6[lanes];
    int64_t low1, high1;
  };
  void place(Rows& to, int64_t lane, int64_t row) const {
    const int64_t m = row;
    to.x1[lane] = at1 + m * row_index_stride2;
    to.x6[lane] = at6 + m * row_index_2_stride2;
  }
  void settle(Rows& to) const {
    to.low1 = to.high1 = to.x1[0];
    for (int64_t lane = 1; lane < lanes; ++lane) {
      const int64_t value = to.x1[lane];
      to.low1 = value < to.low1 ? value : to.low1;
      to.high1 = value > to.high1 ? value : to.high1;
    }
  }

  const Key* key(int64_t n) const { return key_pointer + at3 + n * key_stride2; }
  const Value* value(int64_t n) const { return value_pointer + at7 + n * value_stride3; }

  void query(int64_t row, Compute* to) const {
    const int64_t m = row;
    const jitgen::bfloat16* const from2 = query_pointer + at2 + m * query_stride2;
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
    const int64_t end0[2] = {at0 + first * key_index_stride3, at0 + last * key_index_stride3};
    const int64_t low_of0 = min(end0[0], end0[1]), high_of0 = max(end0[0], end0[1]);
    const int64_t low0 = low_of0;
    const int64_t high0 = high_of0;
    const int64_t low1 = low_of1;
    const int64_t high1 = high_of1;
    const bool somewhere2 = high0 > low1;
    const bool everywhere2 = low0 > high1;
    if (everywhere2) return jitgen::attention::hidden;
    return somewhere2 == false ? jitgen::attention::open : jitgen::attention::mixed;
  }

  // Scores of products, [keys][lanes]; `open` where no mask hides any.
  void scores_open(const Rows& chunk_rows, int64_t first, int64_t count, Compute* to) const {
    const float s3 = x4;
    const float s1 = 0.125f;
    for (int64_t n = 0; n < count; ++n) {
      const int32_t s4 = at5 + (first + n) * key_index_2_stride3;
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
      const int32_t s0 = at0 + (first + n) * key_index_stride3;
      const int32_t s8 = at5 + (first + n) * key_index_2_stride3;
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
    jitgen::bfloat16* const to8 = result_pointer + at8 + m * result_stride2;
#pragma omp simd
    for (int64_t e = 0; e < width; ++e) {
      const Compute acc1 = sums[e];
      const float v3 = acc1 * v2;
      to8[e] = jitgen::store<jitgen::bfloat16>(v3);
    }
  }
};

void Params::run() const {
  const Attention attention{*this};
  jitgen::attention::attend<jitgen::attention::Tiles<Attention>>(attention, threads);
}

}  // namespace

JITGEN_ENTRY(jitgen_attention_3676c6b6)
