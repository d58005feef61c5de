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

JITGEN_INLINE Floats where(Words mask, Floats yes, Floats no) {
  return (Floats)(((Words)yes & mask) | ((Words)no & ~mask));
}

// A sign, `exponent` bits of the given bias and `mantissa` bits, as floats. Subnormals are products of whole numbers,
// because processors may be slow on subnormal floats.
template <int exponent, int mantissa, int bias>
JITGEN_INLINE Floats small_float(Words code) {
  constexpr int magnitude_bits = exponent + mantissa;
  constexpr float least = 1.0f / (int64_t(1) << (bias + mantissa - 1));  // the smallest subnormal
  const Words magnitude = code & ((1u << magnitude_bits) - 1);
  const Floats normal = (Floats)((magnitude << (23 - mantissa)) + (uint32_t(127 - bias) << 23));
  const Floats subnormal = detail::small_to_float(magnitude, splat(detail::magic_value)) * least;
  const Words sign = code >> magnitude_bits << 31;
  return (Floats)((Words)where((Words)(magnitude < (1u << mantissa)), subnormal, normal) | sign);
}

JITGEN_INLINE void widen(const E8m0* from, Floats& to) {
  const Words bits = widen_bytes(&from->bits);
  to = (Floats)(bits << 23 | ((Words)(bits == 0) & 0x00400000u));
}
JITGEN_INLINE void widen(const E4m3* from, Floats& to) { to = small_float<4, 3, 7>(widen_bytes(&from->bits)); }
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

// Whole numbers, `step` apart; the number of an unsigned code is `step * code + low`.
template <int step, int low>
struct IntegerCodes {
  JITGEN_INLINE Floats value(Words code) {
    return detail::small_to_float(code * uint32_t(step), splat(detail::magic_value - low));
  }
};

template <int exponent, int mantissa, int bias>
struct FloatCodes {
  JITGEN_INLINE Floats value(Words code) { return small_float<exponent, mantissa, bias>(code); }
};

// Indices into a table of sixteen floats, given as their bits.
template <uint32_t... bits>
struct TableCodes {
  static_assert(sizeof...(bits) == 16, "");
  JITGEN_INLINE Floats value(Words code) {
#if defined(JITGEN_AVX512)
    return look_up((Floats)Words{bits...}, code);
#elif defined(JITGEN_AVX2)
    alignas(32) static constexpr uint32_t table[16] = {bits...};
    Floats low, high, found;
    asm("vpermps %2, %1, %0" : "=x"(low) : "x"(code), "x"(load_vector<Floats>(table)));
    asm("vpermps %2, %1, %0" : "=x"(high) : "x"(code), "x"(load_vector<Floats>(table + 8)));
    asm("vblendvps %3, %2, %1, %0" : "=x"(found) : "x"(low), "x"(high), "x"(code << 28));
    return found;
#else
    static constexpr uint32_t table[16] = {bits...};
    Words found;
    for (int lane = 0; lane < float_lanes; ++lane) found[lane] = table[code[lane]];
    return (Floats)found;
#endif
  }
};

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

  // The `width` bits of a plane, shifted to bit `first`. The words of the plane begin at `offset` words of a block.
  template <int width, int first>
  inline __attribute__((always_inline)) Words bits_of_plane(int step, int offset, int v) const {
    const char* const word = at + (offset + step * width / 32) * 4 * block_rows + v * vector_bytes;
    const int shift = step * width % 32;
    const Words raw = load_vector<Words>(word);
    constexpr uint32_t mask = (width == 8 ? 255u : (1u << (width % 8)) - 1) << first;
    return (shift >= first ? raw >> (shift - first) : raw << (first - shift)) & mask;
  }
  inline __attribute__((always_inline)) void take(int step, typename Compute::Weights (&w)[Compute::vectors]) const {
    constexpr int bits = Codes::bits, unit = Codes::per_unit;
    constexpr int after8 = bits & 8, after4 = bits & 12, after2 = bits & 14;  // the bits of the wider planes
    Floats values[vectors];
    for (int v = 0; v < vectors; ++v) {
      Words code = {};
      if constexpr ((bits & 8) != 0) code |= bits_of_plane<8, 0>(step, 0, v);
      if constexpr ((bits & 4) != 0) code |= bits_of_plane<4, after8>(step, unit * after8 / 32, v);
      if constexpr ((bits & 2) != 0) code |= bits_of_plane<2, after4>(step, unit * after4 / 32, v);
      if constexpr ((bits & 1) != 0) code |= bits_of_plane<1, after2>(step, unit * after2 / 32, v);
      values[v] = Codes::Value::value(code);
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
  static constexpr bool zeroed = !detail::same<ZeroType, NoZero>;
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

}  // namespace gemm
}  // namespace jitgen
