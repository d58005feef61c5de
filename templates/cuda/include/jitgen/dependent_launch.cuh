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
// Brings one of `shares` equal shares of a row, of which each begins at a multiple of 16 bytes, into the second-level
// cache. One such request is also quicker than the loads that follow at making a whole row come.
template <int shares, class T>
JITGEN_DEVICE void prefetch(const T* row, int64_t length, uint32_t share) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int piece = 16 / sizeof(T);
  const int64_t each = (length / piece + shares - 1) / shares * piece, first = share * each;
  const int64_t count = length - first < each ? length - first : each;
  if (count > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(row + first)),
                 "r"(uint32_t(count * sizeof(T)))
                 : "memory");
  }
#endif
}

}  // namespace jitgen
