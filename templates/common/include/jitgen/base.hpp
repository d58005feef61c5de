// What every jitgen C++ header stands on: fixed-width names, bit casts and the inlining rule.
//
// Nothing here or above includes <cmath>, <type_traits> or <immintrin.h>: they cost more to parse than a kernel costs
// to compile, and a kernel links neither libstdc++ nor libgomp. Compiler built-ins (GCC's, also Clang's) do instead.
#pragma once

#include <stdint.h>

// Forced inlining: a function the inliner leaves alone is a call, and a call stops the vectoriser.
#define JITGEN_INLINE static inline __attribute__((always_inline))

namespace jitgen {

template <class To, class From>
JITGEN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

JITGEN_INLINE uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
JITGEN_INLINE uint64_t bits_of(double x) { return bit_cast<uint64_t>(x); }
JITGEN_INLINE float float_of(uint32_t bits) { return bit_cast<float>(bits); }
JITGEN_INLINE double double_of(uint64_t bits) { return bit_cast<double>(bits); }

// The unsigned type of the same width, in which integer arithmetic wraps. Naming it also says "T is an integer":
// the templates over integers use it as their constraint.
template <class T>
struct Unsigned;
template <>
struct Unsigned<uint8_t> {
  using type = uint8_t;
};
template <>
struct Unsigned<int8_t> {
  using type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using type = uint16_t;
};
template <>
struct Unsigned<int32_t> {
  using type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using type = uint64_t;
};
template <class T>
using unsigned_t = typename Unsigned<T>::type;

}  // namespace jitgen
