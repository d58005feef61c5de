// Decoders of weights for the tiles: quantised blocks are read as they are stored, dense ones from a panel.
//
// A decoder turns `bytes` bytes of a block's 16 rows into `steps` sets of weights, each for one element of x;
// element(step) says for which. Codes become whole numbers, which are exact in bfloat16, and the scale of a group is
// applied to the group's sum.
//
// 4-bit codes are looked up in a table in one register (VPERMPS for floats, as in PyTorch's int4 kernel; VPERMW for two
// bfloat16 at once). The instruction ignores the bits above the index, so that codes only have to be shifted.
#pragma once

#include "jitgen/gemm_integers.hpp"

namespace jitgen {
namespace gemm {

// -------------------------------------------------------------------------------------------------------- decoders

// A block of `Element`s that needs no decoding: dense weights after packing.
constexpr int ready_steps = 4;
template <class Compute>
struct Ready {
  static constexpr int steps = ready_steps;
  static constexpr bool corrected = false;
  static constexpr int bytes = steps * block_rows * sizeof(typename Compute::Element);
  const char* at;

  JITGEN_INLINE int element(int step) { return step; }
  inline __attribute__((always_inline)) void group(const uint8_t*) {}
  inline __attribute__((always_inline)) void open(const char* from) { at = from; }
  inline __attribute__((always_inline)) void take(int step, typename Compute::Weights (&w)[Compute::vectors]) const {
    for (int v = 0; v < Compute::vectors; ++v) {
      w[v] = load_vector<typename Compute::Weights>(at + (step * Compute::vectors + v) * vector_bytes);
    }
  }
};

// 4-bit codes, eight k's of each row in a word. The code at bit 4j is of k = 2j for j < 4 and of k = 2(j - 4) + 1 for
// the others, so that a shifted word has the pair (k, k + 1) in its halves. Without zero-points (not `zeroed`) codes
// are stored plus 8.
template <class Compute, bool zeroed>
struct Nibbles;

// 8-bit codes, four k's of each row in a word, in the order 0, 2, 1, 3: a shifted word has a pair in its halves here
// too. Codes are stored plus 128.
template <class Compute>
struct Bytes;

namespace detail {

// `count` small unsigned numbers as floats, exactly: each is written to the low bits of 2^23, and 2^23 is subtracted.
constexpr uint32_t magic = 0x4b000000u;
constexpr float magic_value = 8388608.0f;

JITGEN_INLINE Floats small_to_float(Words low_bits, Floats offset) { return (Floats)(low_bits | magic) - offset; }

// Floats unchanged, or widened to the doubles of a block.
JITGEN_INLINE void give(const Floats (&from)[block_rows / float_lanes], Floats (&to)[block_rows / float_lanes]) {
  for (int v = 0; v < block_rows / float_lanes; ++v) to[v] = from[v];
}
JITGEN_INLINE void give(const Floats (&from)[block_rows / float_lanes], Doubles (&to)[block_rows / double_lanes]) {
  for (int row = 0; row < block_rows; ++row) {
    to[row / double_lanes][row % double_lanes] = from[row / float_lanes][row % float_lanes];
  }
}

}  // namespace detail

template <class Compute, bool zeroed>
struct Nibbles {
  static constexpr int steps = 8;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  static constexpr int vectors = block_rows / float_lanes;
  Words raw[vectors];
  Floats offset[vectors];

  JITGEN_INLINE int element(int step) { return step < 4 ? 2 * step : 2 * step - 7; }
  inline __attribute__((always_inline)) void group(const uint8_t* zeros) {
    for (int v = 0; v < vectors; ++v) {
      offset[v] = splat(detail::magic_value + 8.0f);
      if (zeroed) offset[v] = (Floats)(widen_bytes(zeros + v * float_lanes) | detail::magic);
#if defined(JITGEN_AVX512)
      offset[v] -= splat(detail::magic_value);
#endif
    }
  }
  inline __attribute__((always_inline)) void open(const char* from) {
    for (int v = 0; v < vectors; ++v) raw[v] = load_vector<Words>(from + v * vector_bytes);
  }
  inline __attribute__((always_inline)) void take(int step, typename Compute::Weights (&w)[Compute::vectors]) const {
    Floats codes[vectors];
    for (int v = 0; v < vectors; ++v) {
#if defined(JITGEN_AVX512)
      constexpr float first = zeroed ? 0 : -8;
      const Floats table = Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
      codes[v] = look_up(table, raw[v] >> (4 * step));
      if (zeroed) codes[v] -= offset[v];
#else
      codes[v] = detail::small_to_float(raw[v] >> (4 * step) & 15u, offset[v]);
#endif
    }
    detail::give(codes, w);
  }
};

template <class Compute>
struct Bytes {
  static constexpr int steps = 4;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  static constexpr int vectors = block_rows / float_lanes;
  Words raw[vectors];

  JITGEN_INLINE int element(int step) { return step == 1 ? 2 : step == 2 ? 1 : step; }
  inline __attribute__((always_inline)) void group(const uint8_t*) {}
  inline __attribute__((always_inline)) void open(const char* from) {
    for (int v = 0; v < vectors; ++v) raw[v] = load_vector<Words>(from + v * vector_bytes);
  }
  inline __attribute__((always_inline)) void take(int step, typename Compute::Weights (&w)[Compute::vectors]) const {
    Floats codes[vectors];
    for (int v = 0; v < vectors; ++v) {
      codes[v] = detail::small_to_float(raw[v] >> (8 * step) & 255u, splat(detail::magic_value + 128.0f));
    }
    detail::give(codes, w);
  }
};

// Bytes as pairs of integers of 16 bits.
template <class Compute>
struct ShortBytes {
  static constexpr int steps = 2;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  static constexpr int vectors = Compute::vectors;
  Words raw[vectors];

  JITGEN_INLINE int element(int step) { return step; }
  inline __attribute__((always_inline)) void group(const uint8_t*) {}
  inline __attribute__((always_inline)) void open(const char* from) {
    for (int v = 0; v < vectors; ++v) raw[v] = load_vector<Words>(from + v * vector_bytes);
  }
  inline __attribute__((always_inline)) void take(int step, Halves (&w)[vectors]) const {
    for (int v = 0; v < vectors; ++v) w[v] = (Halves)(raw[v] >> (8 * step) & 0x00ff00ffu) - uint16_t(128);
  }
};

#if defined(JITGEN_AVX512)

// Nibbles and bytes as pairs of bfloat16.
template <bool zeroed>
struct PairedNibbles {
  static constexpr int steps = 4;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  Words raw;
  Halves offset;

  JITGEN_INLINE int element(int step) { return step; }
  // The table's index is code + 16 - zero-point: 1 to 31.
  inline __attribute__((always_inline)) void group(const uint8_t* zeros) {
    if (!zeroed) return;
    const Words zero = widen_bytes(zeros);
    offset = 16 - (Halves)(zero | zero << 16);
  }
  inline __attribute__((always_inline)) void open(const char* from) { raw = load_vector<Words>(from); }
  inline __attribute__((always_inline)) void take(int step, Words (&w)[1]) const {
    // The numbers from -16 to 15 as bfloat16. Of the sixteen from -8 on, twice, only the lower four bits choose.
    const Halves signs = {0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0,
                          0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                          0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const Halves twice = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
                          0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                          0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const Halves shifted = (Halves)raw >> (4 * step);
    w[0] = zeroed ? look_up(signs, (Words)((shifted & 15) + offset)) : look_up(twice, (Words)shifted);
  }
};

// The same for one or two rows of x, where a look-up costs more than a multiplication. Codes are decoded as if every
// zero-point were 8, and the tile subtracts `zero` times the sum of x.
struct CorrectedNibbles : PairedNibbles<false> {
  static constexpr bool corrected = true;
  Floats zero;

  inline __attribute__((always_inline)) void group(const uint8_t* zeros) {
    zero = (Floats)(widen_bytes(zeros) | detail::magic) - splat(detail::magic_value + 8.0f);
  }
};

struct PairedBytes {
  static constexpr int steps = 2;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  Words raw;

  JITGEN_INLINE int element(int step) { return step; }
  inline __attribute__((always_inline)) void group(const uint8_t*) {}
  inline __attribute__((always_inline)) void open(const char* from) { raw = load_vector<Words>(from); }
  // A whole number up to 128 has only zeros in the lower half of its float; the upper half is its bfloat16.
  inline __attribute__((always_inline)) void take(int step, Words (&w)[1]) const {
    const Floats offset = splat(detail::magic_value + 128.0f);
    const Words even = (Words)detail::small_to_float(raw >> (8 * step) & 255u, offset);
    const Words odd = (Words)detail::small_to_float(raw >> (8 * step + 16) & 255u, offset);
    w[0] = even >> 16 | (odd & 0xffff0000u);
  }
};

// The same for one or two rows of x, where decoding costs more than multiplying. A code is the sum of its lower nibble
// and of 16 times its upper one minus 128. Both terms are looked up, and both are multiplied.
struct SplitBytes {
  static constexpr int steps = 4;
  static constexpr int bytes = 64;
  static constexpr bool corrected = false;
  Words raw;

  JITGEN_INLINE int element(int step) { return step / 2; }
  inline __attribute__((always_inline)) void group(const uint8_t*) {}
  inline __attribute__((always_inline)) void open(const char* from) { raw = load_vector<Words>(from); }
  inline __attribute__((always_inline)) void take(int step, Words (&w)[1]) const {
    const Halves lower = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
                          0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                          0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const Halves upper = {0xc300, 0xc2e0, 0xc2c0, 0xc2a0, 0xc280, 0xc240, 0xc200, 0xc180, 0x0000, 0x4180, 0x4200,
                          0x4240, 0x4280, 0x42a0, 0x42c0, 0x42e0, 0xc300, 0xc2e0, 0xc2c0, 0xc2a0, 0xc280, 0xc240,
                          0xc200, 0xc180, 0x0000, 0x4180, 0x4200, 0x4240, 0x4280, 0x42a0, 0x42c0, 0x42e0};
    w[0] = look_up(step % 2 == 0 ? lower : upper, (Words)((Halves)raw >> (4 * step)));
  }
};

#endif

// -------------------------------------------------------------------------------- which decoder, by the rows of a tile

namespace detail {

// Numbers decoded one by one, pairs of bfloat16, pairs for one or two rows of x, or pairs of integers.
enum Form { single, paired, paired_few, shorts };

template <class Compute, int rows>
constexpr Form form_of() {
  if (same<typename Compute::Element, ShortPair>) return shorts;
  if (Compute::per_element == 1) return single;
  return rows <= 2 ? paired_few : paired;
}

template <class Compute, int bits, bool zeroed, Form form>
struct Choice {
  using type = Nibbles<Compute, zeroed>;
};
template <class Compute>
struct Choice<Compute, 8, false, single> {
  using type = Bytes<Compute>;
};
template <class Compute>
struct Choice<Compute, 8, false, shorts> {
  using type = ShortBytes<Compute>;
};
#if defined(JITGEN_AVX512)
template <class Compute, bool zeroed, Form form>
struct Choice<Compute, 4, zeroed, form> {
  using type = PairedNibbles<zeroed>;
};
template <class Compute, bool zeroed>
struct Choice<Compute, 4, zeroed, single> {
  using type = Nibbles<Compute, zeroed>;
};
template <class Compute>
struct Choice<Compute, 4, true, paired_few> {
  using type = CorrectedNibbles;
};
template <class Compute>
struct Choice<Compute, 8, false, paired> {
  using type = PairedBytes;
};
template <class Compute>
struct Choice<Compute, 8, false, paired_few> {
  using type = SplitBytes;
};
#endif

}  // namespace detail

// `elements`: elements of x for the weights that are decoded at once.
template <class Compute, int bits, bool zeroed>
struct Decoder {
  using Zero = uint8_t;
  static constexpr int elements = 64 * 8 / bits / block_rows / Compute::per_element;
  template <int rows>
  using type = typename detail::Choice<Compute, bits, zeroed, detail::form_of<Compute, rows>()>::type;
};
template <class Compute>
struct Panel {
  using Zero = uint8_t;
  static constexpr int elements = ready_steps;
  template <int rows>
  using type = Ready<Compute>;
};

}  // namespace gemm
}  // namespace jitgen
