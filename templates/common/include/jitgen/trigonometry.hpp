// Circular functions and their inverses, in float. Part of math.hpp.
//
// The argument reduction is exact for every float and has neither a table nor a branch. Payne and Hanek's observation
// is that only the bits of 2/pi around the argument's own exponent matter: multiples of 4 quarter turns drop out. Four
// ranges of 27 exponents each have their own constant, 2/pi 2^k modulo 4; three parts of it, of which the first two
// have 29 bits and give exact products with a 24-bit argument, leave an absolute error near 2^-60, and no float comes
// closer than 2^-31 to a multiple of a quarter turn.
#pragma once

#include "jitgen/exponential.hpp"

namespace jitgen {
namespace detail {

// x = (4 m + quadrant + f) pi / 2 with |f| <= 1/2; the sine and cosine of f pi / 2.
struct QuarterTurn {
  float sine;
  float cosine;
  uint32_t quadrant;
};

JITGEN_INLINE double range_constant(float magnitude, double usual, double large, double huge, double greatest) {
  const double upper = magnitude < 0x1p104f ? huge : greatest;
  const double lower = magnitude < 0x1p50f ? usual : large;
  return magnitude < 0x1p77f ? lower : upper;
}

JITGEN_INLINE QuarterTurn quarter_turn(float x) {
  const float magnitude = __builtin_fabsf(x);
  const double first = range_constant(magnitude, 0x1.45f306ep-1, -0x1.1b1bbebp-28, 0x1.4a7f09dp-54, -0x1.505c159p-81);
  const double second =
      range_constant(magnitude, -0x1.b1bbeadp-32, 0x1.4fe13acp-59, 0x1.7d1f535p-84, -0x1.911f925p-111);
  const double third = range_constant(magnitude, -0x1.80f62a0b82b2dp-62, -0x1.70565911f924fp-91,
                                      -0x1.11f924eb53362p-115, 0x1.4acc9e21c8210p-143);
  const double a = x * first, b = x * second;
  const double a_turns = a + double_rounder, b_turns = b + double_rounder;
  const double sum = ((a - (a_turns - double_rounder)) + (b - (b_turns - double_rounder))) + x * third;
  const double sum_turns = sum + double_rounder;
  const float f = float(sum - (sum_turns - double_rounder));
  const uint64_t turns = bits_of(a_turns) + bits_of(b_turns) + bits_of(sum_turns);
  const float square = f * f;
  const float s = square * horner(square, 0.000158194176f, -0.00468126033f, 0.0796925798f, -0.645964086f);
  const float c = horner(square, -2.48520664e-05f, 0.00091916282f, -0.0208634678f, 0.2536695f, -1.23370051f);
  const float sine = mul_add(f, 1.57079637f, f * (s - 4.37113883e-8f));  // pi / 2 in two floats
  return {sine, mul_add(square, c, 1.0f), uint32_t(turns)};
}

JITGEN_INLINE float signed_by(float x, uint32_t quadrant) { return float_of(bits_of(x) ^ ((quadrant & 2u) << 30)); }

// The arc tangent on [0, 1], error 2e-8.
JITGEN_INLINE float small_atan(float t) {
  const float square = t * t;
  const float p = horner(square, -0.00179363566f, 0.0109146684f, -0.0311779641f, 0.0579577126f, -0.0840345696f,
                         0.109521881f, -0.142642424f, 0.199985489f, -0.333332986f);
  return mul_add(t * square, p, t);
}

// The arc sine on [0, 1/2], given x and x^2, error 3e-10.
JITGEN_INLINE float small_asin(float x, float square) {
  const float p =
      horner(square, 0.0375165083f, 0.014438564f, 0.0318077281f, 0.0445169546f, 0.0750050396f, 0.166666597f);
  return mul_add(x * square, p, x);
}

constexpr float pi = 3.14159274f;
constexpr float half_pi = 1.57079637f;

}  // namespace detail

JITGEN_INLINE float sin(float x) {
  const detail::QuarterTurn t = detail::quarter_turn(x);
  const float value = detail::signed_by((t.quadrant & 1u) != 0 ? t.cosine : t.sine, t.quadrant);
  return x == 0.0f ? x : value;  // keeps -0
}

JITGEN_INLINE float cos(float x) {
  const detail::QuarterTurn t = detail::quarter_turn(x);
  return detail::signed_by((t.quadrant & 1u) != 0 ? t.sine : t.cosine, t.quadrant + 1u);
}

JITGEN_INLINE float tan(float x) {
  const detail::QuarterTurn t = detail::quarter_turn(x);
  const bool odd = (t.quadrant & 1u) != 0;
  const float value = (odd ? -t.cosine : t.sine) / (odd ? t.sine : t.cosine);
  return x == 0.0f ? x : value;
}

JITGEN_INLINE float atan(float x) {
  const float magnitude = __builtin_fabsf(x);
  const bool outside = magnitude > 1.0f;
  const float near = detail::small_atan(outside ? 1.0f / magnitude : magnitude);
  return __builtin_copysignf(outside ? detail::half_pi - near : near, x);
}

JITGEN_INLINE float atan2(float y, float x) {
  const float rise = __builtin_fabsf(y), run = __builtin_fabsf(x);
  const bool steep = rise > run;
  const float low = steep ? run : rise, high = steep ? rise : run;
  const float ratio = high == 0.0f ? 0.0f : (low == detail::infinity ? 1.0f : low / high);
  const float octant = detail::small_atan(ratio);
  const float quadrant = steep ? detail::half_pi - octant : octant;
  const bool left = (bits_of(x) >> 31) != 0;
  const float value = __builtin_copysignf(left ? detail::pi - quadrant : quadrant, y);
  return x == x && y == y ? value : detail::not_a_number;
}

JITGEN_INLINE float asin(float x) {
  const float magnitude = __builtin_fabsf(x);
  const bool outer = magnitude > 0.5f;
  const float square = outer ? 0.5f * (1.0f - magnitude) : magnitude * magnitude;
  const float inner = detail::small_asin(outer ? __builtin_sqrtf(square) : magnitude, square);
  return __builtin_copysignf(outer ? detail::half_pi - 2.0f * inner : inner, x);
}

JITGEN_INLINE float acos(float x) {
  const float magnitude = __builtin_fabsf(x);
  const bool outer = magnitude > 0.5f;
  const float square = outer ? 0.5f * (1.0f - magnitude) : magnitude * magnitude;
  const float inner = detail::small_asin(outer ? __builtin_sqrtf(square) : magnitude, square);
  const float right = x < 0.0f ? detail::pi - 2.0f * inner : 2.0f * inner;
  return outer ? right : detail::half_pi - __builtin_copysignf(inner, x);
}

}  // namespace jitgen
