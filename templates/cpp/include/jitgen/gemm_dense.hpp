// Dense weights of any strides, packed into panels: a block's 16 rows side by side, k by k, as a tile reads them.
#pragma once

#include "jitgen/gemm_compute.hpp"

namespace jitgen {
namespace gemm {
namespace detail {

// What becomes one element: as many neighbours in k as an element holds, of which `live` are there.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Element element_of(const Storage* w, int64_t stride_k, int64_t live) {
  if constexpr (Compute::per_element == 2) {
    return uint32_t(w[0].bits) | (live > 1 ? uint32_t(w[stride_k].bits) << 16 : 0u);
  } else {
    return static_cast<typename Compute::Element>(jitgen::load(*w));
  }
}

// A vector of elements of one row that lie side by side.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Weights elements_at(const Storage* w) {
  using Element = typename Compute::Element;
  constexpr int lanes = vector_bytes / sizeof(Element);
  if constexpr (sizeof(Storage) * Compute::per_element == sizeof(Element)) {
    return load_vector<typename Compute::Weights>(w);
  } else {
    alignas(64) Element widened[lanes];
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) widened[lane] = static_cast<Element>(jitgen::load(w[lane]));
    return load_vector<typename Compute::Weights>(widened);
  }
}

template <class Vector>
struct Shuffled {
  using type = Vector;
};
template <>
struct Shuffled<Words> {
  using type = Floats;
};

}  // namespace detail

// `rows` (up to 16) rows of `count` neighbours in k, packed to `elements` elements of 16 rows, the rest zero.
template <class Compute, class Storage>
void pack_block(const Storage* w, int64_t stride_n, int64_t stride_k, int64_t rows, int64_t count, int64_t elements,
                typename Compute::Element* to) {
  using Element = typename Compute::Element;
  using Weights = typename Compute::Weights;
  using Vector = typename detail::Shuffled<Weights>::type;
  constexpr int per = Compute::per_element;
  constexpr int lanes = vector_bytes / sizeof(Element);
  int64_t e = 0;
  if (stride_k == 1 && rows == block_rows) {
    for (; (e + lanes) * per <= count; e += lanes) {
      for (int v = 0; v < Compute::vectors; ++v) {
        Vector square[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) {
          const Storage* from = w + (v * lanes + i) * stride_n + e * per;
          __builtin_prefetch(from + 512 / sizeof(Storage));
          square[i] = (Vector)detail::elements_at<Compute>(from);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store_vector(to + (e + i) * block_rows + v * lanes, square[i]);
      }
    }
  } else if (stride_n == 1 && rows == block_rows) {
    for (; (e + 1) * per <= count; ++e) {
      const Storage* from = w + e * per * stride_k;
      Element* const row = to + e * block_rows;
#pragma omp simd
      for (int64_t r = 0; r < block_rows; ++r) row[r] = detail::element_of<Compute>(from + r, stride_k, per);
    }
  }
  for (; e < elements; ++e) {
    const int64_t live = count - e * per;
    for (int64_t r = 0; r < block_rows; ++r) {
      const Storage* from = w + r * stride_n + e * per * stride_k;
      to[e * block_rows + r] = r < rows && live > 0 ? detail::element_of<Compute>(from, stride_k, live) : Element(0);
    }
  }
}

}  // namespace gemm
}  // namespace jitgen
