// Programmatic dependent launch: where a launch allows it, a kernel starts while the one ahead of it in the stream still
// runs; its memory, read or written, is ready after `previous_kernel_wait`. Without that, no-ops.
//
// Meanwhile it may `prefetch` what it is going to read: all accesses to memory meet in the second-level cache, so what is
// there before its time is never out of date.
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
// Brings share number `share` of `shares`, all equal, of a row of whole 16 bytes into the second-level cache. One such
// request is also quicker than the loads that follow at making a whole row come.
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

}  // namespace jitgen
