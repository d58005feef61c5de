// Multiplies a tile: some rows of x with one block of 16 rows of weights.
#pragma once

#include "jitgen/gemm_weights.hpp"

namespace jitgen {
namespace gemm {

// Takes the place of scales for weights without scales.
struct Unscaled {};

namespace detail {

// A vector of sums as they are added up to `Compute::Accumulator`s.
JITGEN_INLINE Floats as_total(Floats sum, float) { return sum; }
JITGEN_INLINE Doubles as_total(Doubles sum, double) { return sum; }
JITGEN_INLINE Ints as_total(Ints sum, int32_t) { return sum; }
JITGEN_INLINE Longs as_total(Longs sum, int64_t) { return sum; }
JITGEN_INLINE Floats as_total(Ints sum, float) { return __builtin_convertvector(sum, Floats); }

// Multiplies `units` units of a block's weights by `rows` rows of x and adds the products to `c`, or writes them there
// if `first`. Few rows have several accumulators each, so that consecutive additions do not depend on each other.
template <class Compute, class Decoder, class Scale, int rows>
__attribute__((noinline)) void tile(const char* w, const typename Compute::Element* x, int64_t units,
                                    int64_t units_per_group, const Scale* scales, const typename Decoder::Zero* zeros,
                                    typename Compute::Accumulator* c, int64_t row_stride, bool first) {
  using Vector = typename Compute::Vector;
  using Total = decltype(as_total(Vector{}, *c));
  constexpr int as_rows = summed_as<Compute, rows>(0);
  using Decode = typename Decoder::template type<as_rows>;
  constexpr int vectors = Compute::vectors;
  constexpr int elements = Decoder::elements;
  constexpr bool scaled = !same<Scale, Unscaled>;
  constexpr int wanted = as_rows <= 3 ? 4 : as_rows <= 5 ? 2 : 1;
  constexpr int ways = Decode::steps % wanted == 0 && as_rows * wanted <= Compute::most_rows ? wanted : 1;
  Decode decode;
  for (int64_t done = 0; done < units; done += units_per_group) {
    Vector acc[rows][ways][vectors], sums_of_x[rows][ways];
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
      for (int way = 0; way < ways; ++way) {
        if constexpr (Decode::corrected) sums_of_x[m][way] = Vector{};
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) acc[m][way][v] = Vector{};
      }
    }
    decode.group(zeros);
    const int64_t here = units - done < units_per_group ? units - done : units_per_group;
    for (int64_t unit = 0; unit < here; ++unit) {
      if (!same<Decoder, Panel<Compute>>) __builtin_prefetch(w + ahead, 0, 2);
      decode.open(w);
#pragma GCC unroll 32
      for (int step = 0; step < Decode::steps; ++step) {
        typename Compute::Weights weights[vectors];
        decode.take(step, weights);
        const typename Compute::Element* const at = x + Decode::element(step) * rows;
#pragma GCC unroll 24
        for (int m = 0; m < rows; ++m) accumulate_block(acc[m][step % ways], weights, at + m);
        if constexpr (Decode::corrected) {
          const Words ones = splat(0x3f803f80u);
#pragma GCC unroll 2
          for (int m = 0; m < rows; ++m) accumulate(sums_of_x[m][step % ways], ones, splat(at[m]));
        }
      }
      w += Decode::bytes;
      x += elements * rows;
    }
    Total scale[vectors];
    if constexpr (scaled) {
      for (int v = 0; v < vectors; ++v) widen(scales + v * (block_rows / vectors), scale[v]);
      scales += block_rows;
      zeros += block_rows;
    }
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        Vector sum = acc[m][0][v];
        if constexpr (ways == 2) sum += acc[m][1][v];
        if constexpr (ways == 4) sum = (sum + acc[m][1][v]) + (acc[m][2][v] + acc[m][3][v]);
        if constexpr (Decode::corrected) {
          static_assert(ways == 4 && vectors == 1);
          const Vector* const all = sums_of_x[m];
          accumulate(sum, -decode.zero, (all[0] + all[1]) + (all[2] + all[3]));
        }
        auto* const to = c + m * row_stride + v * (block_rows / vectors);
        Total total = first ? Total{} : load_vector<Total>(to);
        if constexpr (scaled) {
          accumulate(total, scale[v], as_total(sum, *c));
        } else {
          total += as_total(sum, *c);
        }
        store_vector(to, total);
      }
    }
    first = false;
  }
}

template <class Compute, class Decoder, class Scale>
struct Tiles {
  using Tile = decltype(&tile<Compute, Decoder, Scale, 1>);
  template <int rows = Compute::tile_rows>
  JITGEN_INLINE Tile of(int64_t count) {
    if constexpr (rows > Compute::fewest_rows) {
      if (count < rows) return of<rows - 1>(count);
    }
    return tile<Compute, Decoder, Scale, rows>;
  }
};

}  // namespace detail

}  // namespace gemm
}  // namespace jitgen
