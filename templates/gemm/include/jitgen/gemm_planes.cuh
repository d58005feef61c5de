// Quantised weights in bit planes, in the layout "mma" (jitgen/quant/layouts/planes.py): from memory to matrix fragments
// of 16-bit floats for gemm_mma.cuh, and to floats for gemm_simt.cuh. The members are those of QuantWeight in
// gemm_quant.cuh.
//
// A chunk is 16 rows of the weight by 64 k's, and a lane has 32 codes of it: for each plane of p bits p words. Codes are
// put together from the planes in pairs, one code in each half of a word, and decoded by gemm_codes.cuh.
#pragma once

#include "jitgen/gemm_codes.cuh"

namespace jitgen {

// Two neighbouring scales or zero-points, as they are in memory.
template <class Number>
struct alignas(2 * sizeof(Number)) NumberPair {
  Number first, second;
};
template <>
struct alignas(4) NumberPair<bfloat16> {
  uint32_t both;
};
template <class Number>
JITGEN_DEVICE float2 unpack_pair(NumberPair<Number> pair) {
  return {number_of(pair.first), number_of(pair.second)};
}
JITGEN_DEVICE float2 unpack_pair(NumberPair<bfloat16> pair) { return unpack_pair(pair.both); }
template <>
struct alignas(2) NumberPair<E8m0> {
  uint16_t both;
};
JITGEN_DEVICE float2 unpack_pair(NumberPair<E8m0> pair) {
  return {number_of(E8m0{uint8_t(pair.both)}), number_of(E8m0{uint8_t(pair.both >> 8)})};
}
JITGEN_DEVICE float2 unpack_pair(NumberPair<E4m3> pair) { return numbers_of(pair.first, pair.second); }

JITGEN_DEVICE uint32_t read_once(const uint32_t* address) {
  uint32_t word;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}
JITGEN_DEVICE uint2 read_once(const uint2* address) {
  uint2 word;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(address));
  return word;
}

// The codes of a lane in a chunk of `bits` bits. Planes are the powers of two that add up to `bits`, widest first.
template <int bits>
struct PlaneWords {
  uint32_t words[bits];

  // Reads them from the words of the chunk; those of the plane of p bits are 32 p words from 32 times the wider ones on.
  // `load` reads a uint32_t, uint2 or uint4 at an address, which may be in shared memory.
  template <class Load>
  JITGEN_DEVICE void read(const uint32_t* chunk, int lane, const Load& load) {
    if constexpr ((bits & 8) != 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) read_four(0 + 4 * half, chunk + half * 128 + lane * 4, load);
    }
    if constexpr ((bits & 4) != 0) read_four(bits & 8, chunk + (bits & 8) * 32 + lane * 4, load);
    if constexpr ((bits & 2) != 0) {
      const uint2 two = load(reinterpret_cast<const uint2*>(chunk + (bits & 12) * 32 + lane * 2));
      words[bits & 12] = two.x;
      words[(bits & 12) + 1] = two.y;
    }
    if constexpr ((bits & 1) != 0) words[bits & 14] = load(chunk + (bits & 14) * 32 + lane);
  }
  JITGEN_DEVICE void read(const uint32_t* chunk, int lane) {
    read(chunk, lane, [](const auto* address) { return read_once(address); });
  }

  // The pair of codes of register `number` (0..15, a constant) of the chunk's four fragments, shifted to bit `up`, with
  // the bits of `base` besides; of a code only the lowest `count` bits.
  template <int up = 0, uint32_t base = 0, int count = bits>
  JITGEN_DEVICE uint32_t pair(int number) const {
    constexpr int widest = bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1;
    uint32_t codes = shifted<widest, 0, up>(number);
    if constexpr (base != 0) {
      codes = and_or<mask_of(widest, 0, up, count), base>(codes);
    } else {
      codes &= mask_of(widest, 0, up, count);
    }
    if constexpr (widest > 4 && (bits & 4) != 0) add_plane<4, bits & 8, up, count>(codes, number);
    if constexpr (widest > 2 && (bits & 2) != 0) add_plane<2, bits & 12, up, count>(codes, number);
    if constexpr (widest > 1 && (bits & 1) != 0) add_plane<1, bits & 14, up, count>(codes, number);
    return codes;
  }

  // The highest bits of that pair of codes, in the highest bits of the halves.
  JITGEN_DEVICE uint32_t signs(int number) const {
    constexpr int width = bits & -bits, first = bits - width;
    return shifted<width, first, 16 - bits>(number) & 0x80008000u;
  }

  // A pair in whose halves the code of one register is in the mantissa of a bfloat16, the exponent being such that the
  // code counts as it is: the number is the code, times `step`, plus 2^placed_exponent. Several registers of a word are
  // taken with one shift, so that their codes are at several bits of the mantissa.
  static constexpr bool placed = bits <= 2;
  static constexpr int fields = bits == 2 ? 3 : 5, lowest = bits == 2 ? 1 : 2;  // of a shift; the bit of the first one
  static JITGEN_DEVICE constexpr int place_of(int number) { return lowest + number % (16 / bits) % fields * bits; }
  template <int step>
  static JITGEN_DEVICE constexpr int placed_exponent(int number) { return 7 - place_of(number) + (step - 1); }
  template <int step>
  JITGEN_DEVICE uint32_t placed_pair(int number) const {
    const int shift = number % (16 / bits) / fields * fields * bits - lowest;
    const uint32_t word = words[number / (16 / bits)];
    return ((shift >= 0 ? word >> shift : word << -shift) & masks[number % (16 / bits) % fields]) |
           uint32_t(127 + placed_exponent<step>(number)) * 0x00800080u;
  }
  // An instruction takes one constant, so that the masks must be registers: they are what they are plus `zero`, of which
  // the assembler does not know that it is 0.
  uint32_t masks[placed ? fields : 1];
  JITGEN_DEVICE void set_masks(uint32_t zero) {
    if constexpr (placed) {
#pragma unroll
      for (int i = 0; i < fields; ++i) masks[i] = (((1u << bits) - 1) * 0x00010001u << place_of(i)) + zero;
    }
  }

 private:
  template <class Load>
  JITGEN_DEVICE void read_four(int at, const uint32_t* from, const Load& load) {
    const uint4 four = load(reinterpret_cast<const uint4*>(from));
    words[at] = four.x;
    words[at + 1] = four.y;
    words[at + 2] = four.z;
    words[at + 3] = four.w;
  }
  // The bits of a plane; both its first word and its lowest bit in a code are `first`.
  static JITGEN_DEVICE constexpr uint32_t mask_of(int width, int first, int up, int count) {
    return (((1u << (first + width < count ? first + width : count)) - 1) & ~((1u << first) - 1)) * 0x00010001u << up;
  }
  template <int width, int first, int up>
  JITGEN_DEVICE uint32_t shifted(int number) const {
    constexpr int per_word = 16 / width;
    const uint32_t word = words[first + number / per_word];
    const int shift = number % per_word * width - first - up;
    return shift >= 0 ? word >> shift : word << -shift;
  }
  template <int width, int first, int up, int count>
  JITGEN_DEVICE void add_plane(uint32_t& codes, int number) const {
    codes |= shifted<width, first, up>(number) & mask_of(width, first, up, count);
  }
};

// `Element` is the dtype of x; in the simt mainloop it has no say. `Codes` is a kind of gemm_codes.cuh. With `Zero`
// uint8_t zero-points are whole numbers up to 127, or 255 for 8-bit codes; they may be floats, or NoZero. With `group`
// 0 all k's of a row share a scale. `factored`: whether a row has a float factor besides.
template <class ElementType, int bits_, class Codes_, class Zero_, class Scale_, int group_, bool factored_>
struct PlaneWeight {
  using Element = ElementType;
  using Sum = float;  // of products times scales
  using Kind = Codes_;
  using Zero = Zero_;
  using Scale = Scale_;
  using ScalePair = NumberPair<Scale>;
  using ZeroPair = NumberPair<Zero>;
  static JITGEN_DEVICE float2 load_pair(const Scale* two) { return {number_of(two[0]), number_of(two[1])}; }
  using Codes = PlaneWords<bits_>;
  static constexpr int bits = bits_, group = group_;
  static constexpr bool zero_points = !same<Zero, NoZero>, factored = factored_;
  static constexpr bool planes = true;
  static constexpr int tiles = 1;
  static constexpr bool constant = true;
  static constexpr int parts = group == 0 || group % 64 == 0 ? 1 : group % 32 == 0 ? 2 : 4;  // scales of a chunk's row
  static constexpr bool whole_zeros = same<Zero, uint8_t>;
  static constexpr bool paired = Kind::paired && (!zero_points || whole_zeros);
  // Whether fragments have weights times `1 / shrunk` instead of codes. Codes that are floats are multiplied by a power
  // of two in any case (gemm_codes.cuh), which then has the scale, a power of two itself, in it.
  static constexpr bool folded =
      Kind::floats && bits == 4 && group != 0 && same<Scale, E8m0> && is_bfloat16<Element>;
  static constexpr float shrunk = folded ? 65536.0f : 1.0f;  // 2^16, for scales up to 2^17

  const uint32_t* codes;
  const Scale* scales;
  const Zero* zeros;
  const float* factors;

  struct Scales {
    NumberPair<Scale> scale[parts];
    NumberPair<Zero> zero[zero_points ? parts : 1];
  };

  static JITGEN_DEVICE int token_of(int lane) { return lane % 8; }
  static JITGEN_DEVICE int unit_of(int lane) { return lane / 8; }
  static JITGEN_DEVICE void load_tokens(uint32_t (&b)[4], uint32_t address) { load_matrices(b, address); }
  static JITGEN_DEVICE int row_of(int lane, int, int half) { return lane / 4 + half * 8; }
  static JITGEN_DEVICE int chunks(int K) {
    constexpr int unit = group ? group : 64;
    return ((K + unit - 1) / unit * unit + 63) / 64;
  }
  static JITGEN_DEVICE int groups(int chunks) { return group == 0 ? 1 : (chunks * 64 + group - 1) / (group ? group : 1); }

  template <int stride>
  struct Walk {
    // Where the stride is a multiple of a group, the offset of a scale is linear in the step, as that of a code is.
    static constexpr int unit = group ? group : 1;
    static constexpr bool linear = group != 0 && stride * 64 % unit == 0 && (parts == 1 || 64 % unit == 0);
    const uint32_t* codes;
    const Scale* scales;
    const Zero* zeros;
    int first, lane;
    Codes empty;

    JITGEN_DEVICE void start(const PlaneWeight& weight, int tile, int chunks, int first_, int lane_) {
      first = first_;
      lane = lane_;
      empty.set_masks(uint32_t(chunks) >> 31);
      codes = weight.codes + (int64_t(tile) * chunks + first) * (32 * bits);
      const int64_t row = int64_t(tile) * groups(chunks) * 16 + lane / 4 * 2 + (linear ? first * 64 / unit * 16 : 0);
      scales = weight.scales + row;
      zeros = weight.zeros + row;
    }
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result = empty;
      result.read(codes + step * (stride * 32 * bits), lane);
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int step) const {
      Scales result;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        int place = 0;
        if constexpr (linear) {
          place = (step * (stride * 64 / unit) + part * (64 / parts) / unit) * 16;
        } else if constexpr (group != 0) {
          place = ((first + step * stride) * 64 + part * (64 / parts)) / unit * 16;
        }
        result.scale[part] = *reinterpret_cast<const NumberPair<Scale>*>(scales + place);
        if constexpr (zero_points) result.zero[part] = *reinterpret_cast<const NumberPair<Zero>*>(zeros + place);
      }
      return result;
    }
    JITGEN_DEVICE void advance(int steps) {
      codes += steps * (stride * 32 * bits);
      if constexpr (linear) {
        scales += steps * (stride * 64 / unit * 16);
        if constexpr (zero_points) zeros += steps * (stride * 64 / unit * 16);
      } else {
        first += steps * stride;
      }
    }
  };

  // Zero-points of rows g and g+8: whole numbers in both halves of a word, and floats. Where scales are folded into
  // fragments, what codes are multiplied by.
  struct Offsets {
    uint32_t row[2];
    float number[2];
  };
  static JITGEN_DEVICE Offsets offsets(const Scales& s, int part) {
    if constexpr (folded) {
      const uint32_t both = s.scale[part].both;
      return {{Kind::folded_scale(both & 0xffu), Kind::folded_scale(both >> 8)}, {0.0f, 0.0f}};
    } else if constexpr (!zero_points) {
      return {{0u, 0u}, {0.0f, 0.0f}};
    } else if constexpr (whole_zeros) {
      const uint32_t first = s.zero[part].first, second = s.zero[part].second;
      return {{first * 0x00010001u, second * 0x00010001u}, {float(int(first)), float(int(second))}};
    } else {
      const float2 both = unpack_pair(s.zero[part]);
      return {{0u, 0u}, {both.x, both.y}};
    }
  }

  // The bias that `fragment<false>` adds to codes, of all rows without zero-points, and of rows g and g+8 with them.
  static constexpr float common_bias = Kind::added;
  static constexpr bool placed = Codes::placed && !zero_points && Kind::step > 0;
  // Without zero-points, minus the bias of the codes of register `number` of a chunk, as a pair: what x is multiplied by
  // so that the bias is taken off.
  static JITGEN_DEVICE uint32_t minus_bias(int number) {
    const float bias = placed ? float(1 << Codes::template placed_exponent<Kind::step>(number)) - Kind::first_number
                              : common_bias;
    return (uint32_t(__float_as_int(-bias)) >> 16) * 0x00010001u;
  }
  static JITGEN_DEVICE float2 bias(const Scales& s, int part) {
    const Offsets zero = offsets(s, part);
    return {common_bias + zero.number[0], common_bias + zero.number[1]};
  }

  // The fragment of k16 step `step` (0..3) of the chunk: codes minus zero-points, rounded once if they are no numbers of
  // Element. Where not `exact`, codes plus `bias` in bfloat16, one instruction less for each pair.
  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets& offset, int = 0) {
    if constexpr (exact && paired) {
      numbers(a, codes, step, offset.row);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = step * 4 + i;
        if constexpr (exact) {
          const uint32_t pair = codes.pair(number);
          a[i] = pack_pair<Element>(Kind::number(pair & 0xffffu) - offset.number[i & 1],
                                    Kind::number(pair >> 16) - offset.number[i & 1]);
        } else if constexpr (placed) {
          a[i] = codes.template placed_pair<Kind::step>(number);
        } else {
          a[i] = codes.template pair<Kind::biased_shift, Kind::biased_exponent * 0x00010001u>(number);
        }
      }
    }
  }

  // The codes of register `number` of a chunk, which are floats, with sign and magnitude in their fields of Element.
  static JITGEN_DEVICE uint32_t wide_pair(const Codes& codes, int number) {
    if constexpr (bits == 4 && is_bfloat16<Element>) {
      return Kind::wide_pair(codes.words[number / 4] >> number % 4 / 2 * 8, number % 2);
    } else {
      return codes.template pair<Kind::template place<Element>, 0, bits - 1>(number) | codes.signs(number);
    }
  }

  // That fragment as pairs of numbers, less the zero-points of rows g and g+8 in both halves of a word, or times their
  // folded scales; for `paired`.
  static JITGEN_DEVICE void numbers(uint32_t (&a)[4], const Codes& codes, int step, const uint32_t (&zeros)[2]) {
    if constexpr (Kind::looked_up) {
      static_assert(bits == 4, "a word has the codes of a step");
      Kind::template pairs<Element>(a, codes.words[step]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = step * 4 + i;
        if constexpr (Kind::floats) {
          const uint32_t wide = wide_pair(codes, number);
          if constexpr (folded) {
            a[i] = fma_pair<Element>(wide, zeros[i & 1], minus_zeros);
          } else {
            a[i] = Kind::template rebias<Element>(wide);
          }
        } else {
          constexpr uint32_t base = Kind::template base_of<Element>;
          a[i] = Kind::template pair<Element>(codes.template pair<0, base>(number), zeros[i & 1]);
        }
      }
    }
  }

  // The factors of rows that are `tiles` tiles of 16 rows; those beyond are of no row.
  JITGEN_DEVICE float factor(int row, int tiles) const { return factors[smaller(row, tiles * 16 - 1)]; }
};

// The same weight for gemm_simt.cuh. A thread decodes what a lane of mma.sync would have of 16 rows by 16 k's.
template <class Weight, class Scalar_ = float>
struct SimtPlanes {
  using Scalar = Scalar_;
  Weight weight;

  template <int outer, int depth, int threads>
  struct Tile {
    static constexpr int total = outer / 16 * 32 * (depth / 16), count = (total + threads - 1) / threads;
    static_assert(outer % 16 == 0 && depth % 16 == 0, "");
    Scalar values[count][8];

    // Item `i` is of this row tile, k16 step and lane.
    static JITGEN_DEVICE int tile_of(int i) { return i / 32 / (depth / 16); }
    static JITGEN_DEVICE int step_of(int i) { return i / 32 % (depth / 16); }

    JITGEN_DEVICE void load(const SimtPlanes& from, int first, int limit, int k0, int K) {
      const Weight& weight = from.weight;
      const int chunks = Weight::chunks(K), groups = Weight::groups(chunks);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int place = threadIdx.x + i * threads, tile = first / 16 + tile_of(place), lane = place % 32;
        const int k = k0 + step_of(place) * 16, step = k / 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i][j] = Scalar(0);
        if (place >= total || tile * 16 >= limit || k >= K) continue;
        typename Weight::Codes codes;
        codes.read(weight.codes + (int64_t(tile) * chunks + step / 4) * (32 * Weight::bits), lane);
        const int64_t at = (int64_t(tile) * groups + (Weight::group ? k / (Weight::group ? Weight::group : 1) : 0)) * 16 +
                           lane / 4 * 2;
        uint32_t pairs[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if (s != step % 4) continue;
#pragma unroll
          for (int r = 0; r < 4; ++r) pairs[r] = codes.pair(s * 4 + r);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Scalar scale = Scalar(number_of(weight.scales[at + half])), zero = Scalar(0);
          if constexpr (Weight::factored) scale *= Scalar(weight.factors[tile * 16 + lane / 4 + half * 8]);
          if constexpr (Weight::zero_points) zero = Scalar(number_of(weight.zeros[at + half]));
#pragma unroll
          for (int r = half; r < 4; r += 2) {
            values[i][2 * r] = (Scalar(Weight::Kind::number(pairs[r] & 0xffffu)) - zero) * scale;
            values[i][2 * r + 1] = (Scalar(Weight::Kind::number(pairs[r] >> 16)) - zero) * scale;
          }
        }
      }
    }
    template <int stride>
    JITGEN_DEVICE void store(Scalar* to) const {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int place = threadIdx.x + i * threads, lane = place % 32;
        if (place >= total) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int k = step_of(place) * 16 + lane % 4 * 2 + j % 2 + j / 4 * 8;
          to[k * stride + tile_of(place) * 16 + lane / 4 + j / 2 % 2 * 8] = values[i][j];
        }
      }
    }
  };
};

}  // namespace jitgen
