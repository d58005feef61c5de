// The activation x[M, K] of the mainloops that stage it in shared memory: a matrix as it lies in global memory, or one
// that is computed where it is staged (a prologue), by every block anew. The latter is a functor of the generated source:
//
//   struct Activation {
//     using Element = ...;                       // as it meets the weights
//     static constexpr bool computed = true;
//     static constexpr int vector = 8;           // elements that are computed and stored together
//     template <int width> __device__ Vector<Element, width> at(Index m, Index k, int live) const;
//   };
//
// whose `at` gives `width` elements of row m from k on: zeros from the first `live` on.
#pragma once

#include "jitgen/gemm_ptx.cuh"

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

// `X::vector` elements of row m from k on, to shared memory: zeros from K on. Copies are asynchronous where they are of
// 4 bytes or more and nothing is computed.
template <class X>
JITGEN_DEVICE void stage_elements(uint32_t to, const X& x, int m, int k, int K) {
  using Element = typename X::Element;
  constexpr int vector = X::vector, bytes = vector * int(sizeof(Element));
  const int live = smaller(K - k, vector);
  if constexpr (X::computed) {
    Vector<Element, vector> elements = {};
    if (live > 0) elements = x.template at<vector>(m, k, live);
    store_shared(to, elements);
  } else {
    const Element* const from = x.pointer + (m * x.row_stride + k * x.k_stride);
    if constexpr (bytes >= 4) {
      copy_async<bytes>(to, live > 0 ? from : x.pointer, live > 0 ? live * int(sizeof(Element)) : 0);
    } else {
      Vector<Element, 1> element = {};
      if (live > 0) element[0] = *from;
      store_shared(to, element);
    }
  }
}

}  // namespace jitgen
