// Dense bfloat16 or float16 weights that lie along k, for mma_gemm of gemm_mma.cuh: from global memory straight into the
// products' fragments.
//
// The order in which k is summed is free as long as weights and x agree. So a lane's fragments of 32 k's are the sixteen
// bytes that lie side by side in memory, and not the pairs 2t, 2t+1, 2t+8, 2t+9 that the products' own order has in each
// 16: lane 4g+t takes k's 8t..8t+7 of rows g and g+8, and of x's row g.
#pragma once

#include "jitgen/gemm_activation.cuh"

namespace jitgen {

// [rows, K]; rows start on 16 bytes, and K is a multiple of 8: of 64 too, unless `ragged`.
template <class ElementType, bool ragged>
struct DenseRows {
  using Element = ElementType;
  static constexpr int bits = 16, group = 0, parts = 1;
  static constexpr bool zero_points = false, constant = false;

  const Element* pointer;
  int64_t row_stride;
  int rows, length;

  struct Codes {
    uint4 words[2][2];  // of rows g and g+8, of both halves of the chunk
  };
  struct Scales {
    uint2 scale[1];
  };
  struct Offsets {};

  static JITGEN_DEVICE int chunks(int K) { return (K + 63) / 64; }
  static JITGEN_DEVICE int token_of(int lane) { return lane / 4; }
  static JITGEN_DEVICE int unit_of(int lane) { return lane % 4; }
  static JITGEN_DEVICE void load_tokens(uint32_t (&b)[4], uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
  }

  template <int stride>
  struct Walk {
    const uint4* from[2];
    int left;  // of k, from the lane's first on

    JITGEN_DEVICE void start(const DenseRows& weight, int tile, int, int first, int lane) {
      const int k = first * 64 + lane % 4 * 8;
      left = weight.length - k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = smaller(tile * 16 + lane / 4 + half * 8, weight.rows - 1);
        from[half] = reinterpret_cast<const uint4*>(weight.pointer + (row * weight.row_stride + k));
      }
    }
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = step * (stride * 8) + i * 4;
          if constexpr (ragged) {
            result.words[half][i] = place * 8 < left ? read_once(from[half] + place) : uint4{0, 0, 0, 0};
          } else {
            result.words[half][i] = read_once(from[half] + place);
          }
        }
      }
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int) const { return {{{0x3f800000u, 0x3f800000u}}}; }
    JITGEN_DEVICE void advance(int steps) {
      from[0] += steps * (stride * 8);
      from[1] += steps * (stride * 8);
      if constexpr (ragged) left -= steps * (stride * 64);
    }
  };

  static JITGEN_DEVICE Offsets offsets(const Scales&, int) { return {}; }

  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = codes.words[half][step / 2];
      a[half] = step % 2 ? words.z : words.x;
      a[half + 2] = step % 2 ? words.w : words.y;
    }
  }
};

}  // namespace jitgen
