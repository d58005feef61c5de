// Scans among the threads of a block: of a row's tile each thread has some consecutive elements, which it has scanned by
// itself, and asks for what is before them. What is combined is always combined in the same order.
//
//   using Kind = jitgen::Sum<float>;                       // what, see below
//   Kind::State mine = Kind::of(x, index);                 // the state of one element; combine() has two in a row's order
//   auto scanned = jitgen::scan_row<Kind, along>(mine, scratch, thread);      // scanned.before, scanned.total
//   jitgen::scan_columns<Kind, along, lanes, rows_per_thread>(mine, before, total, scratch, slice, lane);
//
// A warp's threads combine by shuffles in log2 steps (Hillis and Steele, "Data parallel algorithms", 1986), a block's
// warps through shared memory, of which every use has the other half, so that one barrier a use is enough.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

// ---------------------------------------------------------------------------------------------------------------- what

// `Wide` is the kind in which states are carried along a row: a float32 sum's is of double, so that its error does not
// grow with the number of tiles.
template <class T>
struct Sum {
  using State = T;
  using Wide = Sum;
  static JITGEN_DEVICE State none() { return T(0); }
  template <class Index>
  static JITGEN_DEVICE State of(T x, Index) {
    return x;
  }
  static JITGEN_DEVICE State combine(State a, State b) { return add(a, b); }
  static JITGEN_DEVICE T value(State state) { return state; }
  static JITGEN_DEVICE State widened(State state) { return state; }
  static JITGEN_DEVICE State narrowed(State state) { return state; }
};
template <>
struct Sum<double> {
  using State = double;
  using Wide = Sum;
  static JITGEN_DEVICE double none() { return 0; }
  template <class Index>
  static JITGEN_DEVICE double of(double x, Index) {
    return x;
  }
  static JITGEN_DEVICE double combine(double a, double b) { return a + b; }
  static JITGEN_DEVICE double value(double state) { return state; }
  static JITGEN_DEVICE double widened(double state) { return state; }
  static JITGEN_DEVICE double narrowed(double state) { return state; }
};
template <>
struct Sum<float> {
  using State = float;
  using Wide = Sum<double>;
  static JITGEN_DEVICE float none() { return 0; }
  template <class Index>
  static JITGEN_DEVICE float of(float x, Index) {
    return x;
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a + b; }
  static JITGEN_DEVICE float value(float state) { return state; }
  static JITGEN_DEVICE double widened(float state) { return state; }
  static JITGEN_DEVICE float narrowed(double state) { return float(state); }
};

// A kind whose states are carried as they are.
template <class Kind, class T>
struct AsItIs {
  using State = T;
  using Wide = Kind;
  template <class Index>
  static JITGEN_DEVICE State of(T x, Index) {
    return x;
  }
  static JITGEN_DEVICE T value(State state) { return state; }
  static JITGEN_DEVICE State widened(State state) { return state; }
  static JITGEN_DEVICE State narrowed(State state) { return state; }
};

template <class T>
struct Prod : AsItIs<Prod<T>, T> {
  static JITGEN_DEVICE T none() { return T(1); }
  static JITGEN_DEVICE T combine(T a, T b) { return mul(a, b); }
};
template <>
struct Prod<float> : AsItIs<Prod<float>, float> {
  static JITGEN_DEVICE float none() { return 1; }
  static JITGEN_DEVICE float combine(float a, float b) { return a * b; }
};
template <>
struct Prod<double> : AsItIs<Prod<double>, double> {
  static JITGEN_DEVICE double none() { return 1; }
  static JITGEN_DEVICE double combine(double a, double b) { return a * b; }
};

template <class T>
struct Ends {
  static constexpr T low = T(-1) < T(0) ? T(1ull << (8 * sizeof(T) - 1)) : T(0), high = T(~low);
  static JITGEN_DEVICE T lowest() { return low; }
  static JITGEN_DEVICE T highest() { return high; }
};
template <>
struct Ends<float> {
  static JITGEN_DEVICE float lowest() { return __int_as_float(0xff800000); }
  static JITGEN_DEVICE float highest() { return __int_as_float(0x7f800000); }
};
template <>
struct Ends<double> {
  static JITGEN_DEVICE double lowest() { return __longlong_as_double(0xfff0000000000000LL); }
  static JITGEN_DEVICE double highest() { return __longlong_as_double(0x7ff0000000000000LL); }
};

// Of equal elements the later one counts, and the latest NaN.
template <bool largest, class T>
JITGEN_DEVICE bool is_later(T a, T b) {
  return (largest ? b >= a : b <= a) || b != b;
}
template <bool largest, class T>
struct Extremum : AsItIs<Extremum<largest, T>, T> {
  static JITGEN_DEVICE T none() { return largest ? Ends<T>::lowest() : Ends<T>::highest(); }
  static JITGEN_DEVICE T combine(T a, T b) { return is_later<largest>(a, b) ? b : a; }
};
template <class T>
using Max = Extremum<true, T>;
template <class T>
using Min = Extremum<false, T>;

template <class T>
struct Placed {
  T extremum;
  int64_t place;
};
template <bool largest, class T>
struct ArgExtremum {
  using State = Placed<T>;
  using Wide = ArgExtremum;
  static JITGEN_DEVICE State none() { return {Extremum<largest, T>::none(), 0}; }
  template <class Index>
  static JITGEN_DEVICE State of(T x, Index place) {
    return {x, place};
  }
  static JITGEN_DEVICE State combine(const State& a, const State& b) {
    const bool later = is_later<largest>(a.extremum, b.extremum);
    return {later ? b.extremum : a.extremum, later ? b.place : a.place};
  }
  static JITGEN_DEVICE T value(const State& state) { return state.extremum; }
  static JITGEN_DEVICE int64_t place(const State& state) { return state.place; }
  static JITGEN_DEVICE State widened(const State& state) { return state; }
  static JITGEN_DEVICE State narrowed(const State& state) { return state; }
};
template <class T>
using ArgMax = ArgExtremum<true, T>;
template <class T>
using ArgMin = ArgExtremum<false, T>;

// The greatest element so far, and the sum of exp(x - top). Where two are equal (infinities too), their difference
// counts as 0.
template <class T>
struct Powers {
  T top;
  T sum;
};
template <class T>
struct LogSumExp {
  using State = Powers<T>;
  using Wide = LogSumExp;
  static JITGEN_DEVICE State none() { return {Ends<T>::lowest(), T(0)}; }
  template <class Index>
  static JITGEN_DEVICE State of(T x, Index) {
    return {x, T(1)};
  }
  static JITGEN_DEVICE State combine(const State& a, const State& b) {
    const T top = Max<T>::combine(a.top, b.top);
    return {top, a.sum * power(a.top, top) + b.sum * power(b.top, top)};
  }
  static JITGEN_DEVICE T value(const State& state) { return state.top + log(state.sum); }
  static JITGEN_DEVICE State widened(const State& state) { return state; }
  static JITGEN_DEVICE State narrowed(const State& state) { return state; }

 private:
  static JITGEN_DEVICE T power(T x, T top) { return exp(x == top ? T(0) : x - top); }
};

// ------------------------------------------------------------------------------------------------- among a row's threads

// A state as the 32-bit words it is moved by.
template <class State>
union StateWords {
  static constexpr int count = (sizeof(State) + 3) / 4;
  State whole;
  uint32_t words[count];
  JITGEN_DEVICE StateWords() {}
};
// The state of the lane `distance` below, among `width` neighbours; one's own where there is none.
template <int width, class State>
JITGEN_DEVICE State from_below(const State& state, int distance) {
  StateWords<State> from, to;
#pragma unroll
  for (int i = 0; i < from.count; ++i) from.words[i] = 0;
  from.whole = state;
#pragma unroll
  for (int i = 0; i < from.count; ++i) to.words[i] = __shfl_up_sync(0xffffffffu, from.words[i], distance, width);
  return to.whole;
}
template <int width, class State>
JITGEN_DEVICE State from_last(const State& state) {
  StateWords<State> from, to;
#pragma unroll
  for (int i = 0; i < from.count; ++i) from.words[i] = 0;
  from.whole = state;
#pragma unroll
  for (int i = 0; i < from.count; ++i) to.words[i] = __shfl_sync(0xffffffffu, from.words[i], width - 1, width);
  return to.whole;
}

template <class State>
struct Found {
  State before;  // of the threads before this one
  State total;   // of all
};

// Room for `count` states, of type Widest or smaller, twice.
template <class Widest, int count>
struct ScanScratch {
  alignas(16) char memory[2 * count * sizeof(Widest)];
  template <class State>
  JITGEN_DEVICE State* half(int iteration) {
    return reinterpret_cast<State*>(memory + (iteration & 1) * count * sizeof(Widest));
  }
};
struct NoScratch {};

// Over the `along` threads of a row, a power of two; more than a warp are the whole block. `iteration` counts the uses of
// `scratch`.
template <class Kind, int along, class Scratch>
JITGEN_DEVICE Found<typename Kind::State> scan_row(const typename Kind::State& mine, Scratch& scratch, int thread, int iteration) {
  using State = typename Kind::State;
  constexpr int width = along < 32 ? along : 32;
  const int lane = thread % width;
  State upto = mine;
#pragma unroll
  for (int distance = 1; distance < width; distance *= 2) {
    const State below = from_below<width>(upto, distance);
    if (lane >= distance) upto = Kind::combine(below, upto);
  }
  State before = from_below<width>(upto, 1);
  if (lane == 0) before = Kind::none();
  State total = from_last<width>(upto);
  if constexpr (along > 32) {
    State* const totals = scratch.template half<State>(iteration);
    const int warp = thread / 32;
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    State sofar = Kind::none(), of_warps = Kind::none();
#pragma unroll
    for (int other = 0; other < along / 32; ++other) {
      if (other == warp) of_warps = sofar;
      sofar = Kind::combine(sofar, totals[other]);
    }
    before = Kind::combine(of_warps, before);
    total = sofar;
  }
  return {before, total};
}

// Of `rows_per_thread` neighbouring rows of each of `lanes` threads, over the `along` of them that share these rows.
template <class Kind, int along, int lanes, int rows_per_thread, class Scratch>
JITGEN_DEVICE void scan_columns(const typename Kind::State (&mine)[rows_per_thread], typename Kind::State (&before)[rows_per_thread],
                                typename Kind::State (&total)[rows_per_thread], Scratch& scratch, int slice, int lane, int iteration) {
  using State = typename Kind::State;
  State* const totals = scratch.template half<State>(iteration);
#pragma unroll
  for (int j = 0; j < rows_per_thread; ++j) totals[(slice * rows_per_thread + j) * lanes + lane] = mine[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < rows_per_thread; ++j) {
    before[j] = total[j] = Kind::none();
#pragma unroll
    for (int other = 0; other < along; ++other) {
      if (other == slice) before[j] = total[j];
      total[j] = Kind::combine(total[j], totals[(other * rows_per_thread + j) * lanes + lane]);
    }
  }
}

}  // namespace jitgen
