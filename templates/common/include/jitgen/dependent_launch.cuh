// Programmatic dependent launch: where a launch allows it, a kernel starts while the preceding one in the stream still
// runs. Memory that the preceding kernel reads or writes may be accessed after `previous_kernel_wait`. In other
// launches these functions do nothing.
//
// Before that, a kernel may `prefetch` what it is going to read. All accesses to memory go through the second-level
// cache, so data that was fetched too early is never stale there.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

JITGEN_DEVICE void previous_kernel_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
JITGEN_DEVICE void next_kernel_may_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Fetches share number `share` of `shares` equal ones of a row, a multiple of 16 bytes long, into the second-level
// cache. One such request also fetches a whole row faster than the loads that follow it.
template <class T>
JITGEN_DEVICE void prefetch(const T* row, int64_t length, uint32_t share, uint32_t shares) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int piece = 16 / sizeof(T);
  const uint32_t pieces = uint32_t(length / piece), each = (pieces + shares - 1) / shares, first = share * each;
  if (first < pieces) {
    const uint32_t left = pieces - first;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(row + int64_t(first) * piece)),
                 "r"(16 * (left < each ? left : each))
                 : "memory");
  }
#endif
}
// Fetches `live` neighbouring elements, at most `most`, into the second-level cache, whose sectors have 32 bytes. Lanes
// that fetch from different rows take one instruction for all of them, where they would take turns at the other function.
template <int most, class T>
JITGEN_DEVICE void prefetch_sectors(const T* from, int live) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < most; i += 32 / sizeof(T)) {
    if (i < live) asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from + i)) : "memory");
  }
#endif
}

}  // namespace jitgen
