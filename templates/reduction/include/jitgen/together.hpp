// Short rows, eight together. The latencies of one row overlap with the computations of the next. The accumulators of
// all eight are combined at once, each step for a vector of rows, by the same tree as that of Lanes::fold for one row.
#pragma once

#include "jitgen/reduce.hpp"

namespace jitgen {

constexpr int64_t together = 8;  // rows; most processors have vectors of eight floats

// Which elements of a group are combined: `Every` one, or `From` the first that no other group has. The numbers have 32
// bits, so that they are compared in vectors with as many lanes as those of most values.
struct Every {
  JITGEN_MEMBER bool has(int64_t) const { return true; }
};
struct From {
  int32_t first;
  JITGEN_MEMBER bool has(int64_t element) const { return static_cast<int32_t>(element) >= first; }
};

namespace detail {

typedef uint32_t Eight __attribute__((vector_size(32)));
#if defined(__clang__) || __GNUC__ >= 12
#define JITGEN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JITGEN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Eight{__VA_ARGS__})
#endif

// Transposes eight vectors of eight words, by three steps of eight shuffles, each of which is one instruction.
JITGEN_INLINE void transpose(Eight (&rows)[together]) {
  Eight pairs[together], fours[together];
#pragma GCC unroll 4
  for (int i = 0; i < together; i += 2) {
    pairs[i] = JITGEN_SHUFFLE(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = JITGEN_SHUFFLE(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < together; i += 4) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      fours[i + 2 * odd] = JITGEN_SHUFFLE(pairs[i + odd], pairs[i + 2 + odd], 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * odd + 1] = JITGEN_SHUFFLE(pairs[i + odd], pairs[i + 2 + odd], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < together / 2; ++i) {
    rows[i] = JITGEN_SHUFFLE(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = JITGEN_SHUFFLE(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#undef JITGEN_SHUFFLE

}  // namespace detail

// A square of accumulators: eight lanes of each of eight rows; after `transpose`, eight rows of each of eight lanes.
template <class T>
struct Square {
  alignas(cache_line) T elements[together][together];

  JITGEN_MEMBER void transpose() {
    if constexpr (sizeof(T) == 4) {
      detail::Eight rows[together];
      __builtin_memcpy(rows, elements, sizeof(elements));
      detail::transpose(rows);
      __builtin_memcpy(elements, rows, sizeof(elements));
    } else {
      for (int64_t i = 0; i < together; ++i) {
        for (int64_t j = 0; j < i; ++j) {
          const T swapped = elements[i][j];
          elements[i][j] = elements[j][i];
          elements[j][i] = swapped;
        }
      }
    }
  }
};

#define JITGEN_LAMBDA __attribute__((always_inline))

namespace detail {

// Calls join(lane, other, row) for the lanes of a transposed square, as a tree, until lane 0 has the result of all
// lanes.
template <class Join>
JITGEN_INLINE void fold_lanes(const Join& join) {
#pragma GCC unroll 3
  for (int64_t half = together / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < half; ++j) {
#pragma omp simd
      for (int64_t row = 0; row < together; ++row) join(j, j + half, row);
    }
  }
}

// Combines the `count` lanes at(row, lane) of each row.
template <int64_t count, class T, class At, class Combine>
JITGEN_INLINE void fold_square(T* results, const At& at, const Combine& combine) {
  Square<T> square;
#pragma GCC unroll 8
  for (int64_t row = 0; row < together; ++row) {
#pragma omp simd
    for (int64_t j = 0; j < together; ++j) {
      T value = at(row, j);
      for (int64_t other = j + together; other < count; other += together) value = combine(value, at(row, other));
      square.elements[row][j] = value;
    }
  }
  square.transpose();
  fold_lanes([&](int64_t j, int64_t other, int64_t row) JITGEN_LAMBDA {
    square.elements[j][row] = combine(square.elements[j][row], square.elements[other][row]);
  });
  __builtin_memcpy(results, square.elements[0], sizeof(square.elements[0]));
}

// Extremes of floats take two squares, values and magnitudes. In one square, a comparison that sees NaN would become a
// jump for each lane.
template <class Kind, int64_t count, class Rows>
JITGEN_INLINE void fold_extremes(const Rows& rows, float* results) {
  alignas(cache_line) uint32_t magnitudes[together];
  fold_square<count>(
      results, [&](int64_t row, int64_t lane) JITGEN_LAMBDA { return rows[row].lane[lane]; },
      [](float a, float b) JITGEN_LAMBDA { return Kind::of_numbers(a, b); });
  fold_square<count>(
      magnitudes, [&](int64_t row, int64_t lane) JITGEN_LAMBDA { return rows[row].magnitude[lane]; },
      [](uint32_t a, uint32_t b) JITGEN_LAMBDA { return b > a ? b : a; });
#pragma omp simd
  for (int64_t row = 0; row < together; ++row) {
    const float value = results[row];
    results[row] = magnitudes[row] > Extremes<Kind, count>::infinity_bits ? __builtin_nanf("") : value;
  }
}

// Values and their indices have a square each, so that there are two vectors and no jump for any lane.
template <class Kind, int64_t count, class T>
JITGEN_INLINE void fold_found(const Lanes<Kind, count, Found<T>> (&rows)[together], int64_t* results) {
  const auto join = [](T& value, int32_t& position, T other, int32_t at) JITGEN_LAMBDA {
    const bool wins = Kind::wins(other, at, value, position);
    value = wins ? other : value;
    position = wins ? at : position;
  };
  Square<T> values;
  Square<int32_t> positions;
#pragma GCC unroll 8
  for (int64_t row = 0; row < together; ++row) {
#pragma omp simd
    for (int64_t j = 0; j < together; ++j) {
      T value = rows[row].lane[j];
      int32_t position = rows[row].index[j];
      for (int64_t other = j + together; other < count; other += together) {
        join(value, position, rows[row].lane[other], rows[row].index[other]);
      }
      values.elements[row][j] = value;
      positions.elements[row][j] = position;
    }
  }
  values.transpose();
  positions.transpose();
  fold_lanes([&](int64_t j, int64_t other, int64_t row) JITGEN_LAMBDA {
    join(values.elements[j][row], positions.elements[j][row], values.elements[other][row], positions.elements[other][row]);
  });
  for (int64_t row = 0; row < together; ++row) {
    results[row] = positions.elements[0][row] == Lanes<Kind, count, Found<T>>::none ? 0 : positions.elements[0][row];
  }
}

}  // namespace detail

// Writes the results of the eight rows with the accumulators `of`.
template <class Kind, int64_t count, class T>
JITGEN_INLINE void fold(Lanes<Kind, count, Found<T>> (&rows)[together], int64_t* results) {
  detail::fold_found(rows, results);
}
template <class Kind, int64_t count, class T>
JITGEN_INLINE void fold(Lanes<Kind, count, T> (&rows)[together], T* results) {
  detail::fold_square<count>(
      results, [&](int64_t row, int64_t lane) JITGEN_LAMBDA { return rows[row].at(lane, 0); },
      [](T a, T b) JITGEN_LAMBDA { return Kind::combine(a, b); });
}
template <int64_t count>
JITGEN_INLINE void fold(Lanes<Max<float>, count, float> (&rows)[together], float* results) {
  detail::fold_extremes<Max<float>, count>(rows, results);
}
template <int64_t count>
JITGEN_INLINE void fold(Lanes<Min<float>, count, float> (&rows)[together], float* results) {
  detail::fold_extremes<Min<float>, count>(rows, results);
}
#undef JITGEN_LAMBDA

}  // namespace jitgen
