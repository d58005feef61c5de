// Reductions whose state is several numbers: sums of exponentials and of squared deviations, accumulated online. How
// the states of a row are combined over its threads is in reduce.cuh.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

// The largest value so far, finite or +inf, and the sum of exp(value - largest).
template <class T>
struct Exponentials {
  T top;
  T sum;
};

// A sum of exponentials (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). It takes one
// exponential for each value and for each state that is combined. The initial `top` is the lowest finite number, so
// that -inf adds 0. Where the row's maximum is not finite, the kernel does not use the sum. `coarse` allows a less
// exact exponential, because every result of the kernel has 16 bits or fewer.
template <bool coarse>
struct SumExp {
  // Returns sum + exp(a).
  static JITGEN_DEVICE float plus(float sum, float a) {
    if (!coarse) return sum + exp(a);
    const float root = coarse_exp_root(a);
    return fma(root, root, sum);
  }
  static JITGEN_DEVICE double plus(double sum, double a) { return sum + exp(a); }
  static JITGEN_DEVICE float larger(float a, float b) { return ::fmaxf(a, b); }
  static JITGEN_DEVICE double larger(double a, double b) { return ::fmax(a, b); }

  // One value either rescales the sum or is scaled itself. Several values rescale it together, by the largest of them.
  template <class T>
  static JITGEN_DEVICE Exponentials<T> with(const Exponentials<T>& state, const T (&values)[1]) {
    const bool higher = values[0] > state.top;
    const T scale = plus(T(0), -abs(values[0] - state.top));
    return {higher ? values[0] : state.top, fma(state.sum, higher ? scale : T(1), higher ? T(1) : scale)};
  }
  template <class T, int N>
  static JITGEN_DEVICE Exponentials<T> with(const Exponentials<T>& state, const T (&values)[N]) {
    T top = state.top;
    for (int i = 0; i < N; ++i) top = larger(top, values[i]);
    T sum = state.sum * plus(T(0), state.top - top);
    for (int i = 0; i < N; ++i) sum = plus(sum, values[i] - top);
    return {top, sum};
  }
  template <class T>
  static JITGEN_DEVICE Exponentials<T> combine(const Exponentials<T>& a, const Exponentials<T>& b) {
    const bool higher = b.top > a.top;
    const T scale = exp(-abs(b.top - a.top));
    return {higher ? b.top : a.top, fma(higher ? a.sum : b.sum, scale, higher ? b.sum : a.sum)};
  }
};

// The mean of `count` values and the sum of their squared deviations from it.
template <class T>
struct Spread {
  T mean;
  T squares;
  T count;
};

// The number of values, the sum of their distances from a base, and the sum of the squares of those distances.
template <class T>
struct Moments {
  T count;
  T first;
  T second;
};
template <class T>
JITGEN_DEVICE Moments<T> add(const Moments<T>& a, const Moments<T>& b) {
  return {a.count + b.count, a.first + b.first, a.second + b.second};
}

// 1 / count, with an error of one or two units in the last place.
JITGEN_DEVICE float share_of(float count) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(count));
  return result;
}
JITGEN_DEVICE double share_of(double count) { return 1.0 / count; }

// Moments about `base`, a finite number near the mean where the mean is finite. A state whose base is its mean is
// centred.
template <class T>
struct Shifted {
  T base;
  Moments<T> moments;

  // The distance of the mean from the base.
  JITGEN_DEVICE T offset() const { return moments.count == T(0) ? T(0) : moments.first * share_of(moments.count); }
  JITGEN_DEVICE T mean() const { return base + offset(); }
  JITGEN_DEVICE T squares() const { return moments.second; }  // of a centred state
  // The moments of the same values about another base. The difference of two bases is exact where they are near.
  JITGEN_DEVICE Moments<T> about(T other) const {
    const T distance = base - other, first = fma(moments.count, distance, moments.first);
    return {moments.count, first, fma(distance, moments.first + first, moments.second)};
  }
};

// Sums of squared deviations from the mean, in one of two ways.
//
// A `Spread` serves rows that each pass reads from memory, and columns. The mean and the squared deviations of each
// vector are combined with those of the vectors before it (Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances", 1979); for one value that is the step of Welford, 1962.
//
// A `Shifted` state serves a thread that holds its elements of a row, and takes three operations for each value. Its
// moments are about the mean of the thread's first vector ("shifted data", Chan, Golub and LeVeque, "Algorithms for
// computing the sample variance", 1983) and are centred at the end. The moments of a warp are then taken about the mean
// of its first lane, and those of a row about the mean of its first warp. If the base is the mean of N of `count`
// values, the second moment is at most 1 + count / N times the squared deviations, whatever the values are and however
// far from 0, and its rounding error grows by that factor. So the factor is at most about the number of vectors of a
// thread, of lanes of a warp, and of warps of a row, at the three levels; where the base lies among the values it is
// about 1. An infinite value leaves the mean infinite, as it leaves a sum.
struct Deviations {
  template <class T, int N>
  static JITGEN_DEVICE Spread<T> with(const Spread<T>& state, const T (&values)[N]) {
    T sum = values[0], squares = 0;
    for (int i = 1; i < N; ++i) sum += values[i];
    const T mean = sum * (T(1) / N);
    for (int i = 0; i < N; ++i) squares = fma(values[i] - mean, values[i] - mean, squares);
    const T count = state.count + N;
    // A weight of 1 makes the mean of the first vector the mean, exactly.
    const T weight = state.count == T(0) ? T(1) : N * share_of(count);
    const T offset = mean - state.mean;
    return {fma(offset, weight, state.mean), fma(offset * (state.count * weight), offset, state.squares + squares), count};
  }
  template <class T, int N>
  static JITGEN_DEVICE Shifted<T> with(Shifted<T> state, const T (&values)[N]) {
    if (state.moments.count == T(0)) {
      T sums[N];
      for (int i = 0; i < N; ++i) sums[i] = values[i];
      // The sum is pairwise, so that the mean of equal values is exact.
      for (int step = 1; step < N; step *= 2) {
        for (int i = 0; i + step < N; i += 2 * step) sums[i] += sums[i + step];
      }
      const T mean = sums[0] * (T(1) / N);
      state.base = mean - mean == T(0) ? mean : T(0);
    }
    for (int i = 0; i < N; ++i) {
      const T offset = values[i] - state.base;
      state.moments.first += offset;
      state.moments.second = fma(offset, offset, state.moments.second);
    }
    state.moments.count += N;
    return state;
  }
  template <class T>
  static JITGEN_DEVICE Shifted<T> centred(const Shifted<T>& state) {
    const T mean = state.mean();
    if (!(mean - mean == T(0))) return state;
    const Moments<T> moments = state.about(mean);
    return {mean, {moments.count, moments.first, moments.second < T(0) ? T(0) : moments.second}};
  }

  // The result is the same in both orders, so that both lanes of an exchange agree: it goes from the smaller mean to
  // the larger.
  template <class T>
  static JITGEN_DEVICE Spread<T> combine(const Spread<T>& a, const Spread<T>& b) {
    if (a.count == T(0)) return b;
    if (b.count == T(0)) return a;
    const bool ordered = a.mean <= b.mean;
    const T offset = ordered ? b.mean - a.mean : a.mean - b.mean;
    const T count = a.count + b.count;
    const T mean = fma(offset, (ordered ? b.count : a.count) * share_of(count), ordered ? a.mean : b.mean);
    // The distance is weighted before it is squared, so that a weight of 0 gives 0 whatever the square would be.
    return {mean, fma(offset * (a.count * b.count * share_of(count)), offset, a.squares + b.squares), count};
  }
};

}  // namespace jitgen
