// The sizes of a convolution, and the phases that a spread divides its pixels into (convolution.hpp).
#pragma once

#include "jitgen/gemm.hpp"

namespace jitgen {
namespace convolution {

using gemm::block_rows;
using gemm::group_blocks;
using gemm::round_up;

constexpr int64_t copied_bytes = 4 << 20;  // of the images whose copies are made, and then read, together
constexpr int64_t stencil_outputs = 4;     // outputs of a group up to which it is computed as a stencil
constexpr int64_t stencil_chunk = 512;     // products that a stencil adds up before it adds them to the others
constexpr int64_t slack = 64;              // elements behind the last one that whole vectors may read or write

// A step that the compiler knows.
struct One {
  constexpr operator int64_t() const { return 1; }
};

struct Problem {
  int64_t rows, groups, outputs, channels;
  int64_t pixels[3], image[3], kernel[3], stride[3], dilation[3], offset[3], spread[3];
  int64_t x[6];  // strides along rows, groups, channels and the dimensions of an image
  int64_t w[6];  // strides along groups, outputs, channels and the dimensions of a filter
  bool flat;     // whether the epilogue takes the pixels of an image as one dimension
};

// A phase: pixels first[d] + q * step[d], for q below pixels[d].
struct Phase {
  int64_t first[3], step[3], pixels[3], kernel[3], dilation[3], offset[3];
  int64_t w_first, w[3];
  int64_t depth;    // products of a sum
  int64_t padded;   // the same, padded to what a tile reads
  int64_t columns;  // pixels of an image
};

namespace detail {

JITGEN_INLINE int64_t divisor(int64_t a, int64_t b) {
  a = a < 0 ? -a : a;
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}
JITGEN_INLINE int64_t modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

// Phase `number` of `problem`.
inline Phase phase_of(const Problem& problem, int64_t number) {
  Phase phase;
  phase.w_first = 0;
  phase.depth = problem.channels;
  phase.columns = 1;
  for (int d = 2; d >= 0; --d) {
    const int64_t spread = problem.spread[d], first = number % spread, dilation = problem.dilation[d];
    number /= spread;
    const int64_t every = spread / divisor(dilation, spread);
    const int64_t at = first * problem.stride[d] + problem.offset[d];
    int64_t begin = 0;
    while (begin < every && modulo(at + begin * dilation, spread) != 0) ++begin;
    const bool none = begin == every || begin >= problem.kernel[d];
    phase.first[d] = first;
    phase.step[d] = spread;
    phase.pixels[d] = first < problem.pixels[d] ? (problem.pixels[d] - first + spread - 1) / spread : 0;
    phase.kernel[d] = none ? 0 : (problem.kernel[d] - begin + every - 1) / every;
    phase.dilation[d] = every * dilation / spread;
    phase.offset[d] = none ? 0 : (at + begin * dilation) / spread;
    phase.w_first += begin * problem.w[3 + d];
    phase.w[d] = every * problem.w[3 + d];
    phase.depth *= phase.kernel[d];
    phase.columns *= phase.pixels[d];
  }
  phase.padded = round_up(phase.depth, gemm::ready_steps);
  return phase;
}

}  // namespace detail

}  // namespace convolution
}  // namespace jitgen
