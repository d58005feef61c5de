// The pointwise operations of jitgen/ir/ops.py as overloads over every compute dtype of their domain: float, double,
// uint8_t, int8_t, int16_t, int32_t, int64_t and bool.
//
//   arithmetic.hpp    arithmetic, comparison, rounding, bits and selection, for all of them
//   exponential.hpp   exponentials, logarithms, powers, hyperbolic functions, sigmoid and the error function, in float
//   coarse.hpp        less exact versions of some of them, for 16-bit results
//   trigonometry.hpp  circular functions and their inverses, in float
//   libm.hpp          the same two lists in double, where the C library does the work
//
// The float functions are branch-free and within 4 ulp over the whole range, special values and denormals included:
// inside a `#pragma omp simd` loop they become vector code at any width. Polynomials are minimax fits (Remez exchange)
// over the ranges stated next to them. fmod, remainder and floor_divide call the C library where operands differ widely
// in magnitude, and are not vectorised; neither are the functions for double.
#pragma once

#include "jitgen/arithmetic.hpp"
#include "jitgen/coarse.hpp"
#include "jitgen/exponential.hpp"
#include "jitgen/libm.hpp"
#include "jitgen/philox.hpp"
#include "jitgen/trigonometry.hpp"
