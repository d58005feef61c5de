// Multiplies with rows in the lanes of vectors, as attention and its backward do.
#pragma once

#include "jitgen/attention_rows.hpp"

namespace jitgen {
namespace attention {

// Rows of a product that are computed at once: each takes two registers.
#if defined(JITGEN_AVX512)
constexpr int together = 12;
#else
constexpr int together = 6;
#endif

// to[i][lane] = sum over t of a[i][t] * b[t][lane], or that added to it. Neighbours of a are those of i if `along`, else
// those of t; `stride` is the other one's.
template <class T, int count, bool adds, bool along>
JITGEN_INLINE void product_tile(const T* a, int64_t stride, const T* b, int64_t depth, T* to) {
  constexpr int64_t lanes = lanes_of<T>, width = width_of<T>;
  Vector<T> sum[count][2];
#pragma GCC unroll 12
  for (int i = 0; i < count; ++i) {
    sum[i][0] = adds ? load_vector<Vector<T>>(to + i * lanes) : Vector<T>{};
    sum[i][1] = adds ? load_vector<Vector<T>>(to + i * lanes + width) : Vector<T>{};
  }
  for (int64_t t = 0; t < depth; ++t) {
    const Vector<T> row[2] = {load_vector<Vector<T>>(b), load_vector<Vector<T>>(b + width)};
#pragma GCC unroll 12
    for (int i = 0; i < count; ++i) accumulate_block(sum[i], row, a + (along ? i : i * stride));
    a += along ? stride : 1;
    b += lanes;
  }
#pragma GCC unroll 12
  for (int i = 0; i < count; ++i) {
    store_vector(to + i * lanes, sum[i][0]);
    store_vector(to + i * lanes + width, sum[i][1]);
  }
}

template <class T, int count, bool adds, bool along>
JITGEN_INLINE void product_rest(const T* a, int64_t stride, int64_t left, const T* b, int64_t depth, T* to) {
  if constexpr (count > 0) {
    if (left == count) return product_tile<T, count, adds, along>(a, stride, b, depth, to);
    product_rest<T, count - 1, adds, along>(a, stride, left, b, depth, to);
  }
}

template <class T, bool adds, bool along>
__attribute__((noinline)) void product(const T* a, int64_t stride, int64_t count, const T* b, int64_t depth, T* to) {
  int64_t i = 0;
  for (; i + together <= count; i += together) {
    product_tile<T, together, adds, along>(a + (along ? i : i * stride), stride, b, depth, to + i * lanes_of<T>);
  }
  product_rest<T, together - 1, adds, along>(a + (along ? i : i * stride), stride, count - i, b, depth,
                                             to + i * lanes_of<T>);
}

}  // namespace attention
}  // namespace jitgen
