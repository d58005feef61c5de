// Elements in memory, and their conversion to and from numbers: storage types, load, store, round_to and cast.
//
//   load(Storage)        -> the element in its compute dtype, exactly
//   store<Storage>(a)    -> the compute value as an element, rounded to nearest even
//   round_to<Storage>(a) -> a float rounded to a 16- or 8-bit format and back
//   cast<To>(a)          -> one compute dtype to another, as torch converts
//
// float16, bfloat16 and the two fp8 formats compute in float; every other type is its own storage. Conversions are
// PTX's where the architecture has them (fp8 from sm_89 on) and exact bit arithmetic elsewhere, with torch's results
// for overflow: float8_e5m2 becomes infinity; float8_e4m3fn, which has none, its largest number, or NaN, as older torch
// has it, where the generated source defines JITGEN_E4M3FN_SATURATES as 0 before including this.
#pragma once

#include "jitgen/math.cuh"
#include "jitgen/types.cuh"

#ifndef JITGEN_E4M3FN_SATURATES
#define JITGEN_E4M3FN_SATURATES 1
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define JITGEN_FP8_INSTRUCTIONS 1
#else
#define JITGEN_FP8_INSTRUCTIONS 0
#endif

namespace jitgen {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float8_e4m3fn {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};

template <class Storage>
struct ComputeType {
  using type = Storage;
};
template <>
struct ComputeType<float16> {
  using type = float;
};
template <>
struct ComputeType<bfloat16> {
  using type = float;
};
template <>
struct ComputeType<float8_e4m3fn> {
  using type = float;
};
template <>
struct ComputeType<float8_e5m2> {
  using type = float;
};
template <class Storage>
using Compute = typename ComputeType<Storage>::type;

// ---------------------------------------------------------------------------------------------------------------- load

template <class Storage>
JITGEN_DEVICE Compute<Storage> load(Storage element) {
  return element;
}

JITGEN_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

template <>
JITGEN_DEVICE float load<float16>(float16 element) {
  return half_to_float(element.bits);
}

template <>
JITGEN_DEVICE float load<bfloat16>(bfloat16 element) {
  float value;  // the assembler merges this move with the one that extracts the half; it would not a shift
  asm("mov.b32 %0, {0, %1};" : "=f"(value) : "h"(element.bits));
  return value;
}

template <>
JITGEN_DEVICE float load<float8_e4m3fn>(float8_e4m3fn element) {
#if JITGEN_FP8_INSTRUCTIONS
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(element.bits)));
  return half_to_float(uint16_t(pair));
#else
  // As a float16 with three mantissa bits it is 2^-8 too small, float16's exponent bias being 15 and not 7.
  uint32_t magnitude = element.bits & 0x7fu;
  if (magnitude == 0x7fu) return __int_as_float(0x7fffffff);
  return 256.0f * half_to_float(uint16_t((element.bits & 0x80u) << 8 | magnitude << 7));
#endif
}

template <>
JITGEN_DEVICE float load<float8_e5m2>(float8_e5m2 element) {
  return half_to_float(uint16_t(element.bits << 8));  // it is the upper half of a float16
}

// --------------------------------------------------------------------------------------------------------------- store

// Rounds a float, given as the bits of its magnitude and below the format's overflow, to a small format of
// `mantissa` bits and this exponent bias: nearest even, subnormals included. The technique is FP16's (Maratyszcza).
template <int mantissa, int bias>
JITGEN_DEVICE uint32_t encode_magnitude(uint32_t magnitude) {
  constexpr uint32_t smallest_normal = uint32_t(127 + 1 - bias) << 23;
  if (magnitude < smallest_normal) {
    // Adding a power of two whose unit in the last place is the format's smallest step lets the adder round.
    constexpr uint32_t step = uint32_t(127 + 1 - bias + 23 - mantissa) << 23;
    return uint32_t(__float_as_int(__fadd_rn(__int_as_float(int(magnitude)), __int_as_float(int(step))))) - step;
  }
  constexpr int dropped = 23 - mantissa;
  uint32_t odd = magnitude >> dropped & 1u;
  return (magnitude - (uint32_t(127 - bias) << 23) + ((1u << (dropped - 1)) - 1u) + odd) >> dropped;
}

template <class Storage>
JITGEN_DEVICE Storage store(Compute<Storage> value) {
  return value;
}

template <>
JITGEN_DEVICE float16 store<float16>(float value) {
  float16 element;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
  return element;
}

template <>
JITGEN_DEVICE bfloat16 store<bfloat16>(float value) {
  bfloat16 element;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
  return element;
}

template <>
JITGEN_DEVICE float8_e4m3fn store<float8_e4m3fn>(float value) {
  uint32_t bits = uint32_t(__float_as_int(value)), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  constexpr uint32_t overflow = 0x43e80000u;  // 464, halfway between the largest number, 448, and the next step, 480
#if JITGEN_FP8_INSTRUCTIONS
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  if (!JITGEN_E4M3FN_SATURATES && magnitude > overflow) pair = uint16_t(sign | 0x7fu);
  return {uint8_t(pair)};
#else
  uint32_t code = JITGEN_E4M3FN_SATURATES ? 0x7eu : 0x7fu;
  if (magnitude > 0x7f800000u) code = 0x7fu;
  if (magnitude <= overflow) code = encode_magnitude<3, 7>(magnitude);
  return {uint8_t(sign | code)};
#endif
}

template <>
JITGEN_DEVICE float8_e5m2 store<float8_e5m2>(float value) {
  uint32_t bits = uint32_t(__float_as_int(value)), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  constexpr uint32_t overflow = 0x47700000u;  // 61440, halfway from 57344: the tie goes to the even code, infinity
#if JITGEN_FP8_INSTRUCTIONS
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  if (magnitude >= overflow && magnitude <= 0x7f800000u) pair = uint16_t(sign | 0x7cu);
  return {uint8_t(pair)};
#else
  uint32_t code = magnitude > 0x7f800000u ? 0x7fu : 0x7cu;
  if (magnitude < overflow) code = encode_magnitude<2, 15>(magnitude);
  return {uint8_t(sign | code)};
#endif
}

template <class Storage>
JITGEN_DEVICE float round_to(float value) {
  return load(store<Storage>(value));
}

// ---------------------------------------------------------------------------------------------------------------- cast

template <class T>
constexpr bool is_floating = T(0.5) != T(0);
template <>
constexpr bool is_floating<bool> = false;

// Integers wrap. A fraction goes toward zero; beyond int32 and int64 it saturates, and beyond a narrower integer it
// wraps from the next wider conversion, as torch's own kernels have it (uint8 from int64, so that -1.0 is 255).
template <class To, class From>
JITGEN_DEVICE To cast(From value) {
  if constexpr (bit_width<To> < 32 && is_floating<From> && To(-1) < To(0)) {
    return To(int32_t(value));
  } else if constexpr (bit_width<To> < 32 && is_floating<From>) {
    return To(int64_t(value));
  } else {
    return To(value);
  }
}
template <>
JITGEN_DEVICE bool cast<bool, float>(float value) {
  return value != 0.0f;
}
template <>
JITGEN_DEVICE bool cast<bool, double>(double value) {
  return value != 0.0;
}

}  // namespace jitgen
