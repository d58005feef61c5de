// Packs dense weights of any strides into panels: the 16 rows of a block are interleaved, as a tile reads them (Goto and
// van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#pragma once

#include "jitgen/gemm_integers.hpp"

namespace jitgen {
namespace gemm {
namespace detail {

// One packed element: as many neighbours in k as an element has, `live` of which exist.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Element element_of(const Storage* w, int64_t stride_k, int64_t live) {
  if constexpr (Compute::per_element == 1) {
    return static_cast<typename Compute::Element>(jitgen::load(*w));
  } else {
    return Compute::joined(w, stride_k, live);
  }
}

// A vector of elements of one row, contiguous along k.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Weights elements_at(const Storage* w) {
  if constexpr (Compute::per_element == 1) {
    typename Compute::Weights elements;
    widen(w, elements);
    return elements;
  } else {
    return Compute::along(w);
  }
}

// A vector of elements of neighbouring rows, contiguous along the rows.
template <class Compute, class Storage>
JITGEN_INLINE typename Compute::Weights rows_at(const Storage* w, int64_t stride_k, int64_t live) {
  if constexpr (Compute::per_element == 1) {
    typename Compute::Weights elements;
    widen(w, elements);
    return elements;
  } else {
    return Compute::across(w, stride_k, live);
  }
}

}  // namespace detail

// Packs `rows` (up to 16) rows of `count` neighbours in k to `elements` elements of 16 rows; the rest is zero.
template <class Compute, bool along_k, class Storage>
void pack_block(const Storage* w, int64_t stride_n, int64_t stride_k, int64_t rows, int64_t count, int64_t elements,
                typename Compute::Element* to) {
  using Element = typename Compute::Element;
  using Vector = Select<sizeof(Element) == 4, Floats, Doubles>;
  constexpr int per = Compute::per_element;
  constexpr int lanes = vector_bytes / sizeof(Element);
  int64_t e = 0;
  if constexpr (along_k) {
    for (; rows == block_rows && (e + lanes) * per <= count; e += lanes) {
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
  }
  for (; e < elements; ++e) {
    const int64_t live = count - e * per;
    for (int64_t r = 0; r < block_rows; ++r) {
      const Storage* from = w + r * stride_n + e * per * stride_k;
      to[e * block_rows + r] = r < rows && live > 0 ? detail::element_of<Compute>(from, stride_k, live) : Element(0);
    }
  }
}

// The same for `blocks` whole blocks of contiguous rows: each k is read across all of them.
template <class Compute, class Storage>
void pack_blocks(const Storage* w, int64_t stride_k, int64_t blocks, int64_t count, int64_t elements,
                 typename Compute::Element* to) {
  using Weights = typename Compute::Weights;
  constexpr int per = Compute::per_element, lanes = vector_bytes / sizeof(typename Compute::Element);
  for (int64_t e = 0; e < elements; ++e) {
    const Storage* from = w + e * per * stride_k;
    const int64_t live = count - e * per;
    for (int i = 0; i < per; ++i) {
      for (int64_t n = 0; n < blocks * block_rows; n += 64 / sizeof(Storage)) {
        __builtin_prefetch(from + (24 * per + i) * stride_k + n);
      }
    }
    for (int64_t n = 0; n < blocks * block_rows; n += lanes) {
      const Weights weights = live > 0 ? detail::rows_at<Compute>(from + n, stride_k, live) : Weights{};
      store_vector(to + (n / block_rows * elements + e) * block_rows + n % block_rows, weights);
    }
  }
}

// -------------------------------------------------------------------------------------------------- few rows of x
//
// Packing weights takes longer than multiplying them by a few rows of x. So weights that are contiguous along k are
// multiplied by a row of x directly; of weights that are contiguous along n, a few k's at a time are added to the sums
// of many columns.

namespace detail {

// Adds up the lanes of each vector: a lane of sums[0] is the sum of the vector of its number, in the order of a tree.
template <class Vector, int lanes>
JITGEN_INLINE void add_lanes(Vector (&sums)[lanes]) {
  using Moved = Select<sizeof(sums[0][0]) == 4, Floats, Doubles>;
  Moved square[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) square[i] = (Moved)sums[i];
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) sums[i] = (Vector)square[i];
#pragma GCC unroll 4
  for (int half = lanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
}

}  // namespace detail

// The sums of `rows` (up to 16) rows of weights, contiguous along k, with one row of x of `count` neighbours in k.
// Up to sixteen sums are written.
template <class Compute, class Storage>
void dot_block(const Storage* w, int64_t stride_n, int64_t rows, int64_t count, const typename Compute::Element* x,
               typename Compute::Accumulator* to) {
  using Element = typename Compute::Element;
  using Weights = typename Compute::Weights;
  using Vector = typename Compute::Vector;
  using OfX = decltype(splat(*x));
  constexpr int per = Compute::per_element, lanes = vector_bytes / sizeof(Element);
  constexpr int sums = vector_bytes / sizeof(typename Compute::Accumulator), together = sums < 4 ? sums : 4;
  // Elements to what is fetched: the same place of the next rows where rows are short, for which it is in no other page.
  const int64_t ahead = count * int64_t(sizeof(Storage)) <= 8192 ? together * stride_n : 2048 / int64_t(sizeof(Storage));
  for (int64_t begin = 0; begin < rows; begin += sums) {
    Vector of_rows[sums] = {};
    for (int64_t first = begin; first < rows && first < begin + sums; first += together) {
      const Storage* from[together];
      Vector acc[together] = {};
      // Beyond the last row the last one is read again; these sums are not used.
      for (int r = 0; r < together; ++r) from[r] = w + (first + r < rows ? first + r : rows - 1) * stride_n;
      int64_t e = 0;
      for (; (e + lanes) * per <= count; e += lanes) {
        const auto of_x = load_vector<OfX>(x + e);
#pragma GCC unroll 4
        for (int r = 0; r < together; ++r) {
          __builtin_prefetch(from[r] + e * per + ahead, 0, 2);
          accumulate(acc[r], detail::elements_at<Compute>(from[r] + e * per), of_x);
        }
      }
      if (e * per < count) {
        alignas(64) Element tail[together + 1][lanes] = {};
        for (int64_t i = 0; (e + i) * per < count; ++i) {
          tail[together][i] = x[e + i];
          for (int r = 0; r < together; ++r) {
            tail[r][i] = detail::element_of<Compute>(from[r] + (e + i) * per, 1, count - (e + i) * per);
          }
        }
        for (int r = 0; r < together; ++r) {
          accumulate(acc[r], load_vector<Weights>(tail[r]), load_vector<OfX>(tail[together]));
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < together; ++r) of_rows[first - begin + r] = acc[r];
    }
    detail::add_lanes(of_rows);
    store_vector(to + begin, of_rows[0]);
  }
}

namespace detail {

// Adds `steps` elements along k of `columns` contiguous rows of weights to the sums of `rows` rows of x, out of
// `x_rows` that are packed in one tile. Columns are whole vectors or, with `part`, one incomplete vector.
template <class Compute, int rows, int steps, bool part, class Storage>
JITGEN_INLINE void add_columns(const Storage* w, int64_t stride_k, int64_t columns, int64_t live,
                               const typename Compute::Element* x, int64_t x_rows, typename Compute::Accumulator* to,
                               int64_t row_stride, bool first) {
  using Vector = typename Compute::Vector;
  constexpr int per = Compute::per_element, lanes = vector_bytes / sizeof(typename Compute::Element);
  for (int64_t n = 0; n < columns; n += lanes) {
    Vector acc[rows];
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) acc[m] = first ? Vector{} : load_vector<Vector>(to + m * row_stride + n);
#pragma GCC unroll 8
    for (int step = 0; step < steps; ++step) {
      const Storage* from = w + step * per * stride_k + n;
      typename Compute::Weights weights;
      if constexpr (part) {
        alignas(64) Storage copy[per][lanes] = {};
        __builtin_memcpy(copy[0], from, columns * sizeof(Storage));
        for (int64_t i = 1; i < per && i < live; ++i) {
          __builtin_memcpy(copy[i], from + i * stride_k, columns * sizeof(Storage));
        }
        weights = rows_at<Compute>(copy[0], lanes, live);
      } else {
        weights = rows_at<Compute>(from, stride_k, live);
      }
#pragma GCC unroll 4
      for (int m = 0; m < rows; ++m) accumulate_one(acc[m], weights, x + step * x_rows + m);
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) store_vector(to + m * row_stride + n, acc[m]);
  }
}

// The same for all rows of x, `rows` of them at a time as long as so many remain.
template <class Compute, int steps, bool part, int rows, class Storage>
void add_rows(const Storage* w, int64_t stride_k, int64_t columns, int64_t live, const typename Compute::Element* x,
              int64_t x_rows, int64_t m, typename Compute::Accumulator* to, int64_t row_stride, bool first) {
  for (; m + rows <= x_rows; m += rows) {
    add_columns<Compute, rows, steps, part>(w, stride_k, columns, live, x + m, x_rows, to + m * row_stride, row_stride,
                                            first);
  }
  if constexpr (rows > 1) {
    add_rows<Compute, steps, part, rows / 2>(w, stride_k, columns, live, x, x_rows, m, to, row_stride, first);
  }
}

}  // namespace detail

// The sums of `columns` contiguous rows of weights with one tile of x, of `x_rows` rows and `count` neighbours in k.
// Sums are written as whole vectors.
template <class Compute, class Storage>
void add_block(const Storage* w, int64_t stride_k, int64_t columns, int64_t count, const typename Compute::Element* x,
               int64_t x_rows, typename Compute::Accumulator* to, int64_t row_stride) {
  constexpr int per = Compute::per_element, lanes = vector_bytes / sizeof(typename Compute::Element), together = 8;
  constexpr int rows = Compute::tile_rows >= 4 ? 4 : 1;
  const int64_t whole = columns / lanes * lanes;
  int64_t e = 0;
  for (; (e + together) * per <= count; e += together) {
    detail::add_rows<Compute, together, false, rows>(w + e * per * stride_k, stride_k, whole, per, x + e * x_rows,
                                                     x_rows, 0, to, row_stride, e == 0);
  }
  for (; e * per < count; ++e) {
    detail::add_rows<Compute, 1, false, 1>(w + e * per * stride_k, stride_k, whole, count - e * per, x + e * x_rows,
                                           x_rows, 0, to, row_stride, e == 0);
  }
  if (whole == columns) return;
  for (e = 0; e * per < count; ++e) {
    detail::add_rows<Compute, 1, true, 1>(w + e * per * stride_k + whole, stride_k, columns - whole, count - e * per,
                                          x + e * x_rows, x_rows, 0, to + whole, row_stride, e == 0);
  }
}

}  // namespace gemm
}  // namespace jitgen
