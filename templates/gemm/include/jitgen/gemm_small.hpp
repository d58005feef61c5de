// Small products of a dense weight, as batches of little matrices have them: without packing, and without memory from the
// heap. The weight is copied to the stack, transposed, and a few rows of x have their sums in registers.
#pragma once

#include "jitgen/gemm_operands.hpp"

namespace jitgen {
namespace gemm {

constexpr int64_t small_rows = 64;     // m, n and k of the largest small product
constexpr int64_t small_columns = 32;
constexpr int64_t small_depth = 64;

namespace detail {

constexpr int64_t most_rows_at_once = 4;

// acc + w * x for every lane, rounded once where the target has the instruction; integers wrap around.
template <class T, class Vector>
JITGEN_INLINE void small_accumulate(Vector& acc, const Vector& w, const Vector& x) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  if constexpr (T(0.5) == T(0)) {
    acc += w * x;
  } else if constexpr (sizeof(T) == 4) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  } else {
    asm("vfmadd231pd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  }
#else
  acc += w * x;
#endif
}

// The sums of `rows` rows of x, each of `vectors` vectors of 32 bytes, as the weight's rows are.
template <int vectors, int rows, class T>
__attribute__((noinline)) void small_sums(const T* x, const T* weight, int64_t k, T* sums) {
  typedef T Vector __attribute__((vector_size(32), may_alias));
  constexpr int64_t lanes = 32 / sizeof(T);
  Vector acc[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) acc[r][v] = Vector{};
  }
  for (int64_t i = 0; i < k; ++i, weight += vectors * lanes) {
    // The shorter side stays in registers; of the other one there is one vector at a time.
    const Vector* const of_weight = reinterpret_cast<const Vector*>(weight);
    const T* const of_x = x + i;
    if constexpr (vectors <= rows) {
      Vector w[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) w[v] = of_weight[v];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const Vector all = of_x[r * small_depth] - Vector{};
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) small_accumulate<T>(acc[r][v], w[v], all);
      }
    } else {
      Vector all[rows];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) all[r] = of_x[r * small_depth] - Vector{};
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const Vector w = of_weight[v];
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) small_accumulate<T>(acc[r][v], w, all[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) *reinterpret_cast<Vector*>(sums + (r * vectors + v) * lanes) = acc[r][v];
  }
}

// How a weight of some width is multiplied: by one row of x, and by as many at once as leave the sums in registers.
template <class T>
struct SmallSums {
  using Function = void (*)(const T*, const T*, int64_t, T*);
  Function one, several;
  int64_t rows;  // that `several` takes
};
template <class T, int vectors = 1>
JITGEN_INLINE SmallSums<T> small_sums_of(int64_t wanted) {
  if constexpr (vectors * (32 / sizeof(T)) < small_columns) {
    if (wanted > vectors) return small_sums_of<T, vectors + 1>(wanted);
  }
  constexpr int rows = vectors <= 3 ? most_rows_at_once : vectors == 4 ? 3 : vectors <= 6 ? 2 : 1;
  return {small_sums<vectors, 1, T>, small_sums<vectors, rows, T>, rows};
}

template <class Accumulator, class X, class Region, class Storage, Along along>
bool small_product(const X& x, int64_t m, int64_t k, const Region& region, const Dense<Storage, along>& weight) {
  constexpr int64_t lanes = 32 / sizeof(Accumulator);
  alignas(64) Accumulator panel[small_depth * small_columns], sums[most_rows_at_once * small_columns];
  alignas(64) Accumulator rows[most_rows_at_once * small_depth];
  const int64_t columns = region.columns(), vectors = (columns + lanes - 1) / lanes, width = vectors * lanes;
  const SmallSums<Accumulator> sums_of = small_sums_of<Accumulator>(vectors);
  // The longer of its dimensions is the inner loop.
  const int64_t stride_n = along == Along::n ? 1 : weight.stride_n, stride_k = along == Along::k ? 1 : weight.stride_k;
  if (columns < width) __builtin_memset(panel, 0, k * width * sizeof(Accumulator));
  if (along != Along::n || k > columns) {
    for (int64_t n = 0; n < columns; ++n) {
      const Storage* const from = weight.data + n * stride_n;
      for (int64_t i = 0; i < k; ++i) panel[i * width + n] = Accumulator(load(from[i * stride_k]));
    }
  } else {
    for (int64_t i = 0; i < k; ++i) {
      const Storage* const from = weight.data + i * stride_k;
#pragma omp simd
      for (int64_t n = 0; n < columns; ++n) panel[i * width + n] = Accumulator(load(from[n * stride_n]));
    }
  }
  for (int64_t first = 0; first < m;) {
    const int64_t count = m - first < sums_of.rows ? 1 : sums_of.rows;
    for (int64_t r = 0; r < count; ++r) {
      if constexpr (same<typename X::Storage, Accumulator>) {
        x.fill(first + r, 0, k, rows + r * small_depth);
      } else {
        alignas(64) typename X::Storage row[small_depth];
        x.fill(first + r, 0, k, row);
#pragma omp simd
        for (int64_t i = 0; i < k; ++i) rows[r * small_depth + i] = Accumulator(load(row[i]));
      }
    }
    (count == 1 ? sums_of.one : sums_of.several)(rows, panel, k, sums);
    for (int64_t r = 0; r < count; ++r) region.epilogue(first + r, 0, columns, sums + r * width, 0);
    first += count;
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
