// Computes attention of a few rows that share keys: elements of a key or a value are in lanes. See jitgen/attention.hpp.
#pragma once

#include "jitgen/attention_rows.hpp"

namespace jitgen {
namespace attention {

// A few rows that share keys: elements of a key or a value are in lanes.
template <class A>
struct Few {
  using T = typename A::Compute;
  using Rows = typename A::Rows;
  static constexpr int64_t width = width_of<T>;
  static constexpr int64_t in_flight = 8;  // accumulators

  struct Shape {
    int64_t rows, keys, wide, deep;
    int64_t state() const { return rows * (2 + wide); }
    int64_t own(const A&) const {
      return rows * deep + keys * (deep + wide) + rows * keys + int64_t(sizeof(Rows) / sizeof(T)) + 128;
    }
  };
  static Shape shape(const A& a, int64_t) {
    return {a.packed_rows(), 128, round_up(a.width, width), round_up(a.depth, width)};
  }
  static int64_t blocks(const A&, const Shape&) { return 1; }

  const A& a;
  const Shape shape_;
  T* const state;
  T *queries, *keys, *values, *scores;
  Rows* rows;

  Few(const A& a, const Shape& shape, int64_t, T* state, T* own) : a(a), shape_(shape), state(state) {
    queries = own;
    keys = queries + shape.rows * shape.deep;
    values = keys + shape.keys * shape.deep;
    scores = values + shape.keys * shape.wide;
    rows = reinterpret_cast<Rows*>(round_up(reinterpret_cast<intptr_t>(scores + shape.rows * shape.keys), 64));
  }

  T* row_max(T* states) const { return states; }
  T* row_sum(T* states) const { return states + shape_.rows; }
  T* sums(T* states, int64_t row) const { return states + 2 * shape_.rows + row * shape_.wide; }

  void start() {
    for (int64_t lane = 0; lane < lanes_of<T>; ++lane) a.place(*rows, lane, lane < shape_.rows ? lane : shape_.rows - 1);
    a.settle(*rows);
    __builtin_memset(queries, 0, shape_.rows * shape_.deep * sizeof(T));
    for (int64_t row = 0; row < shape_.rows; ++row) {
      a.query(row, queries + row * shape_.deep);
      row_max(state)[row] = minus_infinity<T>;
    }
    __builtin_memset(row_sum(state), 0, shape_.rows * (1 + shape_.wide) * sizeof(T));
    // What is beyond the end of a key and of a value stays zero.
    if (a.depth != shape_.deep) __builtin_memset(keys, 0, shape_.keys * shape_.deep * sizeof(T));
    if (a.width != shape_.wide) __builtin_memset(values, 0, shape_.keys * shape_.wide * sizeof(T));
  }

  // What comes into the second-level cache while something else is computed, a row of keys or values at a time.
  struct Ahead {
    const T* from = nullptr;  // null for nothing
    int64_t stride = 0, elements = 0;
    inline void fetch(int64_t n) const {
      for (int64_t e = 0; e < elements; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + n * stride + e, 0, 2);
    }
  };

  // The tile of keys from `n` on, or the first one behind it, of which some row sees a key; empty at the end.
  Seen tile(int64_t n, int64_t end) const {
    Seen keys{end, end, open};
    for (; n < end && keys.first == keys.last; n += shape_.keys) keys = seen(a, *rows, n, min(n + shape_.keys, end));
    return keys;
  }

  void walk(int64_t begin, int64_t end) {
    for (Seen own = tile(begin, end), next; own.first != own.last; own = next) {
      next = tile(own.first - (own.first - begin) % shape_.keys + shape_.keys, end);
      const int64_t count = own.last - own.first;
      int64_t stride = shape_.deep, value_stride = shape_.wide;
      const T* const from = in_place<A::key_contiguous>(a.key(own.first), a.next_key, a.depth, keys, stride);
      const T* const with = in_place<A::value_contiguous>(a.value(own.first), a.next_value, a.width, values, value_stride);
      if (from == keys) fill_keys(a, own.first, own.last, keys, shape_.deep);
      Ahead ahead;
      if (with != values) ahead = {with, value_stride, shape_.wide};
      for (int64_t row = 0; row < shape_.rows; ++row) {
        dots(queries + row * shape_.deep, from, stride, count, scores + row * shape_.keys, ahead);
        ahead = {};
      }
      if (with == values) fill_values(a, own.first, own.last, values, shape_.wide);
      if (from != keys && next.first != next.last) ahead = {from + (next.first - own.first) * stride, stride, shape_.deep};
      for (int64_t row = 0; row < shape_.rows; ++row) {
        T* const row_scores = scores + row * shape_.keys;
        if (own.state == open) {
          a.template scores<true>(*rows, row, own.first, count, row_scores);
        } else {
          a.template scores<false>(*rows, row, own.first, count, row_scores);
        }
        softmax(row, count, row_scores);
        weighted<in_flight>(row_scores, count, with, value_stride, sums(state, row), 0, ahead);
        ahead = {};
      }
    }
  }

  // The rows in memory themselves where they are vectors of the compute type, with their stride; else the buffer `to`.
  template <bool contiguous, class Storage>
  JITGEN_INLINE const T* in_place(const Storage* from, int64_t from_stride, int64_t elements, T* to, int64_t& stride) {
    if constexpr (contiguous && !is_computed<Storage> && sizeof(Storage) == sizeof(T)) {
      if (elements % width == 0) {
        stride = from_stride;
        return reinterpret_cast<const T*>(from);
      }
    }
    return to;
  }

  void dots(const T* query, const T* from, int64_t stride, int64_t count, T* to, const Ahead& ahead) const {
    int64_t n = 0;
    for (; n + width <= count; n += width) {
      for (int64_t k = 0; k < width; ++k) ahead.fetch(n + k);
      Vector<T> sum[width] = {};
      for (int64_t d = 0; d < shape_.deep; d += width) {
        const Vector<T> element = load_vector<Vector<T>>(query + d);
#pragma GCC unroll 16
        for (int64_t k = 0; k < width; ++k) {
          accumulate(sum[k], load_vector<Vector<T>>(from + (n + k) * stride + d), element);
        }
      }
      transpose(sum);
      for (int64_t half = width / 2; half > 0; half /= 2) {
        for (int64_t k = 0; k < half; ++k) sum[k] += sum[k + half];
      }
      store_vector(to + n, sum[0]);
    }
    for (; n < count; ++n) {
      Vector<T> sum = {};
      for (int64_t d = 0; d < shape_.deep; d += width) {
        accumulate(sum, load_vector<Vector<T>>(from + n * stride + d), load_vector<Vector<T>>(query + d));
      }
      T parts[width];
      store_vector(parts, sum);
      for (int64_t half = width / 2; half > 0; half /= 2) {
        for (int64_t k = 0; k < half; ++k) parts[k] += parts[k + half];
      }
      to[n] = parts[0];
    }
  }

  void softmax(int64_t row, int64_t count, T* row_scores) const {
    const T before = row_max(state)[row];
    T new_max = before;
#pragma omp simd reduction(max : new_max)
    for (int64_t n = 0; n < count; ++n) new_max = row_scores[n] > new_max ? row_scores[n] : new_max;
    const T base = finite_base(new_max);
    T sum = 0;
#pragma omp simd
    for (int64_t n = 0; n < count; ++n) row_scores[n] = power(row_scores[n] - base);
#pragma omp simd reduction(+ : sum)
    for (int64_t n = 0; n < count; ++n) sum += row_scores[n];
    row_max(state)[row] = new_max;
    if (new_max != before) {
      const T scale = power(before - base);
      row_sum(state)[row] *= scale;
      T* const to = sums(state, row);
#pragma omp simd
      for (int64_t e = 0; e < shape_.wide; ++e) to[e] *= scale;
    }
    row_sum(state)[row] += sum;
  }

  // Adds the values, each times its probability, from element `e` on: as many vectors of a value at once as there are.
  template <int vectors>
  void weighted(const T* probabilities, int64_t count, const T* from, int64_t stride, T* to, int64_t e, Ahead ahead) const {
    for (; e + vectors * width <= shape_.wide; e += vectors * width) {
      weighted_columns<vectors>(probabilities, count, from + e, stride, to + e, ahead);
      ahead = {};
    }
    if constexpr (vectors > 1) weighted<vectors / 2>(probabilities, count, from, stride, to, e, ahead);
  }
  // Neighbouring keys have sums of their own where a value has few vectors.
  template <int vectors>
  JITGEN_INLINE void weighted_columns(const T* probabilities, int64_t count, const T* from, int64_t stride, T* to,
                                      const Ahead& ahead) {
    constexpr int64_t ways = in_flight / vectors;
    Vector<T> sum[ways][vectors] = {};
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[0][v] = load_vector<Vector<T>>(to + v * width);
    int64_t n = 0;
    for (; n + ways <= count; n += ways) {
#pragma GCC unroll 8
      for (int64_t way = 0; way < ways; ++way) {
        ahead.fetch(n + way);
        const Vector<T> probability = splat(probabilities[n + way]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
          accumulate(sum[way][v], load_vector<Vector<T>>(from + (n + way) * stride + v * width), probability);
        }
      }
    }
    for (; n < count; ++n) {
      const Vector<T> probability = splat(probabilities[n]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        accumulate(sum[0][v], load_vector<Vector<T>>(from + n * stride + v * width), probability);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 8
      for (int64_t way = 1; way < ways; ++way) sum[0][v] += sum[way][v];
      store_vector(to + v * width, sum[0][v]);
    }
  }

  void join(T* other) {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      const T mine = row_max(state)[row], theirs = row_max(other)[row];
      const T new_max = theirs > mine ? theirs : mine, base = finite_base(new_max);
      const T scale = power(mine - base), factor = power(theirs - base);
      row_max(state)[row] = new_max;
      row_sum(state)[row] = row_sum(state)[row] * scale + row_sum(other)[row] * factor;
      T *const to = sums(state, row), *const from = sums(other, row);
      for (int64_t e = 0; e < shape_.wide; ++e) to[e] = to[e] * scale + from[e] * factor;
    }
  }

  void finish() {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      a.row_results(row, row_max(state)[row], row_sum(state)[row]);
      const bool none = a.keys == 0;
      a.results(row, sums(state, row), none ? T(0) : row_max(state)[row], none ? T(1) : row_sum(state)[row]);
    }
  }
};

}  // namespace attention
}  // namespace jitgen
