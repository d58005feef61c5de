// Sums of products of small integers, several neighbours in k at once. They are exact modulo 2^32: nothing saturates.
//
//   Shorts     two integers of 16 bits (VPMADDWD), to which those of 8 bits are widened
//   Scaled     the same for weights with scales, whose groups have exact sums that are then added up as floats
//   Quads      four of 8 bits (VPDPBUSD), where the processor has that: one operand is unsigned, the other one signed
//
// Weights of int8 with an activation of int8 are made unsigned by adding 128, and 128 times the sum of the activation's
// row is taken off at the end.
#pragma once

#include "jitgen/gemm_compute.hpp"

namespace jitgen {

// ------------------------------------------------------------------------------------------------ elements as vectors

// As many integers of 16 bits as a vector has.
JITGEN_INLINE void widen(const int16_t* from, Halves& to) { to = load_vector<Halves>(from); }
JITGEN_INLINE void widen(const int8_t* from, Halves& to) {
  typedef int8_t Narrow __attribute__((vector_size(vector_bytes / 2), may_alias, aligned(1)));
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  asm("vpmovsxbw %1, %0" : "=v"(to) : "m"(*reinterpret_cast<const Narrow*>(from)));
#else
  for (int lane = 0; lane < vector_bytes / 2; ++lane) to[lane] = uint16_t(from[lane]);
#endif
}
JITGEN_INLINE void widen(const uint8_t* from, Halves& to) {
  typedef uint8_t Narrow __attribute__((vector_size(vector_bytes / 2), may_alias, aligned(1)));
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  asm("vpmovzxbw %1, %0" : "=v"(to) : "m"(*reinterpret_cast<const Narrow*>(from)));
#else
  for (int lane = 0; lane < vector_bytes / 2; ++lane) to[lane] = from[lane];
#endif
}

// -------------------------------------------------------------------------------------------------------- arithmetics

namespace gemm {

// Two neighbours in k: integers of 8 and 16 bits. A lane's two products and their sum are exact modulo 2^32.
struct Shorts {
  using Element = ShortPair;
  using Accumulator = int32_t;
  using Vector = Ints;
  using Weights = Halves;
  static constexpr int per_element = 2;
  static constexpr int vectors = block_rows / float_lanes;
  static constexpr int most_rows = vectors == 1 ? 24 : vectors == 2 ? 6 : 2;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;

  // The element of `live` numbers, each `stride` from the one before.
  template <class Storage>
  JITGEN_INLINE Element joined(const Storage* w, int64_t stride, int64_t live) {
    return Element(uint32_t(uint16_t(w[0])) | (live > 1 ? uint32_t(uint16_t(w[stride])) << 16 : 0u));
  }
  template <class Storage>
  JITGEN_INLINE Element of_x(const Storage* x, int64_t e) {
    return joined(x + 2 * e, 1, 2);
  }
  // A vector of elements of one row.
  template <class Storage>
  JITGEN_INLINE Weights along(const Storage* w) {
    Weights elements;
    widen(w, elements);
    return elements;
  }
  // A vector of elements of neighbouring rows.
  template <class Storage>
  JITGEN_INLINE Weights across(const Storage* w, int64_t stride_k, int64_t live) {
    Ints low, high = {};
    widen(w, low);
    if (live > 1) widen(w + stride_k, high);
    return (Weights)((low & 0xffff) | high << 16);
  }
};

// Integers times quantised weights: the sum of a group is an integer, and sums of groups are floats.
template <class Compute>
struct Scaled : Compute {
  using Accumulator = float;
};

// Four neighbours in k. `x_signed`, `w_signed`: whether the operands are int8 rather than uint8; not both are unsigned.
template <bool x_signed, bool w_signed>
struct Quads {
  static_assert(x_signed || w_signed, "a product of unsigned bytes is for Shorts");
  using Element = Select<x_signed, SignedByteQuad, ByteQuad>;
  using Accumulator = int32_t;
  using Vector = Ints;
  using Weights = Select<x_signed, Octets, SignedOctets>;
  static constexpr int per_element = 4;
  static constexpr int vectors = block_rows / float_lanes;
  static constexpr int most_rows = vectors == 1 ? 24 : vectors == 2 ? 6 : 2;
  static constexpr int tile_rows = most_rows;
  static constexpr int fewest_rows = 1;
  static constexpr bool x_is_signed = x_signed;
  // What is added to weights to make them unsigned.
  static constexpr int offset = x_signed && w_signed ? 128 : 0;
  static constexpr uint32_t offsets = offset * 0x01010101u;

  template <class Storage>
  JITGEN_INLINE Element joined(const Storage* w, int64_t stride, int64_t live) {
    uint32_t bytes = 0;
    for (int64_t i = 0; i < 4; ++i) bytes |= i < live ? uint32_t(uint8_t(w[i * stride])) << 8 * i : 0u;
    return Element(bytes ^ offsets);
  }
  template <class Storage>
  JITGEN_INLINE Element of_x(const Storage* x, int64_t e) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, x + 4 * e, sizeof(bytes));
    return Element(bytes);
  }
  template <class Storage>
  JITGEN_INLINE Weights along(const Storage* w) {
    return (Weights)(load_vector<Words>(w) ^ offsets);
  }
  template <class Storage>
  JITGEN_INLINE Weights across(const Storage* w, int64_t stride_k, int64_t live) {
    Words bytes = {};
    for (int64_t i = 0; i < 4 && i < live; ++i) {
      Ints byte;
      widen(w + i * stride_k, byte);
      bytes |= ((Words)byte & 255u) << 8 * i;
    }
    return (Weights)(bytes ^ offsets);
  }
};

namespace detail {

// What is added to weights before they are multiplied.
template <class Compute>
constexpr decltype(+Compute::offset) offset_of(int) {
  return Compute::offset;
}
template <class Compute>
constexpr int offset_of(long) {
  return 0;
}

}  // namespace detail

}  // namespace gemm
}  // namespace jitgen
