// Storage types of elements in memory, and conversions to and from the compute dtypes of the arithmetic.
//
//   load(s)            storage -> compute: float for the 8- and 16-bit floats, the value itself for everything else
//   store<Storage>(c)  compute -> storage, rounded to nearest even, with torch's overflow and NaN
//   round_to<S>(x)     float -> S -> float: what a value becomes when eager torch would have stored it
//   cast<To>(from)     between compute dtypes, as torch's .to()
//
// Every function is free of branches and of loads, so that the compiler vectorises the loop around it on any target.
// Conversions are done on bits: GCC 12 knows vcvtph2ps for single values only. Formats and overflow rules follow torch
// (c10/util/Half.h, BFloat16.h, Float8_*.h); the float16 rounding by a float addition is Fabian Giesen's and Marat
// Dukhan's (FP16).
#pragma once

#include "jitgen/base.hpp"

// float8_e4m3fn overflow: torch saturates to 448 from 2.12 on and gave NaN before. Part of the generated source, so
// that it is part of the artifact's key.
#ifndef JITGEN_E4M3FN_SATURATES
#define JITGEN_E4M3FN_SATURATES 1
#endif

namespace jitgen {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
struct float8_e4m3fn {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};
// bool in memory. GCC 12 does not vectorise a selection by a bool that it loads as one.
struct boolean {
  uint8_t byte;
};

// ------------------------------------------------------------------------------------------------ storage -> compute

JITGEN_INLINE float load(bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

JITGEN_INLINE float load(float16 x) {
  // Exponent and mantissa are moved to float's place with the exponent bias still wrong, and a multiplication by 2^112
  // corrects it; a float16 denormal is by then an ordinary float denormal, so the same multiplication is right for it.
  const uint32_t magnitude = (uint32_t(x.bits) & 0x7fffu) << 13;
  const uint32_t sign = (uint32_t(x.bits) & 0x8000u) << 16;
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

JITGEN_INLINE float load(float8_e5m2 x) { return load(float16{uint16_t(uint16_t(x.bits) << 8)}); }

JITGEN_INLINE float load(float8_e4m3fn x) {
  const uint32_t magnitude = (uint32_t(x.bits) & 0x7fu) << 20;
  const uint32_t sign = (uint32_t(x.bits) & 0x80u) << 24;
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p120f);
  return float_of(sign | (magnitude == 0x07f00000u ? 0x7ff00000u : finite));
}

JITGEN_INLINE float load(float x) { return x; }
JITGEN_INLINE double load(double x) { return x; }
JITGEN_INLINE bool load(boolean x) { return x.byte != 0; }
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T load(T x) {
  return x;
}

// ------------------------------------------------------------------------------------------------ compute -> storage

namespace detail {

// Round a finite magnitude to a narrow format with `Mantissa` mantissa bits and exponent bias `Bias`; the result's bits
// continue into the next exponent where rounding carries. Both methods round to nearest even: an integer addition for
// normal results, and for denormal ones a float addition that leaves the value in the low bits of the sum.
template <int Mantissa, int Bias>
JITGEN_INLINE uint32_t narrow(uint32_t magnitude) {
  constexpr int drop = 23 - Mantissa;
  constexpr uint32_t rebias = uint32_t(127 - Bias) << 23;
  constexpr uint32_t aligner = uint32_t(127 - Bias + drop + 1) << 23;
  constexpr uint32_t smallest_normal = uint32_t(128 - Bias) << 23;
  const uint32_t odd = (magnitude >> drop) & 1u;
  const uint32_t normal = (magnitude - rebias + ((1u << (drop - 1)) - 1u) + odd) >> drop;
  const uint32_t denormal = bits_of(float_of(magnitude) + float_of(aligner)) - aligner;
  return magnitude < smallest_normal ? denormal : normal;
}

template <class Storage>
struct Store {
  JITGEN_INLINE Storage from(Storage x) { return x; }
};

// The upper half is x as bfloat16; the lower half is left over. `narrow_nan`: where x is NaN, it is so as bfloat16, its
// lower half 0, and needs no care.
template <bool narrow_nan = false>
JITGEN_INLINE uint32_t round_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return !narrow_nan && x != x ? 0x7fc00000u : rounded;
}

template <>
struct Store<bfloat16> {
  JITGEN_INLINE bfloat16 from(float x) { return {uint16_t(round_bfloat16(x) >> 16)}; }
};

template <>
struct Store<float16> {
  JITGEN_INLINE float16 from(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // The sum with a power of two 2^13 times the value's (at least the denormals') is rounded where float16 ends. The
    // factors cancel but for the bias, and what float16 cannot hold overflows at the first.
    const float scaled = float_of(magnitude) * 0x1p112f * 0x1p-110f;
    const uint32_t exponent = magnitude & 0x7f800000u;
    const uint32_t aligner = (exponent < 0x38800000u ? 0x38800000u : exponent) + 0x07800000u;
    const uint32_t sum = bits_of(scaled + float_of(aligner));
    const uint32_t code = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    return {uint16_t((magnitude > 0x7f800000u ? 0x7e00u : code) | ((bits >> 16) & 0x8000u))};
  }
};

template <>
struct Store<boolean> {
  JITGEN_INLINE boolean from(bool x) { return {uint8_t(x)}; }
};

template <>
struct Store<float8_e5m2> {
  JITGEN_INLINE float8_e5m2 from(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t code = narrow<2, 15>(magnitude);
    code = magnitude >= 0x47700000u ? 0x7cu : code;  // 61440
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return {uint8_t(code | ((bits >> 24) & 0x80u))};
  }
};

template <>
struct Store<float8_e4m3fn> {
  JITGEN_INLINE float8_e4m3fn from(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    constexpr uint32_t overflow = JITGEN_E4M3FN_SATURATES ? 0x7eu : 0x7fu;
    uint32_t code = narrow<3, 7>(magnitude);
    code = magnitude > 0x43e80000u ? overflow : code;  // 464, half way from 448 to the code that is NaN
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return {uint8_t(code | ((bits >> 24) & 0x80u))};
  }
};

}  // namespace detail

template <class Storage, class Compute>
JITGEN_INLINE Storage store(Compute x) {
  return detail::Store<Storage>::from(x);
}

// Its NaN, if it is one, as bfloat16.
JITGEN_INLINE float with_narrow_nan(float x) { return x == x ? x : float_of(0x7fc00000u); }

// Two bfloat16 in one 32-bit word: the low one is its low half shifted up, the high one is its high half as it stands.
// That costs half of what widening and packing 16-bit lanes costs.
struct Pair {
  float low;
  float high;
};

JITGEN_INLINE Pair load_pair(const bfloat16* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return {float_of(word << 16), float_of(word & 0xffff0000u)};
}

template <bool narrow_nan = false>
JITGEN_INLINE void store_pair(bfloat16* to, Pair x) {
  const uint32_t low = detail::round_bfloat16<narrow_nan>(x.low), high = detail::round_bfloat16<narrow_nan>(x.high);
  const uint32_t word = (high & 0xffff0000u) | (low >> 16);
  __builtin_memcpy(to, &word, sizeof(word));
}

template <class Storage>
JITGEN_INLINE float round_to(float x) {
  return load(store<Storage>(x));
}

// ----------------------------------------------------------------------------------------------------- compute dtypes

namespace detail {

template <class To, class From>
struct Cast {
  JITGEN_INLINE To from(From x) { return static_cast<To>(x); }
};

// A value outside the integer's range is undefined in C++. Here it is what x86 gives torch: the conversion to 32 (64)
// bits yields the smallest integer, and a narrower type keeps its low bits.
template <class To, class From>
struct Truncate {
  JITGEN_INLINE To from(From x) { return static_cast<To>(static_cast<int32_t>(x)); }
};
template <>
struct Cast<int8_t, float> : Truncate<int8_t, float> {};
template <>
struct Cast<int8_t, double> : Truncate<int8_t, double> {};
template <>
struct Cast<int16_t, float> : Truncate<int16_t, float> {};
template <>
struct Cast<int16_t, double> : Truncate<int16_t, double> {};

// torch converts to uint8 through int64, so that -1 is 255 and 300 is 44 on every path. The same value modulo 256 is
// formed exactly in floating point (both the quotient's floor and the difference are exact), which needs no 64-bit
// conversion; AVX2 has none for vectors.
template <class From>
JITGEN_INLINE uint8_t uint8_modulo(From x, From truncated, From blocks) {
  const From rest = truncated - blocks * From(256);
  return static_cast<uint8_t>(static_cast<int32_t>(x - x == From(0) ? rest : From(0)));
}
template <>
struct Cast<uint8_t, float> {
  JITGEN_INLINE uint8_t from(float x) {
    const float whole = __builtin_truncf(x);
    return uint8_modulo(x, whole, __builtin_floorf(whole * 0x1p-8f));
  }
};
template <>
struct Cast<uint8_t, double> {
  JITGEN_INLINE uint8_t from(double x) {
    const double whole = __builtin_trunc(x);
    return uint8_modulo(x, whole, __builtin_floor(whole * 0x1p-8));
  }
};

// NaN is true: it is not equal to zero.
template <class From>
struct Cast<bool, From> {
  JITGEN_INLINE bool from(From x) { return x != From(0); }
};
// As a selection, which is vectorised where a conversion of bool is not.
template <class To>
struct Cast<To, bool> {
  JITGEN_INLINE To from(bool x) { return x ? To(1) : To(0); }
};
template <>
struct Cast<bool, bool> {
  JITGEN_INLINE bool from(bool x) { return x; }
};

}  // namespace detail

template <class To, class From>
JITGEN_INLINE To cast(From x) {
  return detail::Cast<To, From>::from(x);
}

}  // namespace jitgen
