// Quantised weights in the "mma" layout (jitgen/quant/layouts/mma.py): from memory to matrix fragments of 16-bit
// floats.
//
// A chunk is 16 rows of the weight by 64 k's. A lane reads its codes of a chunk in one 16-byte load (4-bit codes) or
// two (int8), and its scales, of the rows g and g+8, in one more. Codes become floats by bit operations, as in the
// Marlin and FasterTransformer kernels: the code is written to the mantissa of a power of two, which is removed by a
// subtraction, or through the sum of x.
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

template <class T>
struct PairType;
template <>
struct PairType<bfloat16> {
  using type = uint32_t;
};
template <>
struct PairType<float> {
  using type = uint2;
};

// The words of a lane's codes of a chunk.
template <int loads>
struct CodeWords {
  uint4 words[loads];
  JITGEN_DEVICE uint32_t word(int place) const {  // place: a constant
    const uint4 w = words[place / 4];
    return place % 4 == 0 ? w.x : place % 4 == 1 ? w.y : place % 4 == 2 ? w.z : w.w;
  }
};
// Its scales of two rows, and their zero-points.
template <class ScalePair, int parts, bool zero_points>
struct ScalesOfRows {
  ScalePair scale[parts];
  uint16_t zero[zero_points ? parts : 1];
};

// `Element` is the dtype of x. Codes have 4 `bits`, unsigned, or 8, in two's complement. Without `zero_points` the zero
// of a 4-bit format is its middle code, 8. `group` k's share a scale; with 0 all k's of a row do.
template <class ElementType, int bits_, bool zero_points_, class Scale_, int group_>
struct QuantWeight {
  using Element = ElementType;
  using Sum = float;  // of products times scales
  using Scale = Scale_;
  using Zero = uint8_t;
  using ZeroPair = uint16_t;
  using ScalePair = typename PairType<Scale>::type;
  static JITGEN_DEVICE float2 load_pair(const Scale* two) {
    return unpack_pair(__ldg(reinterpret_cast<const ScalePair*>(two)));
  }
  static constexpr int bits = bits_;
  static constexpr bool zero_points = zero_points_;
  static constexpr int group = group_;
  static constexpr int loads = bits / 4;
  static constexpr bool planes = false;    // whether codes are in bit planes (gemm_planes.cuh)
  static constexpr bool factored = false;  // whether a row has a factor besides its scales
  static constexpr bool folded = false;    // whether fragments have scaled weights (gemm_planes.cuh)
  static constexpr float shrunk = 1.0f;    // the factor of the sums of what fragments have
  static constexpr int tiles = 1;         // tiles of 16 rows that a lane reads at once
  static constexpr bool constant = true;  // no kernel writes it, so it can be read before the preceding kernel ends
  static constexpr int parts = group == 0 || group % 64 == 0 ? 1 : 2;  // scales of a row of a chunk

  const uint4* codes;
  const Scale* scales;
  const uint8_t* zeros;

  using Codes = CodeWords<loads>;
  using Scales = ScalesOfRows<ScalePair, parts, zero_points>;

  // The fragments of x for two k16 steps are four 8x8 matrices: lane l gives the address of row l % 8 of matrix l / 8.
  static JITGEN_DEVICE int token_of(int lane) { return lane % 8; }
  static JITGEN_DEVICE int unit_of(int lane) { return lane / 8; }
  static JITGEN_DEVICE void load_tokens(uint32_t (&b)[4], uint32_t address) { load_matrices(b, address); }

  // The row of a lane's sums within its tile, for the upper or the lower half of the products.
  static JITGEN_DEVICE int row_of(int lane, int, int half) { return lane / 4 + half * 8; }

  // Chunks and groups of a row. K is padded to whole groups, and then to whole chunks.
  static JITGEN_DEVICE int chunks(int K) {
    constexpr int unit = group ? group : 64;
    return ((K + unit - 1) / unit * unit + 63) / 64;
  }
  static JITGEN_DEVICE int groups(int chunks) { return group == 0 ? 1 : (chunks * 64 + group - 1) / (group ? group : 1); }

  // One lane's iteration along a row tile: over the chunks first, first + stride, first + 2 stride ...
  template <int stride>
  struct Walk {
    // Where the stride is a multiple of a group, the offset of a scale is linear in the step, as that of a code is.
    static constexpr bool linear = group != 0 && stride * 64 % (group ? group : 1) == 0;
    const uint4* codes;
    const Scale* scales;
    const uint8_t* zeros;
    int first;

    JITGEN_DEVICE void start(const QuantWeight& weight, int tile, int chunks, int first_, int lane) {
      first = first_;
      codes = weight.codes + ((int64_t(tile) * chunks + first) * (32 * loads) + lane);
      const int64_t row = int64_t(tile) * groups(chunks) * 16 + lane / 4 * 2;
      const int skipped = linear && parts == 1 ? first * 64 / (group ? group : 1) * 16 : 0;
      scales = weight.scales + (row + skipped);
      zeros = weight.zeros + (row + skipped);
    }
    // `step` counts strides from `first`.
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result;
#pragma unroll
      for (int i = 0; i < loads; ++i) result.words[i] = read_once(codes + (step * (stride * loads) + i) * 32);
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int step) const {
      Scales result;
      constexpr int unit = group ? group : 1;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        int place = 0;
        if constexpr (linear && parts == 1) {
          place = step * (stride * 64 / unit);
        } else if constexpr (group != 0) {
          place = ((first + step * stride) * 64 + part * 32) / unit;
        }
        result.scale[part] = __ldg(reinterpret_cast<const ScalePair*>(scales + place * 16));
        if constexpr (zero_points) result.zero[part] = __ldg(reinterpret_cast<const uint16_t*>(zeros + place * 16));
      }
      return result;
    }
    JITGEN_DEVICE void advance(int steps) {
      codes += steps * (stride * loads * 32);
      if constexpr (linear && parts == 1) {
        scales += steps * (stride * 64 / (group ? group : 1) * 16);
        if constexpr (zero_points) zeros += steps * (stride * 64 / (group ? group : 1) * 16);
      } else {
        first += steps * stride;
      }
    }
  };

  static constexpr float common_bias = 136.0f;  // what `bias` is without zero-points
  // The bias that `fragment<false>` adds to codes, of rows g and g+8. It is 0 where the fragment is exact.
  static JITGEN_DEVICE float2 bias(const Scales& s, int part) {
    if constexpr (bits == 8) return {0.0f, 0.0f};
    if constexpr (!zero_points) return {136.0f, 136.0f};
    return {float(128 + (s.zero[part] & 0xff)), float(128 + (s.zero[part] >> 8))};
  }

  // The number that `fragment<true>` subtracts from codes, in both halves of a word, of rows g and g+8.
  struct Offsets {
    uint32_t row[2];
  };
  static JITGEN_DEVICE Offsets offsets(const Scales& s, int part) {
    if constexpr (zero_points) {
      const uint32_t zero = s.zero[part];
      return {{(zero & 0xffu) * 0x00010001u, (zero >> 8) * 0x00010001u}};
    }
    return {{0x00080008u, 0x00080008u}};
  }

  // The fragment of k16 step `step` (0..3) of the chunk. Where `exact`, it has codes minus zero-points. Otherwise it
  // has codes plus `bias` in bfloat16, which takes two instructions less for each pair.
  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets& offset, int = 0) {
    if constexpr (bits == 8) {
      int8_pairs(a[0], a[1], codes.word(step * 2));
      int8_pairs(a[2], a[3], codes.word(step * 2 + 1));
    } else if constexpr (is_bfloat16<Element>) {
      const uint32_t word = codes.word(step);
      constexpr uint32_t one = 0x3f803f80u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = and_or<0x000f000fu, 0x43004300u>(word >> (4 * i));  // 128 + code
        if constexpr (exact) a[i] = fma_pair<bfloat16>(a[i], one, 0xc300c300u | offset.row[i & 1]);
      }
    } else {
      static_assert(exact, "float16 fragments are exact");
      constexpr uint32_t one = 0x3c003c00u, sixteenth = 0x2c002c00u;
      const uint32_t word = codes.word(step);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t from = word >> (4 * i);
        a[i] = fma_pair<float16>(and_or<0x000f000fu, 0x64006400u>(from), one, 0xe400e400u | offset.row[0]);
        a[i + 1] =
            fma_pair<float16>(and_or<0x00f000f0u, 0x64006400u>(from), sixteenth, 0xd400d400u | offset.row[1] << 4);
      }
    }
  }

  // Converts the two's complement bytes (x.lo, y.lo, x.hi, y.hi) to two pairs of floats, exactly.
  static JITGEN_DEVICE void int8_pairs(uint32_t& x, uint32_t& y, uint32_t word) {
    x = int8_pair(word);
    y = int8_pair(word >> 8);
  }
  static JITGEN_DEVICE uint32_t int8_pair(uint32_t pair) {
    if constexpr (is_bfloat16<Element>) {
      // 128 + low seven bits, minus 128 or, of a negative code, 256.
      constexpr uint32_t minus_one = 0xbf80bf80u;
      return fma_pair<bfloat16>(and_or<0x00800080u, 0x43004300u>(pair), minus_one,
                                and_or<0x007f007fu, 0x43004300u>(pair));
    } else {
      constexpr uint32_t one = 0x3c003c00u;
      return fma_pair<float16>(and_xor<0x00ff00ffu, 0x64806480u>(pair), one, 0xe480e480u);  // 1024 + 128 + code
    }
  }
};

}  // namespace jitgen
