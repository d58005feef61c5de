// The maximum or the minimum of 16-bit elements, two at a time as they lie in memory. That takes one instruction for
// two elements; one at a time, each element takes two, of which one converts it to float.
//
//   jitgen::Pair<jitgen::bfloat16> pair = jitgen::Pair<jitgen::bfloat16>::of(-infinity);
//   pair = jitgen::maximum(pair, x);        // takes a jitgen::Vector of an even number of elements
//   float largest = jitgen::maximum(pair);  // the larger of the two; NaN if any element was NaN
#pragma once

#include "jitgen/storage.cuh"
#include "jitgen/vector.cuh"

namespace jitgen {

template <class Storage>
struct Pair {
  uint32_t both;

  static JITGEN_DEVICE Pair of(float value) {
    const uint32_t bits = store<Storage>(value).bits;
    return {bits | bits << 16};
  }
  JITGEN_DEVICE float low() const { return load(Storage{uint16_t(both)}); }
  JITGEN_DEVICE float high() const { return load(Storage{uint16_t(both >> 16)}); }
};

#define JITGEN_PAIRWISE(name, instruction, Storage, type)                                           \
  JITGEN_DEVICE Pair<Storage> name(Pair<Storage> a, Pair<Storage> b) {                              \
    Pair<Storage> result;                                                                           \
    asm(instruction ".NaN." type " %0, %1, %2;" : "=r"(result.both) : "r"(a.both), "r"(b.both));    \
    return result;                                                                                  \
  }
JITGEN_PAIRWISE(maximum, "max", bfloat16, "bf16x2")
JITGEN_PAIRWISE(maximum, "max", float16, "f16x2")
JITGEN_PAIRWISE(minimum, "min", bfloat16, "bf16x2")
JITGEN_PAIRWISE(minimum, "min", float16, "f16x2")
#undef JITGEN_PAIRWISE

#define JITGEN_EXTREMUM(name)                                                                       \
  template <class Storage, int N>                                                                   \
  JITGEN_DEVICE Pair<Storage> name(Pair<Storage> pair, const Vector<Storage, N>& elements) {        \
    const auto pairs = reinterpret_cast<const uint32_t*>(elements.words);                           \
    _Pragma("unroll") for (int i = 0; i < N / 2; ++i) pair = name(pair, Pair<Storage>{pairs[i]});   \
    return pair;                                                                                    \
  }                                                                                                 \
  template <class Storage>                                                                          \
  JITGEN_DEVICE float name(Pair<Storage> pair) {                                                    \
    return name(pair.low(), pair.high());                                                           \
  }
JITGEN_EXTREMUM(maximum)
JITGEN_EXTREMUM(minimum)
#undef JITGEN_EXTREMUM

}  // namespace jitgen
