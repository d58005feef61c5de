// The arithmetic of a product: the type it is accumulated in, and the layout of packed rows of x.
//
//   Singles   float x float          float16, float32, and bfloat16 where the processor has no dot product of it
//   Pairs     two bfloat16 at once   an element is the pair (k, k + 1); accumulated in float
//   Wide      double x double
//   Whole     int32 x int32          modulo 2^32
//   WideWhole int64 x int64          modulo 2^64
//
// gemm_integers.hpp has those of 8 and 16 bits. Where an element is several neighbours in k, its arithmetic makes them:
//   joined(w, stride, live)   an element of `live` weights, each `stride` from the one before
//   along(w)                  a vector of elements of one row of weights, contiguous along k
//   across(w, stride, live)   a vector of elements of neighbouring rows of weights
//   of_x(x, e)                element e of a row of x
//
// x is packed in tiles of rows. The rows of a tile are interleaved, so that a tile is read in order of k.
#pragma once

#include "jitgen/types.cuh"
#include "jitgen/vector.hpp"

namespace jitgen {
namespace gemm {

// A block is 16 interleaved rows of weights: one vector of floats on AVX-512, two on AVX2, four on SSE2 and elsewhere.
constexpr int64_t block_rows = 16;

namespace detail {

// How far ahead weights are prefetched, in bytes. They go to the second-level cache, which can have more requests in
// flight than the first-level one; the processor's own prefetcher fills that.
constexpr int64_t ahead = 12288;

}  // namespace detail

// `most_rows`: rows of a tile for which registers, 32 on AVX-512 and 16 elsewhere, hold the accumulators, the block's
// weights and a broadcast of x. Tiles have `tile_rows` rows at most.
struct Singles {
  using Element = float;
  using Accumulator = float;
  using Vector = Floats;
  using Weights = Floats;
  static constexpr int per_element = 1;
  static constexpr int vectors = block_rows / float_lanes;
  static constexpr int most_rows = vectors == 1 ? 24 : vectors == 2 ? 6 : 2;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
};

struct Wide {
  using Element = double;
  using Accumulator = double;
  using Vector = Doubles;
  using Weights = Doubles;
  static constexpr int per_element = 1;
  static constexpr int vectors = block_rows / double_lanes;
  static constexpr int most_rows = vectors == 2 ? 12 : vectors == 4 ? 3 : 1;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
};

// A vector product of integers takes several instructions, and registers between them.
struct Whole {
  using Element = int32_t;
  using Accumulator = int32_t;
  using Vector = Ints;
  using Weights = Ints;
  static constexpr int per_element = 1;
  static constexpr int vectors = block_rows / float_lanes;
  static constexpr int most_rows = vectors == 1 ? 16 : vectors == 2 ? 5 : 2;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
};

struct WideWhole {
  using Element = int64_t;
  using Accumulator = int64_t;
  using Vector = Longs;
  using Weights = Longs;
  static constexpr int per_element = 1;
  static constexpr int vectors = block_rows / double_lanes;
  static constexpr int most_rows = vectors == 2 ? 8 : vectors == 4 ? 2 : 1;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
};

#if defined(JITGEN_AVX512)
struct Pairs {
  using Element = uint32_t;
  using Accumulator = float;
  using Vector = Floats;
  using Weights = Words;
  static constexpr int per_element = 2;
  static constexpr int vectors = 1;
  static constexpr int most_rows = 24;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;

  JITGEN_INLINE Element joined(const bfloat16* w, int64_t stride, int64_t live) {
    return uint32_t(w[0].bits) | (live > 1 ? uint32_t(w[stride].bits) << 16 : 0u);
  }
  JITGEN_INLINE Element of_x(const bfloat16* x, int64_t e) { return joined(x + 2 * e, 1, 2); }
  JITGEN_INLINE Weights along(const bfloat16* w) { return load_vector<Weights>(w); }
  JITGEN_INLINE Weights across(const bfloat16* w, int64_t stride, int64_t live) {
    const Words low = widen_halves(w);
    return live > 1 ? low | widen_halves(w + stride) << 16 : low;
  }
};
#endif

namespace detail {

// The lowest tile that occurs where at least `fewest` rows are divided evenly into as few tiles of `most` rows as hold
// them.
constexpr int lowest_tile(int most, int fewest) {
  int lowest = most;
  for (int rows = fewest; rows <= fewest + 2 * most; ++rows) {
    const int tile = rows / ((rows + most - 1) / most);
    lowest = tile < lowest ? tile : lowest;
  }
  return lowest;
}

}  // namespace detail

// The same with tiles of at most `most` rows, for at least `fewest` rows of x. Only the heights of tiles that then
// occur are compiled.
template <class Compute, int most, int fewest>
struct Few : Compute {
  static constexpr int tile_rows = most < Compute::tile_rows ? most : Compute::tile_rows;
  static constexpr int fewest_rows = detail::lowest_tile(tile_rows, fewest);
};

// The same, where the sums of a row must have the same bits in a tile of any height: all are added up as in the tallest.
template <class Compute>
struct Invariant : Compute {
  static constexpr int summed_as = Compute::tile_rows;
};

namespace detail {

// The height of the tile in whose order a tile of `rows` rows adds up.
template <class Compute, int rows>
constexpr decltype(+Compute::summed_as) summed_as(int) {
  return Compute::summed_as;
}
template <class Compute, int rows>
constexpr int summed_as(long) {
  return rows;
}

}  // namespace detail

// ------------------------------------------------------------------------------------------------------ rows of x

namespace detail {

// Element `e` of a row of x.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Element element_of_x(const Storage* x, int64_t e) {
  if constexpr (Compute::per_element == 1) {
    return static_cast<typename Compute::Element>(jitgen::load(x[e]));
  } else {
    return Compute::of_x(x, e);
  }
}

}  // namespace detail

// Copies `count` elements of one row from `x` to every `rows`-th element of `to`.
template <class Compute, class Storage>
JITGEN_INLINE void pack_row(const Storage* x, int64_t count, typename Compute::Element* to, int64_t rows) {
  if (rows == 1) {
#pragma omp simd
    for (int64_t e = 0; e < count; ++e) to[e] = detail::element_of_x<Compute>(x, e);
  } else {
    for (int64_t e = 0; e < count; ++e) to[e * rows] = detail::element_of_x<Compute>(x, e);
  }
}

}  // namespace gemm
}  // namespace jitgen
