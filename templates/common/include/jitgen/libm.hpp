// The elementary functions in double: the C library's, by the compiler's built-ins. Part of math.hpp.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

#define JITGEN_LIBM(name) \
  JITGEN_INLINE double name(double x) { return __builtin_##name(x); }
JITGEN_LIBM(exp)
JITGEN_LIBM(exp2)
JITGEN_LIBM(expm1)
JITGEN_LIBM(log)
JITGEN_LIBM(log2)
JITGEN_LIBM(log10)
JITGEN_LIBM(log1p)
JITGEN_LIBM(sin)
JITGEN_LIBM(cos)
JITGEN_LIBM(tan)
JITGEN_LIBM(asin)
JITGEN_LIBM(acos)
JITGEN_LIBM(atan)
JITGEN_LIBM(sinh)
JITGEN_LIBM(cosh)
JITGEN_LIBM(tanh)
JITGEN_LIBM(asinh)
JITGEN_LIBM(acosh)
JITGEN_LIBM(atanh)
JITGEN_LIBM(erf)
JITGEN_LIBM(erfc)
#undef JITGEN_LIBM

JITGEN_INLINE double exp2_normal(double x) { return exp2(x); }
JITGEN_INLINE double pow(double base, double exponent) { return __builtin_pow(base, exponent); }
JITGEN_INLINE double atan2(double y, double x) { return __builtin_atan2(y, x); }
JITGEN_INLINE double sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }

}  // namespace jitgen
