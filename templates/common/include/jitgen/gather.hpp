// Checks the indices of gathers, and keeps them within the tensor.
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

// An index of a value that is not to be stored (ir/scatters.py).
constexpr int64_t left_out = -(int64_t(1) << 62);

// `at` where an index is in range, else `spare`, and `outside` becomes 1 if that is to be `reported`.
template <class T>
JITGEN_INLINE T* place(T* at, bool inside, bool reported, T* spare, int64_t& outside) {
  outside |= !inside & reported;
  return inside ? at : spare;
}

}  // namespace jitgen
