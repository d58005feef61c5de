// Combines values over neighbouring lanes of a warp by shuffles. Every lane gets the result, which is always combined in
// the same order, so that sums are reproducible.
//
//   float total = jitgen::combine_lanes<jitgen::Sum, 16>(mine);
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

struct Sum {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return add(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a + b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a + b; }
};
struct Prod {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return mul(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a * b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a * b; }
};
struct Max {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return maximum(a, b);
  }
};
struct Min {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return minimum(a, b);
  }
};

// A value as 32-bit words, by which it is moved. Three words are moved as four.
template <class T>
union Words {
  static constexpr int used = (sizeof(T) + 3) / 4, count = used == 3 ? 4 : used;
  T whole;
  uint32_t word[count];
};

// What `exchange`, of a word, makes of all words of `value`.
template <class T, class Exchange>
JITGEN_DEVICE T by_words(T value, const Exchange& exchange) {
  Words<T> from, to;
  for (int i = 0; i < from.count; ++i) from.word[i] = 0;
  from.whole = value;
#pragma unroll
  for (int i = 0; i < from.used; ++i) to.word[i] = exchange(from.word[i]);
  return to.whole;
}

template <class T>
JITGEN_DEVICE T from_lane(T value, int distance) {
  return by_words(value, [=](uint32_t word) { return __shfl_xor_sync(0xffffffffu, word, distance); });
}

// Combines over aligned groups of `lanes` neighbouring lanes, a power of two. Every operation is commutative to the
// last bit, so that both partners of an exchange agree.
template <class Op, int lanes, class T>
JITGEN_DEVICE T combine_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) value = Op::combine(value, from_lane(value, distance));
  return value;
}

}  // namespace jitgen
