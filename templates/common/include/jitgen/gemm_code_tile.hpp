// A tile of quantised activations: signed bytes of x times the unsigned codes of a block of weights, as they are stored.
//
// Nothing is decoded but nibbles to bytes. What codes are above their values, 128, 8 or a zero-point, is taken off the
// sum of a span of k's, times the sum of x there, which packing has counted. Sums of a span are exact:
//
//   CodeBytes<bits, zeroed, Ints>     four products to a lane (VPDPBUSD), where the processor has that
//   CodeBytes<4, zeroed, Halves>      two to a half of a lane (VPMADDUBSW): 16 of nibbles and bytes fit its 16 bits
#pragma once

#include "jitgen/gemm_integers.hpp"

namespace jitgen {
namespace gemm {

template <int bits, bool zeroed_, class Sums>
struct CodeBytes {
  using Element = SignedByteQuad;
  using Accumulator = float;
  using Vector = Sums;
  using Weights = Octets;
  static constexpr int code_bits = bits;
  static constexpr bool zeroed = zeroed_;
  static constexpr int per_element = 4;
  static constexpr int vectors = block_rows / float_lanes;
  static constexpr int most_rows = vectors == 1 ? 24 : vectors == 2 ? 6 : 2;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
  // What codes without zero-points are above their values.
  static constexpr int offset = zeroed ? 1 : bits == 8 ? 128 : 8;

  // Neighbours in the order in which the layout "cpu" has the bytes of a word, or the nibbles of two.
  JITGEN_INLINE Element of_x(const int8_t* x, int64_t e) {
    const int8_t* const from = bits == 8 ? x + 4 * e : x + 8 * (e / 2) + 2 * (e % 2);
    constexpr int second = bits == 8 ? 2 : 4;
    return Element(uint32_t(uint8_t(from[0])) | uint32_t(uint8_t(from[second])) << 8 | uint32_t(uint8_t(from[1])) << 16 |
                   uint32_t(uint8_t(from[second + 1])) << 24);
  }
};

namespace detail {

template <class Compute>
constexpr decltype(Compute::code_bits == 0) reads_codes(int) {
  return true;
}
template <class Compute>
constexpr bool reads_codes(long) {
  return false;
}

JITGEN_INLINE Ints whole(Ints sums) { return sums; }
JITGEN_INLINE Ints whole(Halves sums) {
  Ints both = {};
  accumulate(both, sums, (Halves)splat(0x00010001u));
  return both;
}

// Multiplies `units` units of 64 bytes of codes by `rows` rows of x and adds the scaled products to `c`, or writes them
// there if `first`. A span is `span` units, and a scale and a zero-point are for `units_per_scale`, a multiple of that,
// or for all of them (0). `totals` has the sums of x of each row in a span, times the offset of codes; those of the next
// span are `totals_stride` on.
template <class Compute, int64_t span, class Scale, int rows>
__attribute__((noinline)) void code_tile(const char* w, const SignedByteQuad* x, int64_t units, int64_t units_per_scale,
                                         const Scale* scales, const uint8_t* zeros, const int32_t* totals,
                                         int64_t totals_stride, float* c, int64_t row_stride, bool first) {
  constexpr int vectors = Compute::vectors, steps = 8 / Compute::code_bits;
  for (int m = 0; first && m < rows; ++m) __builtin_memset(c + m * row_stride, 0, block_rows * sizeof(*c));
  for (int64_t done = 0; done < units; done += span) {
    typename Compute::Vector acc[rows][vectors];
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) acc[m][v] = typename Compute::Vector{};
    }
    const int64_t here = units - done < span ? units - done : span;
    for (int64_t unit = 0; unit < here; ++unit) {
      __builtin_prefetch(w + ahead, 0, 2);
#pragma GCC unroll 2
      for (int step = 0; step < steps; ++step) {
        Octets codes[vectors];
        for (int v = 0; v < vectors; ++v) {
          const Words raw = load_vector<Words>(w + v * vector_bytes);
          codes[v] = (Octets)(steps == 1 ? raw : raw >> (4 * step) & 0x0f0f0f0fu);
        }
#pragma GCC unroll 24
        for (int m = 0; m < rows; ++m) accumulate_block(acc[m], codes, x + step * rows + m);
      }
      w += 64;
      x += steps * rows;
    }
    Floats scale[vectors];
    Ints zero[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      widen(scales + v * float_lanes, scale[v]);
      if constexpr (Compute::zeroed) zero[v] = (Ints)widen_bytes(zeros + v * float_lanes);
    }
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
      const Ints total_of_x = splat(totals[m]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Ints sum = whole(acc[m][v]) - (Compute::zeroed ? zero[v] * total_of_x : total_of_x);
        float* const to = c + m * row_stride + v * float_lanes;
        Floats total = load_vector<Floats>(to);
        accumulate(total, scale[v], __builtin_convertvector(sum, Floats));
        store_vector(to, total);
      }
    }
    totals += totals_stride;
    if (units_per_scale != 0 && (done + span) % units_per_scale == 0) scales += block_rows, zeros += block_rows;
  }
}

template <class Compute, int64_t span, class Scale>
struct CodeTiles {
  using Tile = decltype(&code_tile<Compute, span, Scale, 1>);
  template <int rows = Compute::tile_rows>
  JITGEN_INLINE Tile of(int64_t count) {
    if constexpr (rows > Compute::fewest_rows) {
      if (count < rows) return of<rows - 1>(count);
    }
    return code_tile<Compute, span, Scale, rows>;
  }
};

}  // namespace detail

}  // namespace gemm
}  // namespace jitgen
