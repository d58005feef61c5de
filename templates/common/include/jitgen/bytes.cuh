// Products of operands of one byte: 8-bit integers, summed in int32, and 8-bit floats, summed in float32. Operands may
// differ in sign, or in the kind of float.
#pragma once

#include "jitgen/storage.cuh"
#include "jitgen/types.cuh"

namespace jitgen {

// The Element of a product of x of type X and a weight of type W, both of one byte.
template <class X, class W>
struct Bytes {
  uint8_t bits;
};
// The same, where sums of 8-bit floats may have the bits that tensor cores keep.
template <class X, class W>
struct FastBytes {
  uint8_t bits;
};
// Two neighbouring k's of such an operand.
template <class X, class W>
struct BytePair {
  uint16_t bits;
};

// What products of an Element are summed in.
template <class Element>
struct SumType {
  using type = float;
};
template <>
struct SumType<int8_t> {
  using type = int32_t;
};
template <>
struct SumType<uint8_t> {
  using type = int32_t;
};
template <class X, class W>
struct SumType<Bytes<X, W>> : SumType<X> {};
template <class X, class W>
struct SumType<FastBytes<X, W>> : SumType<X> {};
template <class X, class W>
struct SumType<BytePair<X, W>> : SumType<X> {};

template <class T>
constexpr bool is_integer = false;
template <>
constexpr bool is_integer<int8_t> = true;
template <>
constexpr bool is_integer<uint8_t> = true;

// The Element of a product of x of type X and a weight of type W of one size.
template <class X, class W>
using ProductElement = Select<sizeof(W) == 1, Bytes<X, W>, W>;

}  // namespace jitgen
