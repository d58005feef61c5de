// Iteration over an index space in row-major order, from any position: the start takes one division per dimension, each
// step additions.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

template <int rank>
struct Walk {
  int64_t index[rank];
  const int64_t* const sizes;

  // At position `linear` of the space of `rank` sizes. An empty space has no positions and may not be walked.
  JITGEN_INLINE Walk from(const int64_t* sizes, int64_t linear) {
    Walk walk{{}, sizes};
    for (int dim = rank - 1; dim >= 0; --dim) {
      const int64_t size = sizes[dim] == 0 ? 1 : sizes[dim];
      walk.index[dim] = linear % size;
      linear /= size;
    }
    return walk;
  }

  inline void next() {
    for (int dim = rank - 1; dim >= 0; --dim) {
      if (++index[dim] < sizes[dim]) return;
      index[dim] = 0;
    }
  }
};

// How many runs of at most `block` elements ahead operands are prefetched: about one block.
JITGEN_INLINE int64_t runs_ahead(int64_t block, int64_t inner) { return inner < block ? block / (inner + 1) + 1 : 1; }

}  // namespace jitgen
