// Codes of 4 bits of the "mma8" layout (jitgen/quant/layouts/mma8.py) times x of int8, on wgmma: the counterpart of
// `Decode` in gemm_wgmma_decode.cuh.
//
// A word of the layout has eight codes, of rows g and g+8 at columns 4t .. 4t+3 of 16. Its low nibbles are four bytes of
// an A fragment, and its high nibbles those of the other row.
//
// A code less 8 is the nibble as the upper half of a byte, with its highest bit inverted, over 16: two instructions for
// four codes, and a factor for the sums.
#pragma once

#include "jitgen/gemm_wgmma_quantized.cuh"
#include "jitgen/wgmma_bytes.cuh"

namespace jitgen {

template <bool zero_points, class Scale, int group>
struct Decode<QuantWeight<Bytes<int8_t, int8_t>, 4, zero_points, Scale, group>> {
  using Weight = QuantWeight<Bytes<int8_t, int8_t>, 4, zero_points, Scale, group>;
  static constexpr float shrunk = zero_points ? 1.0f : 0.0625f;
  static constexpr uint32_t low = 0x0f0f0f0fu, high = 0xf0f0f0f0u, signs = 0x80808080u;

  float2 scale;  // of rows g and g+8
  uint32_t zero[2];

  JITGEN_DEVICE void set(const typename Weight::Scales& scales) {  // the first scales of the part
    if constexpr (group != 0) scale = unpack_pair(scales.scale[0]);
    if constexpr (zero_points) {
      zero[0] = (scales.zero[0] & 0xffu) * 0x01010101u;
      zero[1] = (scales.zero[0] >> 8) * 0x01010101u;
    }
  }
  // The fragment of k32 step `step` (0, 1) of the chunk.
  JITGEN_DEVICE void fragment(uint32_t (&a)[4], const typename Weight::Codes& codes, int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = codes.word(step * 2 + half);
      if constexpr (zero_points) {
        a[half * 2] = (and_or<low, signs>(word) - zero[0]) ^ signs;
        a[half * 2 + 1] = (and_or<low, signs>(word >> 4) - zero[1]) ^ signs;
      } else {
        a[half * 2] = and_xor<high, signs>(word << 4);
        a[half * 2 + 1] = and_xor<high, signs>(word);
      }
    }
  }
};

}  // namespace jitgen
