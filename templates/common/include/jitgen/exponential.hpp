// Exponentials, logarithms, powers, hyperbolic functions, sigmoid and the error function, in float. Part of math.hpp.
//
// The common ones (exp, log, tanh, sigmoid, erf) stay in float lanes. Where float would need compensated arithmetic to
// reach 4 ulp (pow, erfc, sinh, the inverse hyperbolic functions) the work is done in double lanes and rounded once.
// Argument reductions are the classical ones: Cephes (S. Moshier) for exp, fdlibm (Sun) for log and expm1; erf as
// 1 - exp(polynomial) is N. Juffa's; erfc by (x - 2) / (x + 2) is Shepherd and Laframboise's, 1981.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {
namespace detail {

constexpr float infinity = __builtin_inff();
constexpr float not_a_number = __builtin_nanf("");

// a * b + c: fused where that is one instruction, else as written. For polynomials, where either will do.
JITGEN_INLINE float mul_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
JITGEN_INLINE double mul_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A polynomial by Horner's rule, highest coefficient first.
template <class T>
JITGEN_INLINE T horner(T, T c) {
  return c;
}
template <class T, class... Rest>
JITGEN_INLINE T horner(T x, T high, T next, Rest... rest) {
  return horner(x, mul_add(high, x, next), rest...);
}

// --------------------------------------------------------------------------------------- the cores of the exponentials

// Adding and subtracting this rounds to an integer, and leaves that integer in the low bits of the sum.
constexpr float rounder = 0x1.8p23f;
constexpr double double_rounder = 0x1.8p52;

JITGEN_INLINE float power_of_two(int32_t k) { return float_of(uint32_t(k + 127) << 23); }

// Adding this instead leaves k + 254 in the low bits, which is the sum of the exponent fields of two factors of 2^k.
constexpr float pair_rounder = rounder + 254.0f;

// p * 2^k for -252 <= k <= 128, k + 254 in the low bits of `shifted`. Two factors, so that neither overflows and a
// denormal result is rounded once. The bits of pair_rounder itself leave the words to the left.
JITGEN_INLINE float scale(float p, uint32_t shifted) {
  const uint32_t half = shifted >> 1;
  return p * float_of(half << 23) * float_of((shifted - half) << 23);
}

// k is at most 128. NaN is propagated through the remainder.
JITGEN_INLINE uint32_t at_most_128(float shifted) {
  constexpr uint32_t highest = 0x4b4000feu + 128u;  // the bits of pair_rounder, and 128
  const uint32_t bits = bits_of(shifted);
  return bits < highest ? bits : highest;
}

JITGEN_INLINE float remainder_of_ln2(float n, float x) {
  // ln 2 in two parts; the first has 9 bits, so that its product with n is exact without a fused operation too.
  return mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, x));
}

// x = k ln 2 + r with |r| <= ln 2 / 2.
struct Reduced {
  float r;
  int32_t k;
};
JITGEN_INLINE Reduced reduce(float x) {
  const float shifted = mul_add(x, 1.44269504f, rounder);
  const float r = remainder_of_ln2(shifted - rounder, x);
  return {r, int32_t(bits_of(shifted) - bits_of(rounder))};
}

// e^r is 1 + r times this for |r| <= ln 2 / 2, error 3e-9.
JITGEN_INLINE float exp_slope(float r) {
  return horner(r, 0.00138144672f, 0.00836878084f, 0.0416683927f, 0.166665196f, 0.49999994f, 1.0f);
}

// e^r for |r| <= ln 2 / 2, error 3e-9; grows beyond.
JITGEN_INLINE float small_exp(float r) { return mul_add(r, exp_slope(r), 1.0f); }

// e^r - 1 for |r| <= ln 2 / 2, error 3e-9 of e^r.
JITGEN_INLINE float small_expm1(float r) {
  const float p = horner(r, 0.00138144672f, 0.00836878084f, 0.0416683927f, 0.166665196f, 0.49999994f);
  return mul_add(r * r, p, r);
}

// e^x for -87 < x < 88, where neither result nor scale leaves the normal range.
JITGEN_INLINE float moderate_exp(float x) {
  const Reduced a = reduce(x);
  return small_exp(a.r) * power_of_two(a.k);
}

// x = k ln 2 + r of -104 <= x <= 0, where 2^k cannot overflow: 64 is added to k in the sum's low bits, next to the
// exponent's bias, and `scaled` is 2^(k + 64).
struct ReducedNegative {
  float r, scaled;
};
JITGEN_INLINE ReducedNegative reduce_negative(float x) {
  constexpr float biased_rounder = rounder + float(127 + 64);
  const float shifted = mul_add(x, 1.44269504f, biased_rounder);
  return {remainder_of_ln2(shifted - biased_rounder, x), float_of(bits_of(shifted) << 23)};
}

// e^x for x <= 0.
JITGEN_INLINE float exp_of_negative(float x) {
  const ReducedNegative a = reduce_negative(x < -104.0f ? -104.0f : x);
  return small_exp(a.r) * a.scaled * 0x1p-64f;
}

// e^x - 1 for -40 < x < 128 ln 2. 2^k is taken by halves, so that k = 128 does not overflow before the result does.
JITGEN_INLINE float moderate_expm1(float x) {
  const Reduced a = reduce(x);
  const float half = power_of_two(a.k - 1);
  const float q = small_expm1(a.r);
  return a.k == 0 ? q : 2.0f * mul_add(half, q, half - 0.5f);
}

JITGEN_INLINE float clamp(float x, float low, float high) {  // NaN stays
  const float above = x < low ? low : x;
  return above > high ? high : above;
}

// e^r for |r| <= ln 2 / 2, relative error 5e-11.
JITGEN_INLINE double small_exp(double r) {
  const double p = horner(r, 0.0001979024479947232, 0.0013944758540117856, 0.008333497671528465, 0.04166629363522338,
                          0.16666665864609356, 0.5000000068037014);
  return mul_add(r * r, p, r) + 1.0;
}

// 2^n for the integer n that `shifted` holds above double_rounder.
JITGEN_INLINE double power_of_shifted(double shifted) {
  return double_of((bits_of(shifted) - bits_of(double_rounder) + 1023) << 52);
}

// e^x for |x| < 700.
JITGEN_INLINE double double_exp(double x) {
  const double shifted = x * 1.4426950408889634 + double_rounder;
  const double n = shifted - double_rounder;
  const double r = mul_add(n, -2.3190468138462996e-17, mul_add(n, -0.6931471805599453, x));
  return small_exp(r) * power_of_shifted(shifted);
}

// ---------------------------------------------------------------------------------------- the core of the logarithms

constexpr float ln2 = 0.693147181f;

// log(1 + f) for -1/3 <= f <= 1/3, error 5e-9; exact in the sense of log1p where f is tiny.
JITGEN_INLINE float small_log1p(float f) {
  const float p = horner(f, -0.1289168f, 0.139844388f, -0.121842623f, 0.140058681f, -0.166804865f, 0.200104058f,
                         -0.249997973f, 0.333332151f);
  const float square = f * f;
  return mul_add(square, mul_add(f, p, -0.5f), f);
}

// x = 2^k (1 + f) with 2/3 <= 1 + f < 4/3.
struct Split {
  float f;
  float k;
};
constexpr uint32_t two_thirds = 0x3f2aaaabu;

JITGEN_INLINE Split split(float x) {  // any positive x
  const bool denormal = x < __FLT_MIN__;
  const uint32_t bits = bits_of(denormal ? x * 0x1p23f : x);
  const int32_t k = int32_t(bits - two_thirds) >> 23;
  return {float_of(bits - (uint32_t(k) << 23)) - 1.0f, float(k) - (denormal ? 23.0f : 0.0f)};
}

// A positive normal double; f is exact before it is rounded to float, so a result near zero keeps its accuracy.
JITGEN_INLINE Split split(double x) {
  constexpr uint64_t lowest = 0x3fe5555555555555u;
  const uint64_t bits = bits_of(x);
  // The exponent, biased to stay positive, becomes a double by being the low bits of 2^52: AVX2 has neither an
  // arithmetic 64-bit shift nor a conversion from int64.
  const uint64_t k = (bits - lowest + (uint64_t(1023) << 52)) >> 52;
  const double exponent = double_of(k | 0x4330000000000000u) - (0x1p52 + 1023.0);
  const double mantissa = double_of(bits - ((k - 1023) << 52));
  return {float(mantissa - 1.0), float(exponent)};
}

JITGEN_INLINE float log_of(Split x) { return mul_add(x.k, ln2, small_log1p(x.f)); }

// The logarithm's values outside (0, inf), given its value inside.
JITGEN_INLINE float with_log_specials(float x, float value) {
  const float positive = x < infinity ? value : x;
  return x > 0.0f ? positive : (x == 0.0f ? -infinity : not_a_number);
}

}  // namespace detail

// ------------------------------------------------------------------------------------------------------ exponentials

// Beyond 128 ln 2 the remainder grows in place of k, and the polynomial, all of whose coefficients are positive, with it:
// the product is infinite there without a bound on x. Below -104 it would not be zero, so there x is bounded.
JITGEN_INLINE float exp(float x) {
  const float bounded = x < -104.0f ? -104.0f : x;
  const uint32_t shifted = detail::at_most_128(detail::mul_add(bounded, 1.44269504f, detail::pair_rounder));
  const float r = detail::remainder_of_ln2(float_of(shifted) - detail::pair_rounder, bounded);
  return detail::scale(detail::small_exp(r), shifted);
}

JITGEN_INLINE float exp2(float x) {
  const float bounded = x < -151.0f ? -151.0f : x;
  const uint32_t shifted = detail::at_most_128(bounded + detail::pair_rounder);
  const float r = (bounded - (float_of(shifted) - detail::pair_rounder)) * detail::ln2;
  return detail::scale(detail::small_exp(r), shifted);
}

JITGEN_INLINE float exp2_normal(float x) { return exp2(x); }

JITGEN_INLINE float expm1(float x) {
  const float value = detail::moderate_expm1(detail::clamp(x, -20.0f, 88.8f));
  return __builtin_fabsf(x) < 0x1p-24f ? x : value;  // keeps -0
}

JITGEN_INLINE float sigmoid(float x) {
  const float e = detail::exp_of_negative(-__builtin_fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

JITGEN_INLINE float tanh(float x) {
  const float magnitude = __builtin_fabsf(x);
  const float t = detail::moderate_expm1(2.0f * (magnitude > 10.0f ? 10.0f : magnitude));
  return __builtin_copysignf(t / (t + 2.0f), x);
}

JITGEN_INLINE float sinh(float x) {
  const double magnitude = __builtin_fabsf(x) > 100.0f ? 100.0 : double(__builtin_fabsf(x));
  const double e = detail::double_exp(magnitude);
  const float large = __builtin_copysignf(float(0.5 * (e - 1.0 / e)), x);
  const float square = x * x;
  const float p = detail::horner(square, 0.000198412698f, 0.00833333333f, 0.166666667f);  // Taylor, for |x| < 1/2
  const float small = detail::mul_add(x * square, p, x);
  const float value = __builtin_fabsf(x) < 0.5f ? small : large;
  return x == x ? value : x;
}

JITGEN_INLINE float cosh(float x) {
  const double magnitude = __builtin_fabsf(x) > 100.0f ? 100.0 : double(__builtin_fabsf(x));
  const double e = detail::double_exp(magnitude);
  return float(0.5 * (e + 1.0 / e));
}

// -------------------------------------------------------------------------------------------------------- logarithms

JITGEN_INLINE float log(float x) { return detail::with_log_specials(x, detail::log_of(detail::split(x))); }

JITGEN_INLINE float log2(float x) {
  const detail::Split a = detail::split(x);
  return detail::with_log_specials(x, detail::mul_add(detail::small_log1p(a.f), 1.44269504f, a.k));
}

JITGEN_INLINE float log10(float x) {
  const detail::Split a = detail::split(x);
  return detail::with_log_specials(x, detail::mul_add(a.k, 0.301029996f, detail::small_log1p(a.f) * 0.434294482f));
}

// With 2^-k the scale of 1 + x, f = 2^-k (1 + x) - 1 is formed from x itself: nothing is lost of a small x (k = 0).
JITGEN_INLINE float log1p(float x) {
  const float sum = 1.0f + x;
  const int32_t k = int32_t(bits_of(sum) - detail::two_thirds) >> 23;
  const float inverse = float_of(uint32_t(127 - k) << 23);
  const float near = detail::mul_add(x, inverse, inverse - 1.0f);
  const float far = float_of(bits_of(sum) - (uint32_t(k) << 23)) - 1.0f;
  const float value = detail::log_of({k < 64 ? near : far, float(k)});
  return x == 0.0f ? x : detail::with_log_specials(sum, value);  // keeps -0
}

// The three inverses are logarithms of a sum formed in double; below 2^-6 their series.
JITGEN_INLINE float asinh(float x) {
  const float magnitude = __builtin_fabsf(x);
  const double a = magnitude;
  const float large = detail::log_of(detail::split(a + __builtin_sqrt(a * a + 1.0)));
  const float square = magnitude * magnitude;
  const float small = detail::mul_add(magnitude * square, detail::mul_add(square, 0.075f, -0.166666667f), magnitude);
  const float value = magnitude < 0x1p-6f ? small : large;
  return __builtin_copysignf(magnitude < detail::infinity ? value : magnitude, x);
}

JITGEN_INLINE float acosh(float x) {
  const double a = x;
  const float value = detail::log_of(detail::split(a + __builtin_sqrt(a * a - 1.0)));
  return x >= 1.0f ? (x < detail::infinity ? value : x) : detail::not_a_number;
}

JITGEN_INLINE float atanh(float x) {
  const float magnitude = __builtin_fabsf(x);
  const double a = magnitude;
  const float large = 0.5f * detail::log_of(detail::split((1.0 + a) / (1.0 - a)));
  const float square = magnitude * magnitude;
  const float small = detail::mul_add(magnitude * square, detail::mul_add(square, 0.2f, 0.333333333f), magnitude);
  const float value = magnitude < 0x1p-6f ? small : large;
  const float inside = magnitude == 1.0f ? detail::infinity : value;
  return __builtin_copysignf(magnitude <= 1.0f ? inside : detail::not_a_number, x);
}

// ------------------------------------------------------------------------------------------------------------- power

namespace detail {

// log2 of a positive finite float, relative error below 1e-12: log(1 + f) = 2 artanh(f / (2 + f)).
JITGEN_INLINE double double_log2(float x) {
  const uint64_t bits = bits_of(double(x));
  const uint64_t k = (bits - 0x3fe5555555555555u + (uint64_t(1023) << 52)) >> 52;
  const double exponent = double_of(k | 0x4330000000000000u) - (0x1p52 + 1023.0);
  const double f = double_of(bits - ((k - 1023) << 52)) - 1.0;
  const double s = f / (2.0 + f), square = s * s;
  const double p = horner(square, 0.10063504205310181, 0.11067357803061044, 0.14286598272712278, 0.19999992237054648,
                          0.3333333335543404);
  return mul_add(mul_add(s * square, p, s), 2.8853900817779268, exponent);
}

}  // namespace detail

JITGEN_INLINE float pow(float base, float exponent) {
  using detail::infinity;
  const float magnitude = __builtin_fabsf(base);
  // |base|^exponent in double lanes. Its logarithm is +-inf at infinity and zero, and the clamp takes the place of
  // both; 0 * inf, which C defines to be 1, is handled by the cases below.
  const double finite = detail::double_log2(magnitude);
  const double logarithm = magnitude == 0.0f ? -__builtin_inf() : (magnitude < infinity ? finite : double(magnitude));
  const double wanted = double(exponent) * logarithm;
  const double low = wanted < -200.0 ? -200.0 : wanted;
  const double bounded = low > 200.0 ? 200.0 : low;
  const double shifted = bounded + detail::double_rounder;
  const double r = (bounded - (shifted - detail::double_rounder)) * 0.6931471805599453;
  const float power = float(detail::small_exp(r) * detail::power_of_shifted(shifted));
  // Signs: an odd integer exponent keeps the base's; another power of a negative number is not real.
  const bool integral = __builtin_rintf(exponent) == exponent;
  const float half = exponent * 0.5f;
  const float of_odd = __builtin_rintf(half) != half ? __builtin_copysignf(power, base) : power;
  const float with_sign = integral ? of_odd : power;
  // One comparison to a selection: GCC vectorises those whatever becomes of them when an operand is a constant.
  const float of_fraction = magnitude == infinity ? with_sign : detail::not_a_number;
  const float of_negative = integral ? with_sign : of_fraction;
  const float of_minus_one = __builtin_fabsf(exponent) == infinity ? 1.0f : of_negative;
  const float negative = base == -1.0f ? of_minus_one : of_negative;
  const float value = base < 0.0f ? negative : with_sign;
  const float one = base == 1.0f ? 1.0f : value;
  return exponent == 0.0f ? 1.0f : one;
}

// ---------------------------------------------------------------------------------------------------- error function

namespace detail {

JITGEN_INLINE float small_erf(float x) {  // for |x| < 0.95
  const float square = x * x;
  const float p = horner(square, 8.18509434e-05f, -0.000809770369f, 0.00519695226f, -0.0268577058f, 0.112836637f,
                         -0.376126319f, 0.128379166f);
  return mul_add(x, p, x);
}

}  // namespace detail

JITGEN_INLINE float erf(float x) {
  const float magnitude = __builtin_fabsf(x);
  const float a = magnitude > 4.0f ? 4.0f : magnitude;
  const float exponent = detail::horner(a, 0.000198219481f, -0.00306548877f, 0.0223152079f, -0.104113668f,
                                        -0.636976063f, -1.12779725f, -0.000166448634f);  // log(erfc(a)), 0.9 .. 4
  const float large = __builtin_copysignf(1.0f - detail::moderate_exp(exponent), x);
  const float value = magnitude < 0.92f ? detail::small_erf(x) : large;
  return x == x ? value : x;
}

// exp(x^2) (x + 2) erfc(x) is smooth and bounded on all of x >= 0, and a polynomial in u = (x - 2) / (x + 2), here the
// minimax one on 0 .. 10.1: relative error 2^-28. Where a product's rounding error costs one instruction, exp(-x^2) keeps
// its accuracy in float; elsewhere it takes double.
namespace detail {

template <class T>
JITGEN_INLINE T scaled_erfc(T u) {
  return horner(u, T(6.94809313e-05), T(4.69402363e-05), T(-0.000592562167), T(-0.000832063995), T(0.00306260562),
                T(0.00647587942), T(-0.0215057222), T(-0.0364417838), T(0.279471771), T(-0.687160697), T(1.02158271));
}

// u, of t = 1 / (a + 2). Where a is small, so is the rounding error of t in it.
template <class T>
JITGEN_INLINE T erfc_argument(T a, T t) {
  return mul_add(a + a, t, T(-1));
}

}  // namespace detail

JITGEN_INLINE float erfc(float x) {
#if defined(__FMA__) || defined(__aarch64__)
  const float a = __builtin_fabsf(x) > 10.1f ? 10.1f : __builtin_fabsf(x);
  const float t = 1.0f / (a + 2.0f), p = detail::scaled_erfc(detail::erfc_argument(a, t)) * t;
  // exp_of_negative(-a^2), less what the rounding of a^2 has lost, times p.
  const float square = a * a;
  const detail::ReducedNegative reduced = detail::reduce_negative(-square);
  const float r = reduced.r - __builtin_fmaf(a, a, -square);
  const float tail = detail::mul_add(p * r, detail::exp_slope(r), p) * reduced.scaled * 0x1p-64f;
#else
  const double a = __builtin_fabsf(x) > 10.1f ? 10.1 : double(__builtin_fabsf(x)), t = 1.0 / (a + 2.0);
  const double tail = detail::double_exp(-a * a) * detail::scaled_erfc(detail::erfc_argument(a, t)) * t;
#endif
  return float(x < 0.0f ? 2 - tail : tail);
}

}  // namespace jitgen
