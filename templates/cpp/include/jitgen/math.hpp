// The pointwise operations of jitgen/ir/ops.py as overloads over every compute dtype of their domain: float, double,
// uint8_t, int8_t, int16_t, int32_t, int64_t and bool.
//
//   arithmetic.hpp    arithmetic, comparison, rounding, bits and selection, for all of them
//   exponential.hpp   exponentials, logarithms, powers, hyperbolic functions, sigmoid and the error function, in float
//   coarse.hpp        the few of them that 16-bit results need less exactly
//   trigonometry.hpp  circular functions and their inverses, in float
//   libm.hpp          the same two lists in double, where the C library does the work
//
// The float functions are branch-free and within 4 ulp over the whole range, special values and denormals included:
// inside a `#pragma omp simd` loop they become vector code at any width. Polynomials are minimax fits (Remez exchange)
// over the ranges stated beside them. fmod, remainder and floor_divide keep a call for far-apart operands and stay
// scalar, as do all of double's.
#pragma once

#include "jitgen/arithmetic.hpp"
#include "jitgen/coarse.hpp"
#include "jitgen/exponential.hpp"
#include "jitgen/libm.hpp"
#include "jitgen/trigonometry.hpp"
