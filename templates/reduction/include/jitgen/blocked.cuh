// Combines values over blocks of a row: aligned groups of `lanes` neighbouring lanes, at most a warp, all of which are in
// the row or none is. Every lane gets the result.
//
//   const float largest = jitgen::combine_block<jitgen::Max, 16>(mine);
#pragma once

#include "jitgen/lanes.cuh"

namespace jitgen {

template <class Op, int lanes, class T>
JITGEN_DEVICE T combine_block(T value) {
  static_assert(lanes <= 32, "a block is within a warp");
  const unsigned members = lanes == 32 ? ~0u : ((1u << lanes % 32) - 1) << (threadIdx.x & (32 - lanes));
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
    const auto exchange = [=](uint32_t word) { return __shfl_xor_sync(members, word, distance); };
    value = Op::combine(value, by_words(value, exchange));
  }
  return value;
}

}  // namespace jitgen
