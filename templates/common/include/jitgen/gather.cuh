// Checks the indices of gathers, and keeps them within the tensor.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

__device__ __forceinline__ bool is_within(int64_t index, int64_t size) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(size);
}

// `index` where it is in [0, size), else 0: no access leaves the tensor.
__device__ __forceinline__ int64_t within(int64_t index, int64_t size) {
  return is_within(index, size) ? index : 0;
}

}  // namespace jitgen
