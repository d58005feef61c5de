// From codes of the "mma" layout to wgmma's A fragments. Each weight is rounded once to the dtype of x. Few
// instructions are spent, because they share issue slots with wgmma, and a tile of few tokens leaves little time for
// them.
//
// A bfloat16 whose exponent field is 0 or 1 has the value of its lowest eight bits times 2^-133. So a byte, or a nibble
// in one of the two lowest nibbles of a half, already is a number: one AND takes it out of its word. One fused
// multiply-add makes the weight: the number times the scale, minus the middle code times the scale. The latter is a
// power of two times a bfloat16 and therefore exact, so the weight is rounded once.
//
// A scale in float32 is two bfloat16, its upper and its lower half. The code minus the middle code, times the lower
// half, is added to the product with the upper half; the weight is then rounded once but for 2^-17 of it.
//
// As 2^133 is out of range, weights come out smaller by the factor `shrunk`, a power of two, by which the float32 sums
// are multiplied at the end. Scales of groups must be less than 2^15 because of it.
#pragma once

#include "jitgen/gemm_quant.cuh"

namespace jitgen {

template <class Element>
JITGEN_DEVICE float2 floats_of_pair(uint32_t pair) {
  if constexpr (is_bfloat16<Element>) return unpack_pair(pair);
  return {half_to_float(uint16_t(pair)), half_to_float(uint16_t(pair >> 16))};
}

// Decodes one part of a chunk (k's of one group) of rows g and g+8: `set` is called once, `fragment` for each k16 step.
template <class Weight>
struct Decode {
  using Element = typename Weight::Element;
  static constexpr bool scaled = Weight::group != 0;  // else the sums are scaled, by the scale of their row
  static constexpr bool halved = scaled && sizeof(typename Weight::Scale) == 4;  // a scale is two bfloat16 numbers
  static constexpr bool subnormal = is_bfloat16<Element> && (halved ? Weight::bits == 8 : true);
  static constexpr float shrunk = !subnormal ? 1.0f : scaled ? 2097152.0f : 64.0f;  // 2^21, 2^6

  uint32_t factor[2];  // subnormal: what codes are multiplied by, in both halves; 16 times less for row g+8's nibbles
  uint32_t addend[2];  // subnormal: minus the middle code times the factor, or the zero-point to subtract
  uint32_t lower[2];   // halved: the lower half of the factor; `factor` is the upper one
  float scale[2];      // not subnormal, and scaled
  typename Weight::Offsets offsets;

  JITGEN_DEVICE void set(const typename Weight::Scales& scales) {  // the first scales of the part
    if constexpr (!subnormal) {
      offsets = Weight::offsets(scales, 0);
      if constexpr (scaled) {
        const float2 both = unpack_pair(scales.scale[0]);
        scale[0] = both.x;
        scale[1] = both.y;
      }
    } else if constexpr (halved) {
      const float2 both = unpack_pair(scales.scale[0]);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float wanted = (row ? both.y : both.x) * 5192296858534827628530496329220096.0f;  // 2^112
        factor[row] = round_pair<Element>(wanted, wanted);
        const float rest = wanted - unpack_pair(factor[row]).x;
        lower[row] = round_pair<Element>(rest, rest);
      }
    } else {
      if constexpr (scaled) {
        spread(factor, multiply_pair(scales.scale[0], 0x75807780u));  // 2^112 of row g, 2^108
        if constexpr (!Weight::zero_points) {
          spread(addend, multiply_pair(scales.scale[0], 0xb680b680u));  // -8 * 2^-133 * 2^112
        }
      } else {
        factor[0] = 0x7f007f00u;  // 2^127
        factor[1] = Weight::bits == 4 ? 0x7d007d00u : factor[0];
        addend[0] = addend[1] = Weight::bits == 4 ? 0xbe00be00u : 0xc000c000u;  // -8 or -128 * 2^-133 * 2^127
      }
      if constexpr (Weight::zero_points) {
        const uint32_t zero = scales.zero[0];
        addend[0] = (zero & 0xffu) * 0x00010001u;
        addend[1] = (zero >> 8) * 0x00100010u;
      }
    }
  }
  static JITGEN_DEVICE void spread(uint32_t (&rows)[2], uint32_t pair) {
    rows[0] = __byte_perm(pair, pair, 0x1010);
    rows[1] = __byte_perm(pair, pair, 0x3232);
  }

  JITGEN_DEVICE uint32_t weight(uint32_t code, int row) const {
    if constexpr (halved) {
      const uint32_t from_middle = subtract_pair(code, 0x00800080u);
      return fma_pair<bfloat16>(from_middle, factor[row], multiply_pair(from_middle, lower[row]));
    }
    if constexpr (Weight::zero_points) return multiply_pair(subtract_pair(code, addend[row]), factor[row]);
    return fma_pair<bfloat16>(code, factor[row], addend[row]);
  }

  // The fragment of k16 step `step` (0..3) of the chunk.
  JITGEN_DEVICE void fragment(uint32_t (&a)[4], const typename Weight::Codes& codes, int step) const {
    if constexpr (!subnormal) {
      Weight::template fragment<true>(a, codes, step, offsets);
      if constexpr (scaled) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 value = floats_of_pair<Element>(a[i]);
          a[i] = round_pair<Element>(value.x * scale[i & 1], value.y * scale[i & 1]);
        }
      }
    } else if constexpr (Weight::bits == 4) {
      const uint32_t word = codes.word(step), upper = word >> 8;
      a[0] = weight(word & 0x000f000fu, 0);
      a[1] = weight(word & 0x00f000f0u, 1);
      a[2] = weight(upper & 0x000f000fu, 0);
      a[3] = weight(upper & 0x00f000f0u, 1);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t word = codes.word(step * 2 + i / 2);  // two's complement; 128 more as a plain byte
        a[i] = weight(and_xor<0x00ff00ffu, 0x00800080u>(word), 0);
        a[i + 1] = weight(and_xor<0x00ff00ffu, 0x00800080u>(word >> 8), 1);
      }
    }
  }
};

}  // namespace jitgen
