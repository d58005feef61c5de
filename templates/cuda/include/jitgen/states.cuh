// Reductions whose state is several numbers, of which one is the result: sums of exponentials and of squared deviations,
// accumulated as values come. What makes them of a row is in reduce.cuh.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

// The largest value met, finite or +inf, and the sum of exp(value - largest).
template <class T>
struct Exponentials {
  T top;
  T sum;
};

// One exponential for each value, and for each state combined (online softmax, Milakov and Gimelshein 2018). A state
// begins with the lowest finite number, so that -inf adds 0. The sum means nothing where the row's maximum is not finite:
// the kernel does not use it there.
template <bool coarse>
struct SumExp {
  // sum + exp(a)
  static JITGEN_DEVICE float plus(float sum, float a) {
    if (!coarse) return sum + exp(a);
    const float root = coarse_exp_root(a);
    return fma(root, root, sum);
  }
  static JITGEN_DEVICE double plus(double sum, double a) { return sum + exp(a); }
  static JITGEN_DEVICE float larger(float a, float b) { return ::fmaxf(a, b); }
  static JITGEN_DEVICE double larger(double a, double b) { return ::fmax(a, b); }

  // One value rescales the sum or is scaled itself; several rescale it together, by the largest of them.
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

// Of `count` values, the sums of their distances from some number and of the squares of those.
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

// 1 / count, to the last bit or two.
JITGEN_DEVICE float share_of(float count) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(count));
  return result;
}
JITGEN_DEVICE double share_of(double count) { return 1.0 / count; }

// Moments about `base`, a finite number near the mean, where that is finite; if it is the mean, the state is centred.
template <class T>
struct Shifted {
  T base;
  Moments<T> moments;

  JITGEN_DEVICE T apart() const { return moments.count == T(0) ? T(0) : moments.first * share_of(moments.count); }
  JITGEN_DEVICE T mean() const { return base + apart(); }
  JITGEN_DEVICE T squares() const { return moments.second; }  // of a centred state
  // The same values' about another base. The bases' distance is exact where they are near.
  JITGEN_DEVICE Moments<T> about(T other) const {
    const T distance = base - other, first = fma(moments.count, distance, moments.first);
    return {moments.count, first, fma(distance, moments.first + first, moments.second)};
  }
};

// Sums of squared deviations. Of a row that is read again and again, and of columns: a vector's own mean and squares join
// those of the vectors before it, which for one value is Welford's step of 1962 (Chan, Golub and LeVeque 1979).
//
// What a thread holds of a row takes three operations a value instead: moments about the mean of its first vector
// ("shifted data" of Chan, Golub and LeVeque 1983), which are then centred, and so are a warp's about its first lane's
// mean and a row's about its first warp's. Of `count` values of which the base is the mean of N, the second moment is at
// most 1 + count / N times the squared deviations, and rounded the more by that, whatever values there are and however
// far from 0: by as many times as a thread has vectors, a warp lanes and a row warps. Where the base lies among the values
// it is about once. An infinite value leaves the mean infinite, as a sum would be.
struct Deviations {
  template <class T, int N>
  static JITGEN_DEVICE Spread<T> with(const Spread<T>& state, const T (&values)[N]) {
    T sum = values[0], squares = 0;
    for (int i = 1; i < N; ++i) sum += values[i];
    const T mean = sum * (T(1) / N);
    for (int i = 0; i < N; ++i) squares = fma(values[i] - mean, values[i] - mean, squares);
    const T count = state.count + N;
    // The first vector's mean is the mean, exactly.
    const T weight = state.count == T(0) ? T(1) : N * share_of(count);
    const T apart = mean - state.mean;
    return {fma(apart, weight, state.mean), fma(apart * (state.count * weight), apart, state.squares + squares), count};
  }
  template <class T, int N>
  static JITGEN_DEVICE Shifted<T> with(Shifted<T> state, const T (&values)[N]) {
    if (state.moments.count == T(0)) {
      T sums[N];
      for (int i = 0; i < N; ++i) sums[i] = values[i];
      // Pairwise, so that the mean of equal values is exact.
      for (int step = 1; step < N; step *= 2) {
        for (int i = 0; i + step < N; i += 2 * step) sums[i] += sums[i + step];
      }
      const T mean = sums[0] * (T(1) / N);
      state.base = mean - mean == T(0) ? mean : T(0);
    }
    for (int i = 0; i < N; ++i) {
      const T apart = values[i] - state.base;
      state.moments.first += apart;
      state.moments.second = fma(apart, apart, state.moments.second);
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

  // The same for both orders, so that partners agree: from the smaller mean towards the larger.
  template <class T>
  static JITGEN_DEVICE Spread<T> combine(const Spread<T>& a, const Spread<T>& b) {
    if (a.count == T(0)) return b;
    if (b.count == T(0)) return a;
    const bool ordered = a.mean <= b.mean;
    const T apart = ordered ? b.mean - a.mean : a.mean - b.mean;
    const T count = a.count + b.count;
    const T mean = fma(apart, (ordered ? b.count : a.count) * share_of(count), ordered ? a.mean : b.mean);
    // Weighted before it is squared: a product with nothing is nothing then, whatever else overflows.
    return {mean, fma(apart * (a.count * b.count * share_of(count)), apart, a.squares + b.squares), count};
  }
};

}  // namespace jitgen
