// The pointwise operations for CUDA: every row of ir/ops.py as device functions, one overload per compute dtype.
//
// Compute dtypes are float, double, uint8_t, int8_t, int16_t, int32_t, int64_t and bool; operands of one call have one
// type, and so has the result, comparisons and classification aside. Integers wrap, nothing traps and nothing is
// undefined. Floating point is CUDA's own mathematics (at most 2 ulp where not correctly rounded; pow, 4), with no
// fast-math approximation. Compiles under NVRTC with no toolkit header, and under nvcc. Storage types are in
// storage.cuh.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define JITGEN_DEVICE __device__ __forceinline__

namespace jitgen {

using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;

// The unsigned type an integer is computed in, wide enough that nothing is promoted to int and overflows there.
template <class T>
struct WideType;
template <>
struct WideType<uint8_t> {
  using type = uint32_t;
};
template <>
struct WideType<int8_t> {
  using type = uint32_t;
};
template <>
struct WideType<int16_t> {
  using type = uint32_t;
};
template <>
struct WideType<int32_t> {
  using type = uint32_t;
};
template <>
struct WideType<int64_t> {
  using type = uint64_t;
};
template <class T>
using Wide = typename WideType<T>::type;

template <class T>
constexpr bool is_signed = T(-1) < T(0);
template <class T>
constexpr int bit_width = 8 * int(sizeof(T));

// ------------------------------------------------------------------------------------------------ integer arithmetic

template <class T>
JITGEN_DEVICE T add(T a, T b) {
  return T(Wide<T>(a) + Wide<T>(b));
}
template <class T>
JITGEN_DEVICE T sub(T a, T b) {
  return T(Wide<T>(a) - Wide<T>(b));
}
template <class T>
JITGEN_DEVICE T mul(T a, T b) {
  return T(Wide<T>(a) * Wide<T>(b));
}
template <class T>
JITGEN_DEVICE T neg(T a) {
  return T(Wide<T>(0) - Wide<T>(a));
}
template <class T>
JITGEN_DEVICE T abs(T a) {
  return a < T(0) ? neg(a) : a;
}

template <class T>
JITGEN_DEVICE T trunc_divide(T a, T b) {
  if (b == T(0)) return T(0);
  if (is_signed<T> && b == T(-1)) return neg(a);  // the one quotient that overflows
  return T(a / b);
}
template <class T>
JITGEN_DEVICE T fmod(T a, T b) {
  if (b == T(0) || (is_signed<T> && b == T(-1))) return T(0);
  return T(a % b);
}
template <class T>
JITGEN_DEVICE T floor_divide(T a, T b) {
  T remainder = fmod(a, b);
  T quotient = trunc_divide(a, b);
  return remainder != T(0) && (remainder < T(0)) != (b < T(0)) ? T(quotient - T(1)) : quotient;
}
template <class T>
JITGEN_DEVICE T remainder(T a, T b) {
  T truncated = fmod(a, b);
  return truncated != T(0) && (truncated < T(0)) != (b < T(0)) ? T(truncated + b) : truncated;
}

template <class T>
JITGEN_DEVICE T pow(T base, T exponent) {
  if (exponent < T(0)) {
    if (base == T(1)) return T(1);
    if (base == T(-1)) return exponent & 1 ? T(-1) : T(1);
    return T(0);
  }
  Wide<T> result = 1, square = Wide<T>(base);
  for (Wide<T> left = Wide<T>(exponent); left != 0; left >>= 1) {
    if (left & 1) result *= square;
    square *= square;
  }
  return T(result);
}

// -------------------------------------------------------------------------- integers and bool: order, bits and logic

template <class T>
JITGEN_DEVICE T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
JITGEN_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}
template <class T>
JITGEN_DEVICE T sign(T a) {
  return T((T(0) < a) - (a < T(0)));
}
template <class T>
JITGEN_DEVICE T bitwise_and(T a, T b) {
  return T(a & b);
}
template <class T>
JITGEN_DEVICE T bitwise_or(T a, T b) {
  return T(a | b);
}
template <class T>
JITGEN_DEVICE T bitwise_xor(T a, T b) {
  return T(a ^ b);
}
template <class T>
JITGEN_DEVICE T bitwise_not(T a) {
  return T(~a);
}
JITGEN_DEVICE bool bitwise_not(bool a) { return !a; }

template <class T>
JITGEN_DEVICE T left_shift(T a, T count) {
  return count < T(0) || count >= T(bit_width<T>) ? T(0) : T(Wide<T>(a) << count);
}
template <class T>
JITGEN_DEVICE T right_shift(T a, T count) {
  bool outside = count < T(0) || count >= T(bit_width<T>);
  if (!is_signed<T>) return outside ? T(0) : T(a >> count);
  return T(a >> (outside ? bit_width<T> - 1 : int(count)));
}

// ------------------------------------------------------------------------------------- every dtype: compare and select

template <class T>
JITGEN_DEVICE bool eq(T a, T b) {
  return a == b;
}
template <class T>
JITGEN_DEVICE bool ne(T a, T b) {
  return a != b;
}
template <class T>
JITGEN_DEVICE bool lt(T a, T b) {
  return a < b;
}
template <class T>
JITGEN_DEVICE bool le(T a, T b) {
  return a <= b;
}
template <class T>
JITGEN_DEVICE bool gt(T a, T b) {
  return a > b;
}
template <class T>
JITGEN_DEVICE bool ge(T a, T b) {
  return a >= b;
}
template <class T>
JITGEN_DEVICE T where(bool condition, T a, T b) {
  return condition ? a : b;
}

// --------------------------------------------------------------------- float and double: CUDA's own functions

#define JITGEN_UNARY(name, function)                                     \
  JITGEN_DEVICE float name(float a) { return ::function##f(a); }         \
  JITGEN_DEVICE double name(double a) { return ::function(a); }
#define JITGEN_BINARY(name, function)                                            \
  JITGEN_DEVICE float name(float a, float b) { return ::function##f(a, b); }     \
  JITGEN_DEVICE double name(double a, double b) { return ::function(a, b); }

JITGEN_UNARY(abs, fabs)
JITGEN_UNARY(floor, floor)
JITGEN_UNARY(ceil, ceil)
JITGEN_UNARY(round, rint)
JITGEN_UNARY(trunc, trunc)
JITGEN_UNARY(sqrt, sqrt)
JITGEN_UNARY(rsqrt, rsqrt)
JITGEN_UNARY(exp, exp)
JITGEN_UNARY(exp2, exp2)
JITGEN_UNARY(expm1, expm1)
JITGEN_UNARY(log, log)
JITGEN_UNARY(log2, log2)
JITGEN_UNARY(log10, log10)
JITGEN_UNARY(log1p, log1p)
JITGEN_UNARY(sin, sin)
JITGEN_UNARY(cos, cos)
JITGEN_UNARY(tan, tan)
JITGEN_UNARY(asin, asin)
JITGEN_UNARY(acos, acos)
JITGEN_UNARY(atan, atan)
JITGEN_UNARY(sinh, sinh)
JITGEN_UNARY(cosh, cosh)
JITGEN_UNARY(tanh, tanh)
JITGEN_UNARY(asinh, asinh)
JITGEN_UNARY(acosh, acosh)
JITGEN_UNARY(atanh, atanh)
JITGEN_UNARY(erf, erf)
JITGEN_UNARY(erfc, erfc)
JITGEN_BINARY(fmod, fmod)
JITGEN_BINARY(pow, pow)
JITGEN_BINARY(atan2, atan2)
JITGEN_BINARY(copysign, copysign)
JITGEN_BINARY(fmin, fmin)
JITGEN_BINARY(fmax, fmax)

#undef JITGEN_UNARY
#undef JITGEN_BINARY

JITGEN_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
JITGEN_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }

// 2^a by the hardware's instruction, within two units in the last place. Subnormal numbers are flushed to 0.
JITGEN_DEVICE float exp2_normal(float a) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
JITGEN_DEVICE double exp2_normal(double a) { return exp2(a); }

JITGEN_DEVICE bool signbit(float a) { return __float_as_int(a) < 0; }
JITGEN_DEVICE bool signbit(double a) { return __double_as_longlong(a) < 0; }

// min.NaN and max.NaN are one instruction from sm_80 on; double has no such form. 1 / (1 + power). The hardware's
// reciprocal is within one unit in the last place, at a fifth of the cost of a division: sigmoid is in the epilogue of
// every gated MLP, where a quotient of two float32 is what takes longest. It takes an eighth of the sum, so that it
// never is subnormal, which it would round to 0.
JITGEN_DEVICE float logistic(float power) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fmaf_rn(0.125f, power, 0.125f)));
  return 0.125f * result;
}
JITGEN_DEVICE float sigmoid(float a) { return logistic(exp(-a)); }
JITGEN_DEVICE double sigmoid(double a) { return 1.0 / (1.0 + exp(-a)); }

// For results that are rounded to 16 bits or fewer. The power of two of a rounded product is off by 2**-17 at most,
// where the exponent is largest, and takes three instructions where exp takes eight. As the square of half the power it
// reaches the subnormals, which the instruction itself flushes.
JITGEN_DEVICE float coarse_exp_root(float a) {
  return exp2_normal(0.72134752f * a);  // half of log2(e)
}
JITGEN_DEVICE float coarse_exp(float a) {
  const float root = coarse_exp_root(a);
  return root * root;
}
JITGEN_DEVICE float coarse_sigmoid(float a) { return logistic(coarse_exp(-a)); }
// The square of 2^p(|a|), with a polynomial p: 13 instructions where erfc takes 49, and none of a quotient. GELU is in the
// epilogue of products, where nothing hides them. A relative error of 2^-16 up to 4.2, where a float16 is 0, of 2^-15 up to
// 6, and of 2^-13 up to 9.5, where a bfloat16 is.
JITGEN_DEVICE float coarse_erfc(float a) {
  const float size = ::fabsf(a);
  float p = __fmaf_rn(-2.36645192e-08f, size, 1.20258187e-06f);
  p = __fmaf_rn(p, size, -2.68585973e-05f);
  p = __fmaf_rn(p, size, 0.000349304843f);
  p = __fmaf_rn(p, size, -0.00296577998f);
  p = __fmaf_rn(p, size, 0.017576037f);
  p = __fmaf_rn(p, size, -0.0767255872f);
  p = __fmaf_rn(p, size, -0.458428293f);
  p = __fmaf_rn(p, size, -0.813987911f);
  p = __fmaf_rn(p, size, -9.0314461e-06f);
  const float root = exp2_normal(p), tail = root * root;
  return a < 0.0f ? 2.0f - tail : tail;
}
// GELU, a times the normal distribution of a: that of -|a| is 2^(-size^2) times a polynomial in t, by 2^24 and 2^-24, so that
// only what a bfloat16 is not flushes to 0. 14 instructions where a / 2 * coarse_erfc(-sqrt(1/2) a) takes 17. A relative
// error of 2^-16.6 from -5.9 on, below which a float16 is 0, and of 2^-13.6 from -13.3 on, below which a bfloat16 is
// subnormal. (Minimax coefficients, and the factors of size and t with them.)
JITGEN_DEVICE float coarse_gelu(float a) {
  const float size = 0.8493053f * ::fabsf(a), power = exp2_normal(-__fmaf_rn(size, size, -24.0f));
  float t;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(__fmaf_rn(0.4187246f, size, 1.0f)));
  float p = __fmaf_rn(-0x1.984328p-28f, t, 0x1.12189ap-26f);
  p = __fmaf_rn(p, t, 0x1.885e3ep-30f);
  p = __fmaf_rn(p, t, 0x1.5ac7e8p-27f);
  p = __fmaf_rn(p, t, 0x1.1c1bdcp-27f);
  return a * ::fabsf(__fmaf_rn(-power, p * t, a > 0.0f ? 1.0f : 0.0f));
}
JITGEN_DEVICE float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
JITGEN_DEVICE float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
JITGEN_DEVICE double minimum(double a, double b) { return a != a || b != b ? a + b : ::fmin(a, b); }
JITGEN_DEVICE double maximum(double a, double b) { return a != a || b != b ? a + b : ::fmax(a, b); }

// ---------------------------------------------------- float and double: what is written out of the functions above

#define JITGEN_FLOATING(T)                                                                                  \
  JITGEN_DEVICE T add(T a, T b) { return a + b; }                                                           \
  JITGEN_DEVICE T sub(T a, T b) { return a - b; }                                                           \
  JITGEN_DEVICE T mul(T a, T b) { return a * b; }                                                           \
  JITGEN_DEVICE T div(T a, T b) { return a / b; }                                                           \
  JITGEN_DEVICE T neg(T a) { return -a; }                                                                   \
  JITGEN_DEVICE T reciprocal(T a) { return T(1) / a; }                                                      \
  JITGEN_DEVICE bool isnan(T a) { return a != a; }                                                          \
  JITGEN_DEVICE bool isinf(T a) { return abs(a) == T(__int_as_float(0x7f800000)); }                         \
  JITGEN_DEVICE T remainder(T a, T b) {                                                                     \
    T truncated = fmod(a, b);                                                                               \
    return truncated != T(0) && (truncated < T(0)) != (b < T(0)) ? truncated + b : truncated;               \
  }                                                                                                         \
  /* From the exact remainder, as Python and torch: a / b itself may round up to the next integer. */       \
  JITGEN_DEVICE T floor_divide(T a, T b) {                                                                  \
    if (b == T(0)) return a / b;                                                                            \
    T truncated = fmod(a, b);                                                                               \
    T quotient = (a - truncated) / b;                                                                       \
    if (truncated != T(0) && (truncated < T(0)) != (b < T(0))) quotient -= T(1);                            \
    if (quotient == T(0)) return copysign(T(0), a / b);                                                     \
    T floored = floor(quotient);                                                                            \
    return quotient - floored > T(0.5) ? floored + T(1) : floored;                                          \
  }

JITGEN_FLOATING(float)
JITGEN_FLOATING(double)

#undef JITGEN_FLOATING

// ------------------------------------------------------------------------------------------------------------ random
// 64 random bits that are a function of an index: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). The counter is the offset and the index, the key the seed, as in curand; its first two words.
JITGEN_DEVICE int64_t philox(int64_t index, int64_t seed, int64_t offset) {
  uint32_t c0 = uint32_t(uint64_t(offset)), c1 = uint32_t(uint64_t(offset) >> 32);
  uint32_t c2 = uint32_t(uint64_t(index)), c3 = uint32_t(uint64_t(index) >> 32);
  uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return int64_t(uint64_t(c1) << 32 | c0);
}

}  // namespace jitgen
