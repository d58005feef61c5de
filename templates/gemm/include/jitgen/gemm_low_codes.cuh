// Codes of 4 bits of the "mma8" layout (jitgen/quant/layouts/mma8.py) as fragments of int8, for mma.sync and wgmma.
//
// A word of the layout has eight codes, of rows g and g+8 at columns 4t .. 4t+3 of 16. Its low nibbles are four bytes of
// an A fragment, and its high nibbles those of the other row.
//
// A code less 8 is the nibble as the upper half of a byte, with its highest bit inverted, over 16: two instructions for
// four codes, and a factor for the sums.
#pragma once

#include "jitgen/gemm_quant.cuh"

namespace jitgen {

template <bool zero_points>
struct LowCodes {
  static constexpr float shrunk = zero_points ? 1.0f : 0.0625f;  // the factor of the sums
  static constexpr uint32_t low = 0x0f0f0f0fu, high = 0xf0f0f0f0u, signs = 0x80808080u;

  struct Zeros {  // of rows g and g+8, in every byte
    uint32_t row[2];
  };
  static JITGEN_DEVICE Zeros zeros(uint32_t pair) { return {{(pair & 0xffu) * 0x01010101u, (pair >> 8) * 0x01010101u}}; }

  // The fragment of 32 k's: of the two words that have 16 of them each.
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], uint32_t first, uint32_t second, const Zeros& zeros) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = half ? second : first;
      if constexpr (zero_points) {
        a[half * 2] = (and_or<low, signs>(word) - zeros.row[0]) ^ signs;
        a[half * 2 + 1] = (and_or<low, signs>(word >> 4) - zeros.row[1]) ^ signs;
      } else {
        a[half * 2] = and_xor<high, signs>(word << 4);
        a[half * 2 + 1] = and_xor<high, signs>(word);
      }
    }
  }
};

}  // namespace jitgen
