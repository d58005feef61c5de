// Arithmetic, comparison, rounding, bits and selection, with torch's semantics and without undefined behaviour:
// integers wrap, division by zero and the smallest integer over -1 do not trap, NaN propagates through minimum and
// maximum. Part of math.hpp.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

template <class T>
constexpr bool is_signed = T(-1) < T(0);

// One overload for float and one for double.
#define JITGEN_FLOATS(DEFINE) DEFINE(float) DEFINE(double)

// Integers are computed in 64 unsigned bits, or fewer where the compiler sees it, and cut to their width.
#define JITGEN_WRAPPING(name, op)                                        \
  template <class T, class = unsigned_t<T>>                              \
  JITGEN_INLINE T name(T a, T b) {                                       \
    return static_cast<T>(static_cast<uint64_t>(a) op static_cast<uint64_t>(b)); \
  }                                                                      \
  JITGEN_INLINE float name(float a, float b) { return a op b; }          \
  JITGEN_INLINE double name(double a, double b) { return a op b; }
JITGEN_WRAPPING(add, +)
JITGEN_WRAPPING(sub, -)
JITGEN_WRAPPING(mul, *)
#undef JITGEN_WRAPPING

JITGEN_INLINE float div(float a, float b) { return a / b; }
JITGEN_INLINE double div(double a, double b) { return a / b; }
JITGEN_INLINE float reciprocal(float x) { return 1.0f / x; }
JITGEN_INLINE double reciprocal(double x) { return 1.0 / x; }
JITGEN_INLINE float neg(float x) { return -x; }
JITGEN_INLINE double neg(double x) { return -x; }
JITGEN_INLINE float abs(float x) { return __builtin_fabsf(x); }
JITGEN_INLINE double abs(double x) { return __builtin_fabs(x); }
JITGEN_INLINE float copysign(float a, float b) { return __builtin_copysignf(a, b); }
JITGEN_INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }
JITGEN_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
JITGEN_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
JITGEN_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
JITGEN_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
JITGEN_INLINE float floor(float x) { return __builtin_floorf(x); }
JITGEN_INLINE double floor(double x) { return __builtin_floor(x); }
JITGEN_INLINE float ceil(float x) { return __builtin_ceilf(x); }
JITGEN_INLINE double ceil(double x) { return __builtin_ceil(x); }
JITGEN_INLINE float trunc(float x) { return __builtin_truncf(x); }
JITGEN_INLINE double trunc(double x) { return __builtin_trunc(x); }
JITGEN_INLINE float round(float x) { return __builtin_rintf(x); }
JITGEN_INLINE double round(double x) { return __builtin_rint(x); }

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T neg(T x) {
  return static_cast<T>(0 - static_cast<uint64_t>(x));
}

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T abs(T x) {
  return x < T(0) ? neg(x) : x;
}

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T sign(T x) {
  return static_cast<T>((x > T(0)) - (x < T(0)));
}
JITGEN_INLINE bool sign(bool x) { return x; }

// ------------------------------------------------------------------------------------------------------------- fused

#if defined(__FMA__) || defined(__aarch64__)
JITGEN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// The product is exact in double; the sum is rounded to odd there (its error, known by Knuth's two-sum, decides the
// last bit), and rounding that to float is then as if done once: Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", 2008.
JITGEN_INLINE float fma(float a, float b, float c) {
  const double product = double(a) * double(b), addend = c, sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  const uint64_t bits = bits_of(sum);
  const uint64_t toward_zero = (error > 0.0) != (sum > 0.0) ? 1 : 0;
  const uint64_t odd = (bits - toward_zero) | 1;
  return float(error != 0.0 && sum - sum == 0.0 ? double_of(odd) : sum);
}
#endif
JITGEN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// --------------------------------------------------------------------------------------------------- minimum, maximum

// A comparison that is also true for unordered operands is one instruction, and a constant b is known to be no NaN:
// then minimum and maximum are a comparison and a selection.
#define JITGEN_EXTREMA(T)                                                       \
  JITGEN_INLINE T minimum(T a, T b) {                                           \
    const T lower = (__builtin_isunordered(a, b) || a < b) ? a : b;             \
    return b != b ? b : lower;                                                  \
  }                                                                             \
  JITGEN_INLINE T maximum(T a, T b) {                                           \
    const T higher = (__builtin_isunordered(a, b) || a > b) ? a : b;            \
    return b != b ? b : higher;                                                 \
  }                                                                             \
  JITGEN_INLINE T fmin(T a, T b) { return (a < b || b != b) ? a : b; }          \
  JITGEN_INLINE T fmax(T a, T b) { return (a > b || b != b) ? a : b; }          \
  JITGEN_INLINE T sign(T x) { return T(x > T(0)) - T(x < T(0)); }               \
  JITGEN_INLINE bool isnan(T x) { return x != x; }                              \
  JITGEN_INLINE bool isinf(T x) { return abs(x) > (sizeof(T) == 4 ? T(__FLT_MAX__) : T(__DBL_MAX__)); } \
  JITGEN_INLINE bool signbit(T x) { return (bits_of(x) >> (8 * sizeof(T) - 1)) != 0; }
JITGEN_FLOATS(JITGEN_EXTREMA)
#undef JITGEN_EXTREMA

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T minimum(T a, T b) {
  return a < b ? a : b;
}
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T maximum(T a, T b) {
  return a > b ? a : b;
}
JITGEN_INLINE bool minimum(bool a, bool b) { return a & b; }
JITGEN_INLINE bool maximum(bool a, bool b) { return a | b; }

// ---------------------------------------------------------------------------------------------------------- division

namespace detail {

// The quotient rounded toward zero. The two divisors that trap are replaced before dividing; dividing by -1 is
// negation, which wraps.
template <class T>
JITGEN_INLINE T quotient(T a, T b) {
  const bool minus_one = is_signed<T> && b == T(-1);
  const T safe = (b == T(0) || minus_one) ? T(1) : b;
  const T q = static_cast<T>(a / safe);
  return b == T(0) ? T(0) : (minus_one ? neg(a) : q);
}

JITGEN_INLINE float libm_fmod(float a, float b) { return __builtin_fmodf(a, b); }
JITGEN_INLINE double libm_fmod(double a, double b) { return __builtin_fmod(a, b); }

// The two steps from fmod to torch's floor division (div_floor_floating, after CPython's float_divmod): the quotient
// of what divides exactly, then a rounding that only repairs the error of that division.
template <class T>
JITGEN_INLINE T floor_quotient(T a, T b, T rest) {
  const T exact = (a - rest) / b;
  const T below = exact - T(rest != T(0) && (b < T(0)) != (rest < T(0)));
  const T down = floor(below);
  const T whole = down + T(below - down > T(0.5));
  const T signed_zero = copysign(T(0), a / b);
  return b == T(0) ? a / b : (below == T(0) ? signed_zero : whole);
}

}  // namespace detail

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T trunc_divide(T a, T b) {
  return detail::quotient(a, b);
}
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T fmod(T a, T b) {
  return b == T(0) ? T(0) : sub(a, mul(detail::quotient(a, b), b));
}
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return rest != T(0) && (rest < T(0)) != (b < T(0)) ? add(rest, b) : rest;
}
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T floor_divide(T a, T b) {
  const T q = detail::quotient(a, b);
  const T rest = fmod(a, b);
  return rest != T(0) && (rest < T(0)) != (b < T(0)) ? sub(q, T(1)) : q;
}

// Two 24-bit operands whose quotient is below 2^28: the double quotient truncates to the right integer, and product and
// difference are exact. Others are left to the C library.
JITGEN_INLINE float fmod(float a, float b) {
  const double q = double(a) / double(b);
  if (__builtin_fabs(q) < 0x1p28 && __builtin_fabsf(b) <= __FLT_MAX__) {
    return __builtin_copysignf(float(double(a) - double(b) * __builtin_trunc(q)), a);
  }
  return detail::libm_fmod(a, b);
}
JITGEN_INLINE double fmod(double a, double b) { return detail::libm_fmod(a, b); }

#define JITGEN_MODULO(T)                                                                    \
  JITGEN_INLINE T remainder(T a, T b) {                                                     \
    const T rest = fmod(a, b);                                                              \
    return rest != T(0) && (rest < T(0)) != (b < T(0)) ? rest + b : rest;                   \
  }                                                                                         \
  JITGEN_INLINE T floor_divide(T a, T b) { return detail::floor_quotient(a, b, fmod(a, b)); }
JITGEN_FLOATS(JITGEN_MODULO)
#undef JITGEN_MODULO

// By squaring, modulo 2^width. A negative exponent gives the integer part of the true power, as torch does: nothing
// but powers of 1 and -1 survives.
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T pow(T base, T exponent) {
  uint64_t square = static_cast<uint64_t>(base), result = 1;
  for (uint64_t rest = exponent < T(0) ? 0 : static_cast<uint64_t>(exponent); rest != 0; rest >>= 1) {
    result *= (rest & 1) != 0 ? square : 1;
    square *= square;
  }
  const T inverse = base == T(1) ? T(1) : (is_signed<T> && base == T(-1) ? T((exponent & 1) != 0 ? -1 : 1) : T(0));
  return exponent < T(0) ? inverse : static_cast<T>(result);
}

// --------------------------------------------------------------------------------------- comparison, bits, selection

#define JITGEN_COMPARISON(name, op) \
  template <class T>                \
  JITGEN_INLINE bool name(T a, T b) { \
    return a op b;                  \
  }
JITGEN_COMPARISON(eq, ==)
JITGEN_COMPARISON(ne, !=)
JITGEN_COMPARISON(lt, <)
JITGEN_COMPARISON(le, <=)
JITGEN_COMPARISON(gt, >)
JITGEN_COMPARISON(ge, >=)
#undef JITGEN_COMPARISON

template <class T>
JITGEN_INLINE T where(bool condition, T yes, T no) {
  return condition ? yes : no;
}

#define JITGEN_BITWISE(name, op)                    \
  template <class T, class = unsigned_t<T>>         \
  JITGEN_INLINE T name(T a, T b) {                  \
    return static_cast<T>(a op b);                  \
  }                                                 \
  JITGEN_INLINE bool name(bool a, bool b) { return (a op b) != 0; }
JITGEN_BITWISE(bitwise_and, &)
JITGEN_BITWISE(bitwise_or, |)
JITGEN_BITWISE(bitwise_xor, ^)
#undef JITGEN_BITWISE

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T bitwise_not(T x) {
  return static_cast<T>(~x);
}
JITGEN_INLINE bool bitwise_not(bool x) { return !x; }

// A negative count is a huge one when read as unsigned, so one comparison finds both kinds of count out of range.
template <class T, class = unsigned_t<T>>
JITGEN_INLINE T left_shift(T x, T count) {
  constexpr int width = 8 * sizeof(T);
  const auto positions = static_cast<unsigned_t<T>>(count);
  const auto shifted = static_cast<unsigned_t<T>>(static_cast<unsigned_t<T>>(x) << (positions & (width - 1)));
  return static_cast<T>(positions < width ? shifted : unsigned_t<T>(0));
}

template <class T, class = unsigned_t<T>>
JITGEN_INLINE T right_shift(T x, T count) {
  constexpr int most = 8 * sizeof(T) - (is_signed<T> ? 1 : 0);  // an unsigned (8-bit) value shifts out completely
  const auto positions = static_cast<unsigned_t<T>>(count);
  return static_cast<T>(x >> (positions < most ? positions : most));
}

#undef JITGEN_FLOATS

}  // namespace jitgen
