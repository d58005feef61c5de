// Indices of gathers.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

JITGEN_INLINE bool is_within(int64_t index, int64_t size) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(size);
}

// `index` where it is in [0, size), else 0, and `outside` becomes 1.
JITGEN_INLINE int64_t within(int64_t index, int64_t size, int64_t& outside) {
  const bool inside = is_within(index, size);
  outside |= !inside;
  return inside ? index : 0;
}

// `at` where an index is in range, else `spare`, and `outside` becomes 1.
template <class T>
JITGEN_INLINE T* place(T* at, bool inside, T* spare, int64_t& outside) {
  outside |= !inside;
  return inside ? at : spare;
}

}  // namespace jitgen
