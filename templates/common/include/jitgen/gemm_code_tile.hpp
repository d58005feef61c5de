// A tile of quantised activations: signed bytes of x times the unsigned codes of a block of weights, as they are stored.
//
// Nothing is decoded but nibbles to bytes. What codes are above their values, 128, 8 or a zero-point, is taken off the
// sum of a span of k's, times the sum of x there, which packing has counted. Sums of a span are exact, and thus the same
// by all of these:
//
//   CodeBytes<bits, zeroed, Ints>     four products to a lane (VPDPBUSD), where the processor has that
//   CodeBytes<4, zeroed, Halves>      two to a half of a lane (VPMADDUBSW): 16 of nibbles and bytes fit its 16 bits
//   CodeBytes<8, zeroed, Halves>      two to a half, which go to the lane at once (VPMADDWD). Two products fit 16 bits if
//                                     both numbers of x are 128 at most together. Packing halves an element whose
//                                     numbers are not (1 or 2 in 100 of a normal distribution that is scaled by its
//                                     largest of 4096), and the tile adds the other half's products afterwards.
//
// Codes in bit planes have `PlaneBytes` of gemm_planes.hpp. What an arithmetic of codes has, besides what all have:
//   steps                      elements of x for a unit of codes: four neighbours in k each
//   codes<step>(unit, v)       the codes that meet element `step`, of vector `v` of a block's rows
//   offset, zeroed             what codes are above their values; 1 where that is a zero-point
//   units_together             units whose products fit the sums, where these are of 16 bits; 0 for any number
//   halves_x, distance         whether packing halves elements of x, and how far apart the two are that are added first
#pragma once

#include "jitgen/gemm_integers.hpp"

namespace jitgen {
namespace gemm {

// What these have in common: the elements of x are four neighbours each, and codes without zero-points are `above` more
// than their values.
template <int bits, bool zeroed_, int above, class ElementType, class Sums>
struct UnsignedCodes {
  using Element = ElementType;
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
  static constexpr int offset = zeroed ? 1 : above;

  JITGEN_INLINE Element of_x(const int8_t* x, int64_t e) {
    uint32_t four;
    __builtin_memcpy(&four, x + 4 * e, sizeof(four));
    return Element(four);
  }
};

template <int bits, bool zeroed, class Sums, bool halved = bits == 8 && same<Sums, Halves>>
struct CodeBytes
    : UnsignedCodes<bits, zeroed, 1 << (bits - 1), Select<halved, SmallByteQuad, SignedByteQuad>,
                    Select<halved, Ints, Sums>> {
  using Element = typename CodeBytes::UnsignedCodes::Element;
  static constexpr bool halves_x = halved;
  static constexpr int steps = 8 / bits;
  static constexpr int64_t unit_bytes = 64;
  static constexpr int64_t units_together = bits == 4 && same<Sums, Halves> ? 4 : 0;  // 16 products in a half
  static constexpr int distance = 2;

  template <int step>
  JITGEN_INLINE Octets codes(const char* unit, int v) {
    const Words raw = load_vector<Words>(unit + v * vector_bytes);
    return (Octets)(steps == 1 ? raw : raw >> (4 * step) & 0x0f0f0f0fu);
  }

  // Neighbours in the order in which the layout "cpu" has the bytes of a word, or the nibbles of two.
  JITGEN_INLINE Element of_x(const int8_t* x, int64_t e) {
    if constexpr (bits == 8) {
      const uint32_t four = uint32_t(CodeBytes::UnsignedCodes::of_x(x, e));
      return Element((four & 0xff0000ffu) | (four & 0xff00u) << 8 | (four >> 8 & 0xff00u));
    } else {
      const int8_t* const from = x + 8 * (e / 2) + 2 * (e % 2);
      return Element(uint32_t(uint8_t(from[0])) | uint32_t(uint8_t(from[4])) << 8 | uint32_t(uint8_t(from[1])) << 16 |
                     uint32_t(uint8_t(from[5])) << 24);
    }
  }
};

#if !defined(JITGEN_AVX512) && !defined(JITGEN_AVX2)
template <bool zeroed>
struct CodeBytes<8, zeroed, Halves> : Scaled<Shorts> {};
#endif

// What packing leaves of an element of x that it has halved.
template <class Element>
struct Rest {
  uint16_t element;  // its number in its span
  uint16_t row;      // of the tile
  Element bytes;
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

template <class Compute>
constexpr decltype(+Compute::halves_x) halves_x(int) {
  return Compute::halves_x;
}
template <class Compute>
constexpr bool halves_x(long) {
  return false;
}

// Adds sums to `to`, or writes them there if `first`.
JITGEN_INLINE void add_whole(Ints& to, Ints sums, bool) { to = sums; }  // which are all
JITGEN_INLINE void add_whole(Ints& to, Halves sums, bool first) {
  if (first) to = Ints{};
  accumulate(to, sums, (Halves)splat(0x00010001u));
}

// What packing knows of a span of a tile's x. The next span's are `stride` on, for each element of a span in `rests`.
template <class Element>
struct SpanFacts {
  const int32_t* totals;       // of each row the sum of x, times the offset of codes
  const int32_t* rest_counts;  // where elements are halved, how many
  const Rest<Element>* rests;
  int64_t stride;
};

// Codes that are prefetched: at every unit those at `from`, which is then `step` bytes on.
struct Prefetched {
  const char* from;
  int64_t step;
};

// Accumulators of a row's sums in a vector, to which products are added in turn: of few rows as many as hide the four or
// five cycles that VPDPBUSD takes. Short spans of several rows overlap without. Sums of integers are the same in any
// order.
template <class Compute, int64_t span, int rows>
constexpr int accumulators_of_codes() {
  constexpr int chains = rows * Compute::vectors;
  if (!same<typename Compute::Vector, Ints> || halves_x<Compute>(0)) return 1;
  if (chains > 1 && span * Compute::steps <= 8) return 1;
  return chains <= 2 ? 4 : chains <= 4 ? 2 : 1;
}

// Adds the products of the elements of a unit of codes from `step` on, the first one's to accumulator `first`.
template <class Compute, int ways, int rows, int step = 0>
JITGEN_INLINE void add_elements(typename Compute::Vector (&acc)[ways][rows][Compute::vectors], const char* w,
                                const typename Compute::Element* x, int first) {
  Octets codes[Compute::vectors];
  for (int v = 0; v < Compute::vectors; ++v) codes[v] = Compute::template codes<step>(w, v);
#pragma GCC unroll 24
  for (int m = 0; m < rows; ++m) accumulate_block(acc[(first + step) % ways][m], codes, x + step * rows + m);
  if constexpr (step + 1 < Compute::steps) add_elements<Compute, ways, rows, step + 1>(acc, w, x, first);
}

// Adds the products of `units` units of codes and of rows of x, and advances both.
template <class Compute, int ways, int rows>
JITGEN_INLINE void add_units(typename Compute::Vector (&acc)[ways][rows][Compute::vectors], const char*& w,
                             const typename Compute::Element*& x, int64_t units, Prefetched& next) {
  constexpr int at_once = ways > Compute::steps ? ways / Compute::steps : 1;
  const auto add = [&](int first) __attribute__((always_inline)) {
    for (int64_t line = 0; line < Compute::unit_bytes; line += 64) __builtin_prefetch(next.from + line, 0, 2);
    next.from += next.step;
    add_elements<Compute>(acc, w, x, first);
    w += Compute::unit_bytes;
    x += Compute::steps * rows;
  };
  int64_t unit = 0;
  if constexpr (at_once > 1) {
    for (; unit + at_once <= units; unit += at_once) {
#pragma GCC unroll 4
      for (int number = 0; number < at_once; ++number) add(number * Compute::steps);
    }
  }
  for (; unit < units; ++unit) add(0);
}

// Multiplies `units` units of codes by `rows` rows of x and adds the scaled products to `c`, or writes them
// there if `first`. A span is `span` units, and a scale and a zero-point are for `units_per_scale`, a multiple of that,
// or for all of them (0).
template <class Compute, int64_t span, class Scale, int rows>
__attribute__((noinline)) void code_tile(const char* w, const typename Compute::Element* x, int64_t units,
                                         int64_t units_per_scale, const Scale* scales, const uint8_t* zeros,
                                         SpanFacts<typename Compute::Element> facts, float* c, int64_t row_stride,
                                         bool first, Prefetched next) {
  constexpr int vectors = Compute::vectors, ways = accumulators_of_codes<Compute, span, rows>();
  constexpr int64_t units_at_once = Compute::units_together != 0 ? Compute::units_together : span;
  for (int m = 0; first && m < rows; ++m) __builtin_memset(c + m * row_stride, 0, block_rows * sizeof(*c));
  for (int64_t done = 0; done < units; done += span) {
    const int64_t here = units - done < span ? units - done : span;
    [[maybe_unused]] const char* const span_codes = w;
    Ints sums[rows][vectors];
    for (int64_t unit = 0; unit < here || unit == 0; unit += units_at_once) {
      typename Compute::Vector acc[ways][rows][vectors];
#pragma GCC unroll 4
      for (auto& sums_of_rows : acc) {
#pragma GCC unroll 24
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v) sums_of_rows[m][v] = typename Compute::Vector{};
        }
      }
      add_units<Compute>(acc, w, x, here - unit < units_at_once ? here - unit : units_at_once, next);
#pragma GCC unroll 24
      for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
          for (int way = 1; way < ways; ++way) acc[0][m][v] += acc[way][m][v];
          add_whole(sums[m][v], acc[0][m][v], unit == 0);
        }
      }
    }
    if constexpr (halves_x<Compute>(0)) {
      const auto* rest = facts.rests;
      for (const auto* const end = rest + *facts.rest_counts; rest < end; ++rest) {
        Octets codes[vectors];
        for (int v = 0; v < vectors; ++v) {
          codes[v] = load_vector<Octets>(span_codes + rest->element * 64 + v * vector_bytes);
        }
        accumulate_block(sums[rest->row], codes, &rest->bytes);
      }
      facts.rest_counts += facts.stride;
      facts.rests += facts.stride * span;
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
      const Ints total_of_x = splat(facts.totals[m]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Ints sum = sums[m][v] - (Compute::zeroed ? zero[v] * total_of_x : total_of_x);
        float* const to = c + m * row_stride + v * float_lanes;
        Floats total = load_vector<Floats>(to);
        accumulate(total, scale[v], __builtin_convertvector(sum, Floats));
        store_vector(to, total);
      }
    }
    facts.totals += facts.stride;
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
