// Functions for results of 16 bits or fewer, whose rounding hides a relative error of 2^-16 (codegen/dialect.py): a
// polynomial of two degrees less, and one remainder instead of two. Part of math.hpp.
#pragma once

#include "jitgen/exponential.hpp"

namespace jitgen {
namespace detail {

// unit * 2^f for |f| <= 1/2: of the polynomials that are exact at 0 the minimax one, relative error 2^-18.4. exp(0) = 1
// makes the sum of a softmax 1 at least, and its logarithm no less than 0. The coefficients are positive, so that it
// grows beyond that interval, which coarse_exp relies on.
JITGEN_INLINE float coarse_power(float f, float unit = 1.0f) {
  return horner(f, 0.00958285294f * unit, 0.0559064262f * unit, 0.240240991f * unit, 0.693124175f * unit, unit);
}

}  // namespace detail

// As exp: infinite from 128 ln 2 on, and rounded once where it is denormal.
JITGEN_INLINE float coarse_exp(float x) {
  const float bounded = x < -104.0f ? -104.0f : x;
  const uint32_t shifted = detail::at_most_128(detail::mul_add(bounded, 1.44269504f, detail::pair_rounder));
  const float f = detail::mul_add(bounded, 1.44269504f, detail::pair_rounder - float_of(shifted));
  return detail::scale(detail::coarse_power(f), shifted);
}

// As exp_below, for x <= 0 or NaN.
JITGEN_INLINE float coarse_exp_below(float x) {
  constexpr float shift = detail::rounder + 64.0f + 127.0f;
  const float bounded = x < -104.0f ? -104.0f : x;
  const float shifted = detail::mul_add(bounded, 1.44269504f, shift);
  const float f = detail::mul_add(bounded, 1.44269504f, shift - shifted);
  const float p = detail::coarse_power(f, 0x1p-64f);
  return p * float_of(bits_of(shifted) << 23);
}

// 0 where exp(-x) is infinite, as torch's is.
JITGEN_INLINE float coarse_sigmoid(float x) { return 1.0f / (1.0f + coarse_exp(-x)); }

// As erfc: the polynomial of degree 6 is within 2^-19, and what the rounding of a^2 costs is hidden too.
JITGEN_INLINE float coarse_erfc(float x) {
  const float a = __builtin_fabsf(x) > 10.1f ? 10.1f : __builtin_fabsf(x), t = 1.0f / (a + 2.0f);
  const float p = detail::horner(detail::erfc_argument(a, t), 0.00275077589f, 0.00575203913f, -0.0214789993f,
                                 -0.0362482932f, 0.27947227f, -0.687174085f, 1.02158284f);
  const float tail = coarse_exp_below(-a * a) * (p * t);
  return x < 0.0f ? 2.0f - tail : tail;
}

}  // namespace jitgen
