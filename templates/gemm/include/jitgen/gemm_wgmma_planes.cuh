// From codes in bit planes to wgmma's A fragments: the counterpart of `Decode` in gemm_wgmma_decode.cuh for the formats
// of gemm_planes.cuh. Each weight is rounded once to the dtype of x.
//
// Codes minus zero-points become pairs of numbers of x's dtype, exactly (gemm_codes.cuh). For bfloat16 one
// multiplication by the scale makes the weights. A scale that is no bfloat16 is the sum of two: the number times the
// lower one is added to its product with the upper one, so that the weight is rounded once but for 2^-17 of it. For
// float16, and where zero-points are floats, weights are computed in float32.
#pragma once

#include "jitgen/gemm_planes.cuh"
#include "jitgen/gemm_wgmma_decode.cuh"

namespace jitgen {

template <class Scale>
constexpr bool is_exact_in_bfloat16 = false;
template <>
constexpr bool is_exact_in_bfloat16<bfloat16> = true;
template <>
constexpr bool is_exact_in_bfloat16<E8m0> = true;
template <>
constexpr bool is_exact_in_bfloat16<E4m3> = true;

template <class Element_, int bits, class Kind, class Zero, class Scale, int group, bool factored>
struct Decode<PlaneWeight<Element_, bits, Kind, Zero, Scale, group, factored>> {
  using Element = Element_;
  using Weight = PlaneWeight<Element, bits, Kind, Zero, Scale, group, factored>;
  static constexpr bool scaled = group != 0;  // else the sums are scaled, by the scale of their row
  static constexpr bool bytes = Kind::bytes;  // whole numbers of eight bits
  static constexpr bool whole = !Weight::zero_points || Weight::whole_zeros;
  static constexpr bool in_pairs = is_bfloat16<Element> && whole;
  static constexpr bool halved = scaled && in_pairs && !is_exact_in_bfloat16<Scale>;
  static constexpr float power = 5192296858534827628530496329220096.0f;  // 2^112
  // Floats of eight bits become numbers of the bias of bfloat16 by the scale, times 2^112, as scales are below 2^15.
  static constexpr bool rebiased = halved && Kind::floats && Weight::bits == 8;
  // Bytes are bfloat16 numbers as they are, times 2^-133, of which they take 2^127 back. The scale takes the rest.
  static constexpr float shrunk = bytes && in_pairs ? 64.0f : rebiased ? Kind::rest : Weight::shrunk;

  uint32_t factor[2];  // in_pairs: the scale of rows g and g+8 in both halves, or the upper number of two
  uint32_t lower[2];   // halved: the lower one
  float2 scale;        // not in_pairs
  typename Weight::Offsets offsets;

  JITGEN_DEVICE void set(const typename Weight::Scales& scales) {  // the first scales of the part
    offsets = Weight::offsets(scales, 0);
    if constexpr (bytes && in_pairs) {
      offsets.row[0] += uint32_t(-Kind::first_number) * 0x00010001u;
      offsets.row[1] += uint32_t(-Kind::first_number) * 0x00010001u;
    }
    if constexpr (scaled && !Weight::folded) {
      scale = unpack_pair(scales.scale[0]);
      if constexpr (rebiased) scale = {scale.x * power, scale.y * power};
      if constexpr (in_pairs) {
        split(factor[0], lower[0], scale.x);
        split(factor[1], lower[1], scale.y);
      }
    }
  }
  static JITGEN_DEVICE void split(uint32_t& upper, uint32_t& lower, float number) {
    upper = round_pair<bfloat16>(number, number);
    if constexpr (halved) {
      const float rest = number - unpack_pair(upper).x;
      lower = round_pair<bfloat16>(rest, rest);
    }
  }

  // The fragment of k16 step `step` (0..3) of the chunk.
  JITGEN_DEVICE void fragment(uint32_t (&a)[4], const typename Weight::Codes& codes, int step) const {
    if constexpr (rebiased) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = scale_pair(Weight::wide_pair(codes, step * 4 + i), i & 1);
    } else if constexpr (whole && !(bytes && in_pairs)) {
      Weight::numbers(a, codes, step, offsets.row);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = scale_pair(a[i], i & 1);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = codes.pair(step * 4 + i);
        if constexpr (whole) {
          constexpr uint32_t largest = 0x7f007f00u;  // 2^127
          a[i] = scale_pair(multiply_pair(subtract_pair(pair, offsets.row[i & 1]), largest), i & 1);
        } else {
          const float zero = offsets.number[i & 1], by = scaled ? (i & 1 ? scale.y : scale.x) : 1.0f;
          a[i] = round_pair<Element>((Kind::number(pair & 0xffffu) - zero) * by, (Kind::number(pair >> 16) - zero) * by);
        }
      }
    }
  }
  JITGEN_DEVICE uint32_t scale_pair(uint32_t numbers, int row) const {
    if constexpr (!scaled || Weight::folded) {
      return numbers;
    } else if constexpr (halved) {
      return fma_pair<bfloat16>(numbers, factor[row], multiply_pair(numbers, lower[row]));
    } else if constexpr (in_pairs) {
      return multiply_pair(numbers, factor[row]);
    } else {
      const float2 values = floats_of_pair<Element>(numbers);
      return round_pair<Element>(values.x * (row ? scale.y : scale.x), values.y * (row ? scale.y : scale.x));
    }
  }
};

}  // namespace jitgen
