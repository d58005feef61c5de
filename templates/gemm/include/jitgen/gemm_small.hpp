// Small products of a dense weight, as batches of little matrices have them: without packing, and without memory from the
// heap. The weight is copied to the stack, transposed, and every four rows of x have their sums in registers.
#pragma once

#include "jitgen/gemm_operands.hpp"

namespace jitgen {
namespace gemm {

constexpr int64_t small_rows = 64;     // m, n and k of the largest small product
constexpr int64_t small_columns = 32;
constexpr int64_t small_depth = 64;

namespace detail {

constexpr int64_t rows_together = 4;

// The sums of some rows of x, each of `vectors` vectors of 32 bytes, as the weight's rows are.
template <int vectors, class T>
__attribute__((noinline)) void small_sums(const T* x, const T* weight, int64_t k, T* sums) {
  typedef T Vector __attribute__((vector_size(32), may_alias));
  constexpr int64_t lanes = 32 / sizeof(T);
  Vector acc[rows_together][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows_together; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) acc[r][v] = Vector{};
  }
  for (int64_t i = 0; i < k; ++i, weight += vectors * lanes) {
#pragma GCC unroll 4
    for (int r = 0; r < rows_together; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        acc[r][v] += x[r * small_depth + i] * *reinterpret_cast<const Vector*>(weight + v * lanes);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows_together; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) *reinterpret_cast<Vector*>(sums + (r * vectors + v) * lanes) = acc[r][v];
  }
}

template <class T>
using SmallSums = void (*)(const T*, const T*, int64_t, T*);
template <class T, int vectors = 1>
JITGEN_INLINE SmallSums<T> small_sums_of(int64_t wanted) {
  if constexpr (vectors * (32 / sizeof(T)) < small_columns) {
    if (wanted > vectors) return small_sums_of<T, vectors + 1>(wanted);
  }
  return small_sums<vectors, T>;
}

template <class Accumulator, class X, class Region, class Storage, Along along>
bool small_product(const X& x, int64_t m, int64_t k, const Region& region, const Dense<Storage, along>& weight) {
  constexpr int64_t lanes = 32 / sizeof(Accumulator);
  alignas(64) Accumulator panel[small_depth * small_columns], sums[rows_together * small_columns];
  alignas(64) Accumulator rows[rows_together * small_depth];
  alignas(64) typename X::Storage row[small_depth];
  const int64_t columns = region.columns(), vectors = (columns + lanes - 1) / lanes, width = vectors * lanes;
  const auto sums_of = small_sums_of<Accumulator>(vectors);
  for (int64_t i = 0; i < k; ++i) {
    const Storage* const from = weight.data + i * weight.stride_k;
    const int64_t stride = along == Along::n ? 1 : weight.stride_n;
#pragma omp simd
    for (int64_t n = 0; n < columns; ++n) panel[i * width + n] = Accumulator(load(from[n * stride]));
    for (int64_t n = columns; n < width; ++n) panel[i * width + n] = 0;
  }
  for (int64_t first = 0; first < m; first += rows_together) {
    const int64_t count = m - first < rows_together ? m - first : rows_together;
    for (int64_t r = 0; r < rows_together; ++r) {
      x.fill(first + (r < count ? r : 0), 0, k, row);
#pragma omp simd
      for (int64_t i = 0; i < k; ++i) rows[r * small_depth + i] = Accumulator(load(row[i]));
    }
    sums_of(rows, panel, k, sums);
    for (int64_t r = 0; r < count; ++r) region.epilogue(first + r, 0, columns, sums + r * width, 0);
  }
  return true;
}
template <class Accumulator, class X, class Region, class Weight>
bool small_product(const X&, int64_t, int64_t, const Region&, const Weight&) {
  return false;
}

}  // namespace detail

// Computes the product where it is small, of one region with one dense weight. Returns whether it was.
template <class Accumulator, class X, class Region>
bool multiply_small(const X& x, int64_t m, int64_t k, const Region& region) {
  if (m > small_rows || k > small_depth || region.columns() > small_columns) return false;
  int64_t contractions = 0;
  region.each([&](int64_t, const auto&) { ++contractions; });
  bool done = false;
  if (contractions == 1) {
    region.each([&](int64_t, const auto& weight) { done = detail::small_product<Accumulator>(x, m, k, region, weight); });
  }
  return done;
}
template <class Accumulator, class X, class... Regions>
bool multiply_small(const X&, int64_t, int64_t, const Regions&...) {
  return false;
}

}  // namespace gemm
}  // namespace jitgen
