// Programmatic dependent launch: where a launch allows it, a kernel starts while the one ahead of it in the stream still
// runs; its memory, read or written, is ready after `previous_kernel_wait`. Without that, no-ops.
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

}  // namespace jitgen
