// Scans of blocks of a row, in place, and the state that is carried from one block to the next.
//
//   jitgen::Scan<jitgen::Sum, float> scan;            // of no elements yet
//   scan.take(values, count);                         // the next `count` of the row: each with all before it
//   scan.take(values, places, start, count);          // of an extremum, with the place of each, the first's being `start`
//   scan.join(behind);                                // the state of what comes next in the row
//
// A block is scanned a vector at a time: its lanes in log2(lanes) steps, each combining a lane with one to its left
// (Hillis and Steele, "Data parallel algorithms", 1986); of the vectors before it only their totals are waited for. What
// is combined is always combined in the same order. `Columns` scans neighbouring rows, of each the next element.
//
// Sums and products of floats are carried as torch carries them, those of float32 in double. Where another order than the
// row's could overflow, elements are combined in the row's order, so that a result is finite where torch's is.
#pragma once

#include "jitgen/group.hpp"
#include "jitgen/math.hpp"

namespace jitgen {

// What the state of a sum is carried in: a float32 sum's in double, so that its error does not grow with the blocks.
template <class T>
struct Wider {
  using type = T;
};
template <>
struct Wider<float> {
  using type = double;
};

// Elements of each of `count` pieces of a row: whole cache lines, so that no two pieces write to one.
JITGEN_INLINE int64_t piece_of(int64_t length, int64_t count) {
  return ((length + count - 1) / count + cache_line - 1) & -cache_line;
}

// ---------------------------------------------------------------------------------------------------------------- what

// Every operation combines what is earlier in the row with what is later; of vectors, lane by lane. Integers wrap.
struct Sum {
  template <class T>
  static constexpr T identity = 0;
  template <class T>
  JITGEN_INLINE T combine(T a, T b) {
    return a + b;
  }
};
struct Prod {
  template <class T>
  static constexpr T identity = 1;
  template <class T>
  JITGEN_INLINE T combine(T a, T b) {
    return a * b;
  }
};
namespace detail {
template <class T>
struct Limits {
  static constexpr T low = T(-1) < T(0) ? T(uint64_t(1) << (8 * sizeof(T) - 1)) : T(0), high = T(~low);
};
template <>
struct Limits<float> {
  static constexpr float low = -__builtin_huge_valf(), high = __builtin_huge_valf();
};
template <>
struct Limits<double> {
  static constexpr double low = -__builtin_huge_val(), high = __builtin_huge_val();
};
}  // namespace detail
// Of equal elements the later one, and the latest NaN.
struct Max {
  template <class T>
  static constexpr T identity = detail::Limits<T>::low;
  template <class T>
  JITGEN_INLINE T combine(T a, T b) {
    return (b >= a) | (b != b) ? b : a;
  }
};
struct Min {
  template <class T>
  static constexpr T identity = detail::Limits<T>::high;
  template <class T>
  JITGEN_INLINE T combine(T a, T b) {
    return (b <= a) | (b != b) ? b : a;
  }
};
struct LogSumExp {};
// Extrema with their places.
template <class Op>
struct Placed {};

// ---------------------------------------------------------------------------------------------------- a vector's lanes

namespace detail {

// What elements of type T are combined as: integers as unsigned ones where they are added or multiplied.
template <class Op, class T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<Sum, int32_t> {
  using type = uint32_t;
};
template <>
struct Arithmetic<Prod, int32_t> {
  using type = uint32_t;
};
template <>
struct Arithmetic<Sum, int64_t> {
  using type = uint64_t;
};
template <>
struct Arithmetic<Prod, int64_t> {
  using type = uint64_t;
};
template <>
struct Arithmetic<Sum, int16_t> {
  using type = uint16_t;
};
template <>
struct Arithmetic<Prod, int16_t> {
  using type = uint32_t;  // a product of two uint16_t would be computed as int, and overflow
};
template <>
struct Arithmetic<Sum, int8_t> {
  using type = uint8_t;
};
template <>
struct Arithmetic<Prod, int8_t> {
  using type = uint8_t;
};

template <int bytes>
struct Integer;
template <>
struct Integer<4> {
  using type = int32_t;
};
template <>
struct Integer<8> {
  using type = int64_t;
};

template <class T>
struct Register {
  static constexpr int lanes = stream_width / sizeof(T);
  typedef T type __attribute__((vector_size(stream_width)));
  typedef T unaligned __attribute__((vector_size(stream_width), aligned(sizeof(T)), may_alias));
  typedef typename Integer<sizeof(T)>::type places __attribute__((vector_size(stream_width)));
};

// Lane j has lane j - distance of `vector`, the first ones those of `neutral`.
template <int distance, class T, class Vector>
JITGEN_INLINE Vector shifted(Vector vector, Vector neutral) {
  constexpr int lanes = Register<T>::lanes;
#if defined(__clang__)
  Vector result = neutral;
  for (int j = distance; j < lanes; ++j) result[j] = vector[j - distance];
  return result;
#else
  typename Register<T>::places from;
  for (int j = 0; j < lanes; ++j) from[j] = j < distance ? lanes + j : j - distance;
  return __builtin_shuffle(vector, neutral, from);
#endif
}
// `value` in every lane. (`Vector{} + value` would make 0 of -0.)
template <class T>
JITGEN_INLINE typename Register<T>::type every_lane(T value) {
  typename Register<T>::type vector;
  for (int j = 0; j < Register<T>::lanes; ++j) vector[j] = value;
  return vector;
}
template <class T, class Vector>
JITGEN_INLINE Vector last_of(Vector vector) {
#if defined(__clang__)
  return every_lane<T>(vector[Register<T>::lanes - 1]);
#else
  typename Register<T>::places from;
  for (int j = 0; j < Register<T>::lanes; ++j) from[j] = Register<T>::lanes - 1;
  return __builtin_shuffle(vector, from);
#endif
}

template <class Op, class T, int distance = 1, class Vector>
JITGEN_INLINE Vector scan_lanes(Vector vector, Vector neutral) {
  if constexpr (distance < Register<T>::lanes) {
    return scan_lanes<Op, T, 2 * distance>(Op::combine(shifted<distance, T>(vector, neutral), vector), neutral);
  } else {
    return vector;
  }
}

// Each of `count` values with those before it, and with `base`, the state of all blocks before; without it, their total.
template <class Op, class Element>
inline Element scan_block(Element* elements, int64_t count, Element from) {
  using T = typename Arithmetic<Op, Element>::type;
  constexpr T none = Op::template identity<T>;
  const T base = T(from);
  T total = none;
  int64_t i = 0;
  if constexpr (sizeof(T) == sizeof(Element) && sizeof(T) >= 4) {
    using Vector = typename Register<T>::type;
    using Unaligned = typename Register<T>::unaligned;
    constexpr int lanes = Register<T>::lanes;
    const Vector bases = every_lane<T>(base), neutral = every_lane<T>(none);
    Vector before = neutral;
    for (; i + lanes <= count; i += lanes) {
      const Vector own = scan_lanes<Op, T>(Vector(*reinterpret_cast<Unaligned*>(elements + i)), neutral);
      *reinterpret_cast<Unaligned*>(elements + i) = Op::combine(bases, Op::combine(before, own));
      before = Op::combine(before, last_of<T>(own));
    }
    total = before[0];
  }
  for (; i < count; ++i) {
    total = T(Op::combine(total, T(elements[i])));
    elements[i] = Element(Op::combine(base, total));
  }
  return Element(total);
}

// The largest of what a block may have: every caller's is.
constexpr int64_t longest_block = 1024;

}  // namespace detail

// -------------------------------------------------------------------------------------------------------------- a row's

namespace detail {

template <class T>
struct Range;
template <>
struct Range<float> {
  static constexpr float least = __FLT_MIN__, most = __FLT_MAX__;
};
template <>
struct Range<double> {
  static constexpr double least = __DBL_MIN__, most = __DBL_MAX__;
};

// The largest absolute value.
template <class T>
inline T largest(const T* values, int64_t count) {
  T largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    const T size = values[i] < T(0) ? -values[i] : values[i];
    largest = size > largest ? size : largest;
  }
  return largest;
}
// Each of `count` values with those before it in the row, in the row's order.
template <class Op, class T, class State>
inline State scan_in_order(T* values, int64_t count, State state) {
  for (int64_t i = 0; i < count; ++i) {
    state = Op::combine(state, State(values[i]));
    values[i] = T(state);
  }
  return state;
}
// Whether a piece of a row that has come to `state` by itself may follow any other piece: it has not overflowed and, if it
// is a product, not become too small for a normal number, as it need not have after what is before it.
template <class Op>
JITGEN_INLINE bool is_regular(double state) {
  const double size = state < 0 ? -state : state;
  return size <= Range<double>::most && size >= Op::template identity<double> * Range<double>::least;
}

}  // namespace detail

template <class Op, class T>
struct Scan {
  T state = Op::template identity<T>;

  inline void take(T* values, int64_t count) {
    state = combined(state, detail::scan_block<Op>(values, count, state));
  }
  JITGEN_MEMBER void join(const Scan& behind) { state = combined(state, behind.state); }

 private:
  JITGEN_INLINE T combined(T a, T b) {
    using Wrapping = typename detail::Arithmetic<Op, T>::type;
    return T(Op::combine(Wrapping(a), Wrapping(b)));
  }
};
template <class T>
struct FloatSum {
  typename Wider<T>::type state = 0;

  inline void take(T* values, int64_t count) {
    using State = decltype(state);
    const State room = State(detail::Range<T>::most) - (state < 0 ? -state : state);
    if (State(detail::largest(values, count)) * State(count) <= room) {
      state += State(detail::scan_block<Sum>(values, count, T(state)));
    } else {
      state = detail::scan_in_order<Sum>(values, count, state);
    }
  }
  JITGEN_MEMBER void join(const FloatSum& behind) { state += behind.state; }
  JITGEN_MEMBER bool is_regular() const { return detail::is_regular<Sum>(state); }
};
template <>
struct Scan<Sum, float> : FloatSum<float> {};
template <>
struct Scan<Sum, double> : FloatSum<double> {};

template <class T>
struct FloatProduct {
  double state = 1;

  inline void take(T* values, int64_t count) {
    int64_t i = 0;
    if constexpr (sizeof(T) == 4) {  // a product of four floats has its place among the doubles, whatever they are
      for (; i + 4 <= count; i += 4) {
        typedef double Four __attribute__((vector_size(32)));
        Four own = {values[i], values[i + 1], values[i + 2], values[i + 3]};
        own *= Four{1, own[0], own[1], own[2]};
        own *= Four{1, 1, own[0], own[1]};
        for (int lane = 0; lane < 4; ++lane) values[i + lane] = T(state * own[lane]);
        state *= own[3];
      }
    }
    state = detail::scan_in_order<Prod>(values + i, count - i, state);
  }
  JITGEN_MEMBER void join(const FloatProduct& behind) { state *= behind.state; }
  JITGEN_MEMBER bool is_regular() const { return detail::is_regular<Prod>(state); }
};
template <>
struct Scan<Prod, float> : FloatProduct<float> {};
template <>
struct Scan<Prod, double> : FloatProduct<double> {};

template <class Op, class T>
struct Scan<Placed<Op>, T> {
  T state = Op::template identity<T>;
  int64_t place = 0;

  inline void take(T* values, int64_t* places, int64_t start, int64_t count) {
    alignas(cache_line) int32_t taken[detail::longest_block];
    alignas(cache_line) T own[detail::longest_block];
    __builtin_memcpy(own, values, count * sizeof(T));
    state = Op::combine(state, detail::scan_block<Op>(values, count, state));
    // An element is the extremum so far where it is equal to that, or NaN: of such elements the last one counts.
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) taken[i] = (own[i] == values[i]) | (own[i] != own[i]) ? int32_t(i) : -1;
    detail::scan_block<Max>(taken, count, int32_t(-1));
    const int64_t earlier = place;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) places[i] = taken[i] < 0 ? earlier : start + taken[i];
    if (count != 0) place = places[count - 1];
  }
  // `behind` has at least one element.
  JITGEN_MEMBER void join(const Scan& behind) {
    const bool wins = (Op::combine(state, behind.state) == behind.state) | (behind.state != behind.state);
    state = wins ? behind.state : state;
    place = wins ? behind.place : place;
  }
};

// State: the greatest element so far, and the sum of exp(x - top), of float32 in double. Where two are equal (infinities
// too), their difference counts as 0.
template <class T>
struct Scan<LogSumExp, T> {
  T top = -T(__builtin_huge_val());
  double total = 0;

  inline void take(T* values, int64_t count) {
    alignas(cache_line) T tops[detail::longest_block + 1], terms[detail::longest_block], scales[detail::longest_block];
    tops[0] = top;
    __builtin_memcpy(tops + 1, values, count * sizeof(T));
    detail::scan_block<Max>(tops + 1, count, top);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      terms[i] = power(values[i], tops[i + 1]);
      scales[i] = power(tops[i], tops[i + 1]);
    }
    for (int64_t i = 0; i < count; ++i) terms[i] = T(total = total * double(scales[i]) + double(terms[i]));
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] = tops[i + 1] + log(terms[i]);
    top = tops[count];
  }
  JITGEN_MEMBER void join(const Scan& behind) {
    const T least = top;
    top = Max::combine(top, behind.top);
    total = total * double(power(least, top)) + behind.total * double(power(behind.top, top));
  }
  JITGEN_INLINE T power(T x, T top) { return exp(x == top ? T(0) : x - top); }
};

// ---------------------------------------------------------------------------------------------- neighbouring rows'

// The state of each of `width` rows, of which `take` has the next element of one.
template <class Op, class T, int64_t width>
struct Columns {
  using State = T;
  alignas(cache_line) T state[width];

  inline void clear(int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) state[j] = Op::template identity<T>;
  }
  JITGEN_MEMBER void take(int64_t j, int64_t, T value) {
    using Wrapping = typename detail::Arithmetic<Op, T>::type;
    state[j] = T(Op::combine(Wrapping(state[j]), Wrapping(value)));
  }
  JITGEN_MEMBER T result(int64_t j) const { return state[j]; }
  inline void join(const Columns& behind, int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) take(j, 0, behind.state[j]);
  }
};
template <class Op, class T, int64_t width>
struct FloatColumns {
  alignas(cache_line) double state[width];

  inline void clear(int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) state[j] = Op::template identity<double>;
  }
  JITGEN_MEMBER void take(int64_t j, int64_t, T value) { state[j] = Op::combine(state[j], double(value)); }
  JITGEN_MEMBER T result(int64_t j) const { return T(state[j]); }
  inline void join(const FloatColumns& behind, int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) state[j] = Op::combine(state[j], behind.state[j]);
  }
  inline bool is_regular(int64_t rows) const {
    bool regular = true;
    for (int64_t j = 0; j < rows; ++j) regular &= detail::is_regular<Op>(state[j]);
    return regular;
  }
};
template <int64_t width>
struct Columns<Sum, float, width> : FloatColumns<Sum, float, width> {};
template <int64_t width>
struct Columns<Sum, double, width> : FloatColumns<Sum, double, width> {};
template <int64_t width>
struct Columns<Prod, float, width> : FloatColumns<Prod, float, width> {};
template <int64_t width>
struct Columns<Prod, double, width> : FloatColumns<Prod, double, width> {};
template <class Op, class T, int64_t width>
struct Columns<Placed<Op>, T, width> {
  alignas(cache_line) T state[width];
  alignas(cache_line) int64_t at[width];

  inline void clear(int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) {
      state[j] = Op::template identity<T>;
      at[j] = 0;
    }
  }
  JITGEN_MEMBER void take(int64_t j, int64_t index, T value) {
    const T combined = Op::combine(state[j], value);
    const bool wins = (combined == value) | (value != value);
    at[j] = wins ? index : at[j];
    state[j] = combined;
  }
  JITGEN_MEMBER T result(int64_t j) const { return state[j]; }
  JITGEN_MEMBER int64_t place(int64_t j) const { return at[j]; }
  inline void join(const Columns& behind, int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) take(j, behind.at[j], behind.state[j]);
  }
};
template <class T, int64_t width>
struct Columns<LogSumExp, T, width> {
  alignas(cache_line) T top[width];
  alignas(cache_line) double total[width];

  inline void clear(int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) {
      top[j] = -T(__builtin_huge_val());
      total[j] = 0;
    }
  }
  JITGEN_MEMBER void take(int64_t j, int64_t, T value) { with(j, value, 1); }
  JITGEN_MEMBER T result(int64_t j) const { return top[j] + log(T(total[j])); }
  inline void join(const Columns& behind, int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) with(j, behind.top[j], behind.total[j]);
  }

 private:
  JITGEN_MEMBER void with(int64_t j, T value, double times) {
    using Row = Scan<LogSumExp, T>;
    const T least = top[j], most = Max::combine(least, value);
    total[j] = total[j] * double(Row::power(least, most)) + times * double(Row::power(value, most));
    top[j] = most;
  }
};

}  // namespace jitgen
