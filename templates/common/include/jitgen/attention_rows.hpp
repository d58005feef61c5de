// What attention and its backward have in common: vectors, rows of keys and values as the compute type, the softmax's
// exponential, and which keys of a tile some rows see. See jitgen/attention.hpp.
#pragma once

#include <stddef.h>

#include "jitgen/math.hpp"
#include "jitgen/memory.hpp"
#include "jitgen/parallel.hpp"
#include "jitgen/vector.hpp"

namespace jitgen {
namespace attention {

template <class T>
struct VectorOf {
  using type = Floats;
  static constexpr int64_t width = float_lanes;
};
template <>
struct VectorOf<double> {
  using type = Doubles;
  static constexpr int64_t width = double_lanes;
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr int64_t width_of = VectorOf<T>::width;
template <class T>
constexpr int64_t lanes_of = 2 * width_of<T>;

constexpr int64_t most_chunks = 8;        // of a block
constexpr int64_t block_bytes = 1 << 17;  // of its queries and sums, at most, unless it has one chunk
constexpr int64_t tile_bytes = 1 << 17;   // of a tile's keys and values, at most, unless it has `least_keys`
constexpr int64_t most_keys = 192, least_keys = 48;  // of a tile; multiples of a piece or of an even share of one
constexpr int64_t piece = 16;             // keys whose masks are looked at together

enum State { hidden = 0, mixed = 1, open = 2 };

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
template <class T>
constexpr T minus_infinity = -T(__builtin_inf());

// ------------------------------------------------------------------------------------------------- in and out of lanes

// to[j][i] = from[i][j] for `rows` times `columns` elements, multiples of a vector's lanes.
template <class T>
void transposed(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
  constexpr int64_t width = width_of<T>;
  for (int64_t i = 0; i < rows; i += width) {
    for (int64_t j = 0; j < columns; j += width) {
      Vector<T> square[width];
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; ++k) square[k] = load_vector<Vector<T>>(from + (i + k) * from_stride + j);
      transpose(square);
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; ++k) store_vector(to + (j + k) * to_stride + i, square[k]);
    }
  }
}

// A row of keys or values as the compute type.
template <bool contiguous, class Storage, class T>
JITGEN_INLINE void widen_row(const Storage* from, int64_t step, int64_t count, T* to) {
  int64_t i = 0;
  if constexpr (contiguous) {
    for (; i + width_of<T> <= count; i += width_of<T>) {
      Vector<T> elements;
      widen(from + i, elements);
      store_vector(to + i, elements);
    }
  }
  for (; i < count; ++i) to[i] = load(from[i * (contiguous ? 1 : step)]);
}

// As the type of keys or values in memory: the generated source computes their rows.
struct Computed {};
template <class T>
constexpr bool is_computed = false;
template <>
constexpr bool is_computed<Computed> = true;

template <class A, class T>
void fill_keys(const A& a, int64_t first, int64_t last, T* to, int64_t stride) {
  for (int64_t n = first; n < last; ++n) {
    if constexpr (is_computed<typename A::Key>) a.key(n, to + (n - first) * stride);
    else widen_row<A::key_contiguous>(a.key(n), a.key_step, a.depth, to + (n - first) * stride);
  }
}
template <class A, class T>
void fill_values(const A& a, int64_t first, int64_t last, T* to, int64_t stride) {
  for (int64_t n = first; n < last; ++n) {
    if constexpr (is_computed<typename A::Value>) a.value(n, to + (n - first) * stride);
    else widen_row<A::value_contiguous>(a.value(n), a.value_step, a.width, to + (n - first) * stride);
  }
}

// ------------------------------------------------------------------------------------------------------------- softmax

// e^x for x <= 0, minus infinity and NaN included.
JITGEN_INLINE float power(float x) { return detail::exp_of_negative(x); }
JITGEN_INLINE double power(double x) { return jitgen::exp(x); }

// What is subtracted from scores whose maximum is `row_max`: rows without any score have sums of zero, and not of NaN.
template <class T>
JITGEN_INLINE T finite_base(T row_max) {
  return row_max == minus_infinity<T> ? T(0) : row_max;
}

// Which keys of a tile some rows see: from `first` to before `last`; `state` of these.
struct Seen {
  int64_t first, last;
  State state;
};

template <class A>
JITGEN_INLINE Seen seen(const A& a, const typename A::Rows& rows, int64_t begin, int64_t end) {
  if constexpr (!A::masked) {
    return {begin, end, open};
  } else {
    Seen keys{begin, begin, open};
    for (int64_t n = begin; n < end; n += piece) {
      const int64_t last = n + piece < end ? n + piece : end;
      const State state = a.state(rows, n, last - 1);
      if (state == hidden) {
        if (keys.last == n && keys.first == n) keys.first = keys.last = last;
        continue;
      }
      if (state == mixed || n != keys.last) keys.state = mixed;
      keys.last = last;
    }
    if (keys.state == mixed) {  // keys at the ends, such as those behind the length of a cache, may hold anything
      while (keys.first < keys.last && a.state(rows, keys.last - 1, keys.last - 1) == hidden) --keys.last;
      while (keys.first < keys.last && a.state(rows, keys.first, keys.first) == hidden) ++keys.first;
    }
    return keys;
  }
}

}  // namespace attention
}  // namespace jitgen
