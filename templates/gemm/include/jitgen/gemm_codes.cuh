// Kinds of low-bit codes, as pairs of 16-bit floats and as floats, and kinds of scales. The reference of each is
// Format.values and Format.scale in jitgen/quant/formats.py; the tests run these functions on the host for every code.
//
// A pair of codes is a word with an unsigned code in each half. `Element` is bfloat16 or float16.
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

template <class Element>
JITGEN_DEVICE uint32_t pack_pair(float low, float high) {
  return uint32_t(store<Element>(low).bits) | uint32_t(store<Element>(high).bits) << 16;
}
template <class Element>
constexpr uint32_t pair_of(uint32_t bfloat16_bits, uint32_t float16_bits) {
  return (is_bfloat16<Element> ? bfloat16_bits : float16_bits) * 0x00010001u;
}
// The bits of 2^exponent, in both halves.
template <class Element>
constexpr uint32_t power_of_two(int exponent) {
  return pair_of<Element>(uint32_t(exponent + 127) << 7, uint32_t(exponent + 15) << 10);
}
constexpr uint32_t minus_zeros = 0x80008000u;

// Whole numbers, `step` apart; that of code 0 is `first`, and a code has `bits` bits.
template <int bits, int step_, int first>
struct IntegerCodes {
  static constexpr int step = step_;
  static constexpr bool floats = false, looked_up = false;
  static constexpr bool paired = true, bytes = bits == 8;
  static constexpr int first_number = first;
  static constexpr float rest = 1.0f;

  // A code shifted by `biased_shift` is in the upper bits of a bfloat16's mantissa. With the exponent of `base` it is the
  // number plus `added`, which is no larger than three times the largest number: a sum of products loses little when the
  // bias times the sum of x is taken off it.
  static constexpr int biased_shift = 7 - bits, base = step << bits;
  static constexpr float added = float(base - first);
  static constexpr uint32_t biased_exponent = uint32_t(127 + bits + (step - 1)) << 7;

  JITGEN_DEVICE static float number(uint32_t code) { return float(int(code) * step + first); }

  // The code is written to the mantissa of 128 (bfloat16) or 1024 (float16), which is subtracted with the zero-point.
  template <class Element>
  static constexpr uint32_t base_of = bytes && is_bfloat16<Element> ? 0u : pair_of<Element>(0x4300u, 0x6400u);
  template <class Element>
  JITGEN_DEVICE static uint32_t pair(uint32_t codes, uint32_t zeros = 0) {
    constexpr uint32_t base = base_of<Element>, minus_base = base | minus_zeros;
    constexpr uint32_t one = power_of_two<Element>(0);
    if constexpr (bytes && is_bfloat16<Element>) {
      // A byte is a bfloat16 number, times 2^-133. Minus a zero-point it is exact; 2^127 and 2^6 make it what it is.
      // (All by fused multiply-adds, which sm_80 has.)
      constexpr uint32_t minus_one = power_of_two<Element>(0) | minus_zeros;
      const uint32_t less = fma_pair<Element>(zeros + uint32_t(-first) * 0x00010001u, minus_one, codes);
      return fma_pair<Element>(fma_pair<Element>(less, power_of_two<Element>(127), minus_zeros),
                               power_of_two<Element>(6), minus_zeros);
    } else if constexpr (step == 1) {
      return fma_pair<Element>(codes | base, one, minus_base + uint32_t(-first) * 0x00010001u + zeros);
    } else {
      static_assert(step == 2 && first == -1, "");
      const uint32_t whole = fma_pair<Element>(codes | base, one, minus_base);
      return fma_pair<Element>(whole, power_of_two<Element>(1), one | minus_zeros);
    }
  }
};

// A sign, `exponent` bits with a bias and `mantissa` bits. The fields are moved to those of a wider float, whose exponent
// is then re-biased by a multiplication: exactly, subnormals included.
template <int exponent, int mantissa, int bias>
struct FloatCodes {
  static constexpr bool paired = true, bytes = false, floats = true, looked_up = false;
  static constexpr int step = 0, biased_shift = 0, first_number = 0;
  static constexpr uint32_t biased_exponent = 0;
  static constexpr float added = 0.0f;
  static constexpr int magnitude_bits = exponent + mantissa;
  static constexpr uint32_t magnitude = (1u << magnitude_bits) - 1;

  JITGEN_DEVICE static float number(uint32_t code) {
    const float wide = __int_as_float(int((code & magnitude) << (23 - mantissa)));
    const float value = wide * __int_as_float(int(uint32_t(254 - bias) << 23));
    return __int_as_float(__float_as_int(value) | int(code >> magnitude_bits << 31));
  }
  // What 2^112 leaves of the power of two that the bias of a bfloat16 is more.
  static constexpr float rest = float(1 << (15 - bias));
  // The bit of a half at which the magnitude begins, the sign being the highest one; and the numbers of such a pair.
  template <class Element>
  static constexpr int place = (is_bfloat16<Element> ? 7 : 10) - mantissa;
  template <class Element>
  JITGEN_DEVICE static uint32_t rebias(uint32_t wide) {
    constexpr int more = (is_bfloat16<Element> ? 127 : 15) - bias;
    if constexpr (more == 0) return wide;
    return fma_pair<Element>(wide, power_of_two<Element>(more), minus_zeros);
  }
  // Such a pair, for bfloat16, of codes of 4 bits: of the lowest nibbles of both halves, or of the `second` ones. One
  // multiplication brings sign and magnitude to their fields.
  JITGEN_DEVICE static uint32_t wide_pair(uint32_t word, int second) {
    constexpr uint32_t factor = 0x1000u + (1u << place<bfloat16>);
    const uint32_t codes = second ? word & 0x00f000f0u : word & 0x000f000fu;
    return codes * (second ? factor >> 4 : factor) & (0x8000u + (magnitude << place<bfloat16>)) * 0x00010001u;
  }
  // In both halves the bfloat16 that makes a code of such a pair the number times a scale, an exponent plus 127, and
  // times 2^-16: to be finite for scales up to 2^17, which without it were those up to 2. Larger ones, which weights do
  // not have (quant/layouts/planes.py), would be infinite, and times a code of 0 NaN.
  JITGEN_DEVICE static uint32_t folded_scale(uint32_t power) {
    constexpr uint32_t more = 127 - bias - 16, largest = 255 - more;
    return (power < largest ? power : largest) * 0x00800080u + (more << 7) * 0x00010001u;
  }
};

// Indices into a table of sixteen floats, given as their bits.
template <uint32_t... words>
struct TableCodes {
  static constexpr bool paired = true, bytes = false, floats = false, looked_up = true;
  static constexpr int step = 0, biased_shift = 0, first_number = 0;
  static constexpr uint32_t biased_exponent = 0;
  static constexpr float added = 0.0f, rest = 1.0f;

  // Number i of the table, rounded to Element (to nearest, ties to even).
  template <class Element>
  static constexpr uint32_t rounded(int i) {
    constexpr uint32_t table[16] = {words...};
    const uint32_t word = table[i], magnitude = word & 0x7fffffffu, sign = word >> 31 << 15;
    if (is_bfloat16<Element>) return (word + 0x7fffu + (word >> 16 & 1u)) >> 16;
    if (magnitude == 0) return sign;
    const uint32_t narrow = magnitude - (112u << 23);  // the numbers are 2^-14 at least, and below 2^16
    return sign | (narrow + 0xfffu + (narrow >> 13 & 1u)) >> 13;
  }
  // Four neighbouring bytes of the table, the lower or the upper ones of its numbers.
  template <class Element>
  static constexpr uint32_t four(int first, int byte) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= (rounded<Element>(first + i) >> (8 * byte) & 255u) << (8 * i);
    return bytes;
  }
  // Four bytes of the numbers whose indices are the four lowest nibbles of `indices`: all lower or all upper ones.
  // `above`: 255 in the bytes of the indices from 8 on.
  template <class Element, int byte>
  JITGEN_DEVICE static uint32_t look_up(uint32_t indices, uint32_t above) {
    constexpr uint32_t t0 = four<Element>(0, byte), t1 = four<Element>(4, byte);
    constexpr uint32_t t2 = four<Element>(8, byte), t3 = four<Element>(12, byte);
    return (__byte_perm(t0, t1, indices) & ~above) | (__byte_perm(t2, t3, indices) & above);
  }
  // The pairs of a word that has the low halves of four pairs in its four lowest nibbles and their high halves in the
  // others. A byte permutation is a look-up in eight bytes, of four indices at once.
  template <class Element>
  JITGEN_DEVICE static void pairs(uint32_t (&a)[4], uint32_t word) {
    const uint32_t indices = word & 0x77777777u, highest = word >> 3 & 0x11111111u;
    uint32_t low[2], high[2];  // bytes of the numbers in the low halves, and in the high ones
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t above = __byte_perm(0x0000ff00u, 0, half ? highest >> 16 : highest);
      low[half] = look_up<Element, 0>(half ? indices >> 16 : indices, above);
      high[half] = look_up<Element, 1>(half ? indices >> 16 : indices, above);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t first = __byte_perm(low[0], high[0], i ? 0x7362 : 0x5140);
      const uint32_t second = __byte_perm(low[1], high[1], i ? 0x7362 : 0x5140);
      a[i] = __byte_perm(first, second, 0x5410);
      a[i + 1] = __byte_perm(first, second, 0x7632);
    }
  }
  JITGEN_DEVICE static float number(uint32_t code) {
    constexpr uint32_t table[16] = {words...};
    uint32_t bits = table[0];
#pragma unroll
    for (uint32_t i = 1; i < 16; ++i) bits = code == i ? table[i] : bits;
    return __int_as_float(int(bits));
  }
};

// -------------------------------------------------------------------------------------------------------------- scales

// A power of two: the byte is its exponent plus 127. The smallest one is subnormal.
struct E8m0 {
  uint8_t bits;
};
// A float of 8 bits, finite.
struct E4m3 {
  uint8_t bits;
};
struct NoZero {
  uint8_t bits;
};

JITGEN_DEVICE float number_of(float x) { return x; }
JITGEN_DEVICE float number_of(bfloat16 x) { return jitgen::load(x); }
JITGEN_DEVICE float number_of(float16 x) { return jitgen::load(x); }
JITGEN_DEVICE float number_of(uint8_t x) { return float(int(x)); }
JITGEN_DEVICE float number_of(NoZero) { return 0.0f; }
JITGEN_DEVICE float number_of(E8m0 x) {
  const uint32_t bits = uint32_t(x.bits) << 23;
  return __int_as_float(int(bits < 0x00400000u ? 0x00400000u : bits));
}
JITGEN_DEVICE float number_of(E4m3 x) { return FloatCodes<4, 3, 7>::number(x.bits); }

// Two of them. From compute capability 8.9 on one instruction makes both float16, exactly.
JITGEN_DEVICE float2 numbers_of(E4m3 x, E4m3 y) {
#if __CUDA_ARCH__ >= 890
  uint32_t both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(uint16_t(x.bits | y.bits << 8)));
  return {half_to_float(uint16_t(both)), half_to_float(uint16_t(both >> 16))};
#else
  return {number_of(x), number_of(y)};
#endif
}

}  // namespace jitgen
