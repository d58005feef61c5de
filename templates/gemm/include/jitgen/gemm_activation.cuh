// The activation x[M, K] of the mainloops that stage it in shared memory. It is a matrix in global memory, or every
// block computes it while staging it (a prologue). In the second case it is a functor of the generated source:
//
//   struct Activation {
//     using Element = ...;                       // the dtype of the products
//     static constexpr bool computed = true;
//     static constexpr int vector = 8;           // elements that one call computes
//     template <int width> __device__ Vector<Element, width> at(Index m, Index k, int live) const;
//   };
//
// whose `at` returns elements k .. k + width of row m. Those from k + live on are zeros.
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

// `vector` elements are copied at once, for which rows are aligned to as many and k is contiguous; 1 needs neither.
template <class Element_, int vector_>
struct StoredActivation {
  using Element = Element_;
  static constexpr bool computed = false;
  static constexpr int vector = vector_;
  const Element* pointer;
  int64_t row_stride, k_stride;
};

template <class Element, int count>
JITGEN_DEVICE void store_shared(uint32_t to, const Vector<Element, count>& elements) {
  constexpr int bytes = count * int(sizeof(Element));
#pragma unroll
  for (int i = 0; i < elements.count; ++i) {
    const auto word = elements.words[i];
    if constexpr (bytes >= 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 16), "r"(word.x), "r"(word.y), "r"(word.z),
                   "r"(word.w)
                   : "memory");
    } else if constexpr (bytes == 8) {
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(word.x), "r"(word.y) : "memory");
    } else if constexpr (bytes == 4) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
    } else {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(word) : "memory");
    }
  }
}

// A place: `X::vector` elements of x, row m from k on, are written to address `to` if `live`.
struct StagedPlace {
  uint32_t to;
  int m, k;
  bool live;
};

// Stages elements of x in shared memory: those of place(i) for i = first, first + step .. below `total`, with zeros
// from K on. Copies of 4 bytes or more are asynchronous. A computed x is computed for `batch` places at once, so that
// their reads are in flight at the same time. Where K is 0, no place may be live.
template <int batch, class X, class Place>
JITGEN_DEVICE void stage_elements(const X& x, int K, int first, int total, int step, Place place) {
  using Element = typename X::Element;
  constexpr int vector = X::vector, bytes = vector * int(sizeof(Element));
  if constexpr (X::computed) {
    if (K == 0) return;
#pragma unroll 1
    for (int i = first; i < total; i += batch * step) {
      Vector<Element, vector> elements[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const StagedPlace to = place(smaller(i + b * step, total - 1));
        const int k = smaller(to.k, (K - 1) / vector * vector);
        elements[b] = x.template at<vector>(to.m, k, smaller(K - k, vector));
        if (to.k >= K) elements[b] = {};
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const StagedPlace to = place(i + b * step);
        if (i + b * step < total && to.live) store_shared(to.to, elements[b]);
      }
    }
  } else {
#pragma unroll 2
    for (int i = first; i < total; i += step) {
      const StagedPlace to = place(i);
      if (!to.live) continue;
      const int live = smaller(K - to.k, vector);
      const Element* const from = x.pointer + (to.m * x.row_stride + to.k * x.k_stride);
      if constexpr (bytes >= 4) {
        copy_async<bytes>(to.to, live > 0 ? from : x.pointer, live > 0 ? live * int(sizeof(Element)) : 0);
      } else {
        Vector<Element, 1> element = {};
        if (live > 0) element[0] = *from;
        store_shared(to.to, element);
      }
    }
  }
}

}  // namespace jitgen
