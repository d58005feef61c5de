// Dense bfloat16 or float16 weights for mma_gemm of gemm_mma.cuh, loaded from global memory as the products' fragments.
// DenseRows are contiguous along k, DenseColumns along their rows.
//
// k's can be summed in any order that is the same for weights and x. In its own order a product gives lane 4g+t the k's
// 2t, 2t+1, 2t+8 and 2t+9 of each 16. Here the lane takes 8t..8t+7 of each 32 k's, four for each of two products. It
// then reads sixteen contiguous bytes of x, and of a weight that is contiguous along k.
#pragma once

#include "jitgen/bytes.cuh"
#include "jitgen/gemm_activation.cuh"

namespace jitgen {

// What both have in common. `ragged`: whether K may not be a multiple of 64. `constant`: no kernel writes it, so it can be
// read before the preceding kernel ends.
template <class ElementType, int tiles_, bool ragged_, bool constant_ = false>
struct DenseOperand {
  using Element = ElementType;
  using Sum = typename SumType<Element>::type;
  static constexpr int bits = 16, group = 0, parts = 1, tiles = tiles_;
  static constexpr float common_bias = 0.0f, shrunk = 1.0f;
  static constexpr bool zero_points = false, factored = false, folded = false, constant = constant_, ragged = ragged_;

  const Element* pointer;
  int64_t stride;  // of the dimension that is not contiguous, in elements
  int rows, length;

  struct Scales {
    uint2 scale[1];
  };
  struct Offsets {};

  static JITGEN_DEVICE int chunks(int K) { return (K + 63) / 64; }
  static JITGEN_DEVICE Offsets offsets(const Scales&, int) { return {}; }
  static JITGEN_DEVICE int token_of(int lane) { return lane / 4; }
  static JITGEN_DEVICE int unit_of(int lane) { return lane % 4; }
  static JITGEN_DEVICE void load_tokens(uint32_t (&b)[4], uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
  }
};

// [rows, K], contiguous along K. Rows are aligned to 16 bytes, and K is a multiple of 8.
template <class ElementType, bool ragged, bool constant = false>
struct DenseRows : DenseOperand<ElementType, 1, ragged, constant> {
  using Operand = DenseOperand<ElementType, 1, ragged, constant>;
  using typename Operand::Offsets;
  using typename Operand::Scales;
  using Operand::length;
  using Operand::pointer;
  using Operand::rows;
  using Operand::stride;

  // Fetches the elements from `first` on of rows n0 .. n0 + count, and `most` of each at most, into the L2 cache.
  JITGEN_DEVICE void fetch_ahead(int n0, int count, int first, int most) const {
    const int live = smaller(length - first, most);
    for (int row = threadIdx.x; row < smaller(rows - n0, count); row += blockDim.x) {
      prefetch(pointer + ((n0 + row) * stride + first), live > 0 ? live : 0, 0, 1);
    }
  }

  struct Codes {
    uint4 words[2][2];  // of rows g and g+8, of both halves of the chunk
  };

  template <int stride>
  struct Walk {
    const uint4* from[2];
    int left;  // k's from the lane's first one to K

    JITGEN_DEVICE void start(const DenseRows& weight, int tile, int, int first, int lane) {
      const int k = first * 64 + lane % 4 * 8;
      left = weight.length - k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = smaller(tile * 16 + lane / 4 + half * 8, weight.rows - 1);
        from[half] = reinterpret_cast<const uint4*>(weight.pointer + (row * weight.stride + k));
      }
    }
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = step * (stride * 8) + i * 4;
          result.words[half][i] = uint4{0, 0, 0, 0};
          if (!ragged || place * 8 < left) result.words[half][i] = read_own_line(from[half] + place);
        }
      }
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int) const { return {{{0x3f800000u, 0x3f800000u}}}; }
    JITGEN_DEVICE void advance(int steps) {
      from[0] += steps * (stride * 8);
      from[1] += steps * (stride * 8);
      left -= steps * (stride * 64);
    }
  };

  static JITGEN_DEVICE int row_of(int lane, int, int half) { return lane / 4 + half * 8; }

  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets&, int) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = codes.words[half][step / 2];
      a[half] = step % 2 ? words.z : words.x;
      a[half + 2] = step % 2 ? words.w : words.y;
    }
  }
};

// [rows, K], contiguous along the rows, which are a multiple of 8. Each k is aligned to 16 bytes. A lane reads rows
// 8g..8g+7 of 64 at each of its k's. Tile r of the four has rows 8g+2r and 8g+2r+1 as its rows g and g+8.
template <class ElementType, bool ragged>
struct DenseColumns : DenseOperand<ElementType, 4, ragged> {
  using typename DenseOperand<ElementType, 4, ragged>::Scales;
  using typename DenseOperand<ElementType, 4, ragged>::Offsets;

  JITGEN_DEVICE void fetch_ahead(int, int, int, int) const {}

  struct Codes {
    uint4 words[2][8];  // of the lane's k's, in both halves of the chunk
  };

  template <int stride>
  struct Walk {
    const ElementType* from;
    int64_t line;  // from one k to the next
    int left;

    JITGEN_DEVICE void start(const DenseColumns& weight, int tile, int, int first, int lane) {
      const int k = first * 64 + lane % 4 * 8, row = tile * 16 + lane / 4 * 8;
      line = weight.stride;
      left = row < weight.rows ? weight.length - k : 0;
      from = weight.pointer + (left > 0 ? k * line + row : 0);
    }
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int place = step * (stride * 64) + i / 8 * 32 + i % 8;
        result.words[i / 8][i % 8] = uint4{0, 0, 0, 0};
        if (place < left) result.words[i / 8][i % 8] = read_own(reinterpret_cast<const uint4*>(from + place * line));
      }
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int) const { return {{{0x3f800000u, 0x3f800000u}}}; }
    JITGEN_DEVICE void advance(int steps) {
      from += steps * (stride * 64) * line;
      left -= steps * (stride * 64);
    }
  };

  static JITGEN_DEVICE int row_of(int lane, int tile, int half) { return lane / 4 * 8 + tile * 2 + half; }

  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets&, int tile) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int k = step % 2 * 4 + pair * 2;
      const uint32_t even = word(codes.words[step / 2][k], tile), odd = word(codes.words[step / 2][k + 1], tile);
      a[pair * 2] = __byte_perm(even, odd, 0x5410);
      a[pair * 2 + 1] = __byte_perm(even, odd, 0x7632);
    }
  }
  static JITGEN_DEVICE uint32_t word(const uint4& words, int place) {  // place: a constant
    return place == 0 ? words.x : place == 1 ? words.y : place == 2 ? words.z : words.w;
  }
};

}  // namespace jitgen
