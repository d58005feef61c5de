// Decoders of weights in bit planes (jitgen/quant/layouts/planes.py), for all formats without kernels of their own.
//
// A plane has 1, 2, 4 or 8 bits of every code. A unit is the k's of which a word of the narrowest plane has its bits; for
// each word a block has 16 rows. Codes become numbers that are exact in float: whole numbers, small floats, or the
// entries of a table. The reference is Format.values in jitgen/quant/formats.py, and the tests compare every code.
#pragma once

#include "jitgen/gemm_operands.hpp"

namespace jitgen {
namespace gemm {

// ---------------------------------------------------------------------------------------------------- kinds of scales

// A power of two: the byte is its exponent plus 127. The smallest one is subnormal.
struct E8m0 {
  uint8_t bits;
};
// A float of 8 bits, finite.
struct E4m3 {
  uint8_t bits;
};

JITGEN_INLINE Floats lesser(Floats a, Floats b) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  Floats least;
  asm("vminps %2, %1, %0" : "=v"(least) : "v"(a), "v"(b));
  return least;
#else
  const Words mask = (Words)(a < b);
  return (Floats)(((Words)a & mask) | ((Words)b & ~mask));
#endif
}

// Byte `j` of each word, shifted to bit `to` under `mask`.
JITGEN_INLINE Words byte_of(Words bytes, int j, int to, uint32_t mask) {
  const int shift = 8 * j - to;
  return (shift >= 0 ? bytes >> shift : bytes << -shift) & (mask << to);
}

// A sign, `exponent` bits of the given bias and `mantissa` bits in byte `j`, as floats. The bits are read as if there
// were no subnormals. With N so read and least = 2^(1 - bias), the smallest normal number, a subnormal is 2N - least,
// which is below N, and any other number is N, which is not above it. No operand is a subnormal float.
template <int exponent, int mantissa, int bias>
JITGEN_INLINE Floats small_float(Words bytes, int j) {
  constexpr int magnitude_bits = exponent + mantissa;
  constexpr float least = bias == 0 ? 2.0f : 1.0f / (1 << (bias - 1));
  const Words fields = byte_of(bytes, j, 23 - mantissa, (1u << magnitude_bits) - 1);
  const Floats number = (Floats)(fields + (uint32_t(127 - bias) << 23));
  const Floats value = lesser(number, number + number - least);
  const Words sign = byte_of(bytes, j, 31 - magnitude_bits, 1u << magnitude_bits);
  return (Floats)((Words)value | sign);
}

using jitgen::widen;  // of floats, which the overloads here would hide
JITGEN_INLINE void widen(const E8m0* from, Floats& to) {
  const Words bits = widen_bytes(&from->bits);
  to = (Floats)(bits << 23 | ((Words)(bits == 0) & 0x00400000u));
}
JITGEN_INLINE void widen(const E4m3* from, Floats& to) { to = small_float<4, 3, 7>(widen_bytes(&from->bits), 0); }
template <class Bytes>
JITGEN_INLINE void widen_by_floats(const Bytes* from, Doubles& to) {
  Bytes buffer[float_lanes] = {};
  for (int lane = 0; lane < double_lanes; ++lane) buffer[lane] = from[lane];
  Floats floats;
  widen(buffer, floats);
  for (int lane = 0; lane < double_lanes; ++lane) to[lane] = floats[lane];
}
JITGEN_INLINE void widen(const E8m0* from, Doubles& to) { widen_by_floats(from, to); }
JITGEN_INLINE void widen(const E4m3* from, Doubles& to) { widen_by_floats(from, to); }
JITGEN_INLINE void widen(const uint8_t* from, Floats& to) {
  to = detail::small_to_float(widen_bytes(from), splat(detail::magic_value));
}
JITGEN_INLINE void widen(const uint8_t* from, Doubles& to) {
  for (int lane = 0; lane < double_lanes; ++lane) to[lane] = from[lane];
}

// ------------------------------------------------------------------------------------------- kinds of codes, as floats

// A kind of codes has two functions. `prepared` does what is done once for the four codes in the bytes of a word;
// `value` makes floats of byte `j`.

// Whole numbers, `step` apart; the number of an unsigned code is `step * code + low`.
template <int step, int low>
struct IntegerCodes {
  JITGEN_INLINE Words prepared(Words bytes) { return step == 1 ? bytes : bytes << (step / 2); }
  JITGEN_INLINE Floats value(Words bytes, int j) {
    static_assert(step == 1 || step == 2, "");
    return detail::small_to_float(byte_of(bytes, j, 0, 255u), splat(detail::magic_value - low));
  }
};

template <int exponent, int mantissa, int bias>
struct FloatCodes {
  JITGEN_INLINE Words prepared(Words bytes) { return bytes; }
  JITGEN_INLINE Floats value(Words bytes, int j) { return small_float<exponent, mantissa, bias>(bytes, j); }
};

// Four-bit codes of numbers that are whole numbers of halves, given as twice the numbers plus 128. They are looked up as
// bytes; in the float 2^22 the lowest bit counts halves.
template <uint8_t... bytes_>
struct HalfCodes {
  static_assert(sizeof...(bytes_) == 16, "");
  JITGEN_INLINE Words prepared(Words bytes) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
    typedef uint8_t Table __attribute__((vector_size(16)));
    const Table table = {bytes_...};
    Words all, entries;
#if defined(JITGEN_AVX512)
    asm("vbroadcasti32x4 %1, %0" : "=v"(all) : "m"(table));
#else
    asm("vbroadcasti128 %1, %0" : "=x"(all) : "m"(table));
#endif
    asm("vpshufb %2, %1, %0" : "=v"(entries) : "v"(all), "v"(bytes));
    return entries;
#else
    static constexpr uint8_t table[16] = {bytes_...};
    Words entries;
    for (int lane = 0; lane < float_lanes; ++lane) {
      const uint32_t four = bytes[lane];
      entries[lane] = table[four & 15] | table[four >> 8 & 15] << 8 | table[four >> 16 & 15] << 16 |
                    uint32_t(table[four >> 24]) << 24;
    }
    return entries;
#endif
  }
  JITGEN_INLINE Floats value(Words bytes, int j) {
    constexpr uint32_t base = 0x4a800000u;  // 2^22
    return (Floats)(byte_of(bytes, j, 0, 255u) | base) - splat(4194304.0f + 64.0f);
  }
};

// Indices into a table of sixteen floats, given as their bits.
template <uint32_t... bits>
struct TableCodes {
  static_assert(sizeof...(bits) == 16, "");
  JITGEN_INLINE Words prepared(Words bytes) { return bytes; }
  JITGEN_INLINE Floats value(Words bytes, int j) {
    const Words code = bytes >> (8 * j);  // look-ups ignore the bits above the index
#if defined(JITGEN_AVX512)
    return look_up((Floats)Words{bits...}, code);
#elif defined(JITGEN_AVX2)
    alignas(32) static constexpr uint32_t table[16] = {bits...};
    Floats low, high, entries;
    asm("vpermps %2, %1, %0" : "=x"(low) : "x"(code), "x"(load_vector<Floats>(table)));
    asm("vpermps %2, %1, %0" : "=x"(high) : "x"(code), "x"(load_vector<Floats>(table + 8)));
    asm("vblendvps %3, %2, %1, %0" : "=x"(entries) : "x"(low), "x"(high), "x"(code << 28));
    return entries;
#else
    static constexpr uint32_t table[16] = {bits...};
    Words entries;
    for (int lane = 0; lane < float_lanes; ++lane) entries[lane] = table[code[lane] & 15];
    return (Floats)entries;
#endif
  }
};

// ---------------------------------------------------------------------------------------------------- bytes of planes

// The `width` bits that a plane has of four neighbouring codes, in the bytes of a word, shifted to bit `first`. The
// words of the plane begin at `offset` words of a block.
template <int width, int first>
JITGEN_INLINE Words bits_of_plane(const char* unit, int four, int offset, int v) {
  const char* const word = unit + (offset + four * width / 8) * 4 * block_rows + v * vector_bytes;
  const int shift = four * width % 8 - first;
  constexpr uint32_t mask = (width == 8 ? 255u : (1u << (width % 8)) - 1) * 0x01010101u << first;
  const Words raw = load_vector<Words>(word);
  if constexpr (width == 8) return raw;
  return (shift >= 0 ? raw >> shift : raw << -shift) & mask;
}

// Four neighbouring codes of `bits` bits, as bytes: the `four`th of a unit of `columns` k's.
template <int bits, int columns>
JITGEN_INLINE Words bytes_of_planes(const char* unit, int four, int v) {
  constexpr int after8 = bits & 8, after4 = bits & 12, after2 = bits & 14;  // the bits of the wider planes
  Words bytes = {};
  if constexpr ((bits & 8) != 0) bytes |= bits_of_plane<8, 0>(unit, four, 0, v);
  if constexpr ((bits & 4) != 0) bytes |= bits_of_plane<4, after8>(unit, four, columns * after8 / 32, v);
  if constexpr ((bits & 2) != 0) bytes |= bits_of_plane<2, after4>(unit, four, columns * after4 / 32, v);
  if constexpr ((bits & 1) != 0) bytes |= bits_of_plane<1, after2>(unit, four, columns * after2 / 32, v);
  return bytes;
}

// ------------------------------------------------------------------------------------------------------------ decoders

// No zero-points.
struct NoZero {};

template <class Compute, class Codes>
struct PlaneDecode {
  static constexpr int steps = Codes::per_unit;
  static constexpr int bytes = Codes::unit_bytes;
  static constexpr bool corrected = false;
  static constexpr int vectors = block_rows / float_lanes;
  const char* at;
  typename Compute::Vector zero[Compute::vectors];

  JITGEN_INLINE int element(int step) { return step; }
  inline __attribute__((always_inline)) void group(const typename Codes::Zero* zeros) {
    if constexpr (Codes::zeroed) {
      for (int v = 0; v < Compute::vectors; ++v) widen(zeros + v * (block_rows / Compute::vectors), zero[v]);
    }
  }
  inline __attribute__((always_inline)) void open(const char* from) { at = from; }

  inline __attribute__((always_inline)) void take(int step, typename Compute::Weights (&w)[Compute::vectors]) const {
    Floats values[vectors];
    for (int v = 0; v < vectors; ++v) {
      const Words bytes = bytes_of_planes<Codes::bits, Codes::per_unit>(at, step / 4, v);
      values[v] = Codes::Value::value(Codes::Value::prepared(bytes), step % 4);
    }
    detail::give(values, w);
    if constexpr (Codes::zeroed) {
      for (int v = 0; v < Compute::vectors; ++v) w[v] -= zero[v];
    }
  }
};

// Codes of `bits` bits, of the kind `Value`; `ZeroType` is the type of zero-points in memory, or NoZero.
template <int bits_, class Value_, class ZeroType>
struct PlaneCodes {
  using Zero = ZeroType;
  using Value = Value_;
  static constexpr bool zeroed = !same<ZeroType, NoZero>;
  static constexpr int bits = bits_;
  static constexpr int narrowest = bits & -bits;
  static constexpr int64_t per_unit = 32 / narrowest;
  static constexpr int64_t unit_bytes = per_unit * bits * block_rows / 8;

  template <class Compute>
  struct DecoderOf {
    using Zero = ZeroType;
    static constexpr int elements = per_unit;
    static_assert(Compute::per_element == 1, "planes are decoded to single numbers");
    template <int rows>
    using type = PlaneDecode<Compute, PlaneCodes>;
  };
};

// --------------------------------------------------------------------------------------------------- codes as they are

// Units of whole numbers in planes, `step` apart, that are multiplied by int8 activations. `Sums` is Ints for VPDPBUSD
// and Halves for VPMADDUBSW, whose pairs of products fit 16 bits for codes below 128.
template <int bits, int step, class Sums>
struct PlaneUnits {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  static constexpr bool in_halves = same<Sums, Halves>;
#else
  static constexpr bool in_halves = false;
#endif
  static constexpr int64_t most_product = ((1 << bits) - 1) * step * 128;
  static constexpr int narrowest = bits & -bits;
  static constexpr int steps = 8 / narrowest;
  static constexpr int64_t unit_bytes = 2 * steps * bits * 4;
  // Units whose products fit the halves of a lane; the halves go to the lane at once where those of a unit may not.
  static constexpr int64_t units_together = in_halves ? 32767 / (2 * steps * most_product) : 0;
  static constexpr bool halves_x = in_halves && 2 * most_product > 32767;
  static constexpr int distance = 1;

  using Element = Select<in_halves && units_together == 0, SmallByteQuad, SignedByteQuad>;
  using Vector = Select<units_together != 0, Halves, Ints>;
};

// The arithmetic of these numbers, from `low` on (gemm_code_tile.hpp): four neighbouring codes are the bytes of a word,
// and what they are above their values is taken off the sums.
template <int bits, int step, int low, bool zeroed, class Sums, class Units = PlaneUnits<bits, step, Sums>>
struct PlaneBytes : Units, UnsignedCodes<bits, zeroed, -low, typename Units::Element, typename Units::Vector> {
  using Element = typename Units::Element;
  using Vector = typename Units::Vector;

  template <int number>
  JITGEN_INLINE Octets codes(const char* unit, int v) {
    return (Octets)IntegerCodes<step, low>::prepared(bytes_of_planes<bits, 32 / Units::narrowest>(unit, number, v));
  }
};

}  // namespace gemm
}  // namespace jitgen
