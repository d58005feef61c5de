// Turns scores into probabilities, as every mainloop of attention does: the online softmax (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018).
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

constexpr float log2_e = 1.44269504f;
// A row's probabilities, before they are divided by their sum, are 2^(score * factor - base), and at most 2^8, which
// float16 and its sums hold. Its base remains where it is little below the greatest score, so that sums seldom have to
// be multiplied (FlashAttention-4, Dao et al., 2025).
constexpr float greatest_exponent = 8.0f;

// A score's tanh, with an absolute error of 2^-22: two of the hardware's functions instead of some twenty instructions.
JITGEN_DEVICE float tanh_of_score(float a) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_normal(2.88539008f * a)));
  return __fmaf_rn(-2.0f, inverse, 1.0f);
}

// A bound of distances between columns of a tile, which are less than 512.
JITGEN_DEVICE int bound_of(int64_t bound) { return bound < -1024 ? -1024 : bound > 1024 ? 1024 : int(bound); }

JITGEN_DEVICE float minus_infinity() { return __int_as_float(int(0xff800000)); }

// Two floats as 16-bit numbers in one word, the first in the low half.
template <class Element>
JITGEN_DEVICE uint32_t packed_pair(float low, float high);
template <>
JITGEN_DEVICE uint32_t packed_pair<bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
JITGEN_DEVICE uint32_t packed_pair<float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// A row's base after its greatest score became `row_max`, and what its sums are multiplied with: 2^(old base - new base).
// A row without any score yet has the base -inf. Returns whether the base moves.
JITGEN_DEVICE bool move_base(float& base, float& scale, float row_max, float factor) {
  const float wanted = __fmul_rn(row_max, factor);  // rounded, so that all that is done with it agrees
  const bool far = !(wanted - base <= greatest_exponent);
  const bool moved = far && row_max != minus_infinity();
  scale = moved ? exp2_normal(base - wanted) : 1.0f;
  base = moved ? wanted : base;
  return moved;
}
// What is subtracted from exponents, so that probabilities of rows without any score are zero and not NaN.
JITGEN_DEVICE float finite_base(float base) { return base == minus_infinity() ? 0.0f : base; }

}  // namespace jitgen
