// Vectors of the target's full width, for tiles of products, written with the compilers' vector extensions.
// Multiply-accumulate is inline assembly, because kernels are compiled without floating-point contraction, and because
// the instruction can broadcast one element from memory to its lanes.
#pragma once

#include "jitgen/storage.hpp"

namespace jitgen {

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define JITGEN_AVX512 1
constexpr int vector_bytes = 64;
#elif defined(__AVX2__) && defined(__FMA__)
#define JITGEN_AVX2 1
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

constexpr int float_lanes = vector_bytes / 4;
constexpr int double_lanes = vector_bytes / 8;

typedef float Floats __attribute__((vector_size(vector_bytes), may_alias));
typedef double Doubles __attribute__((vector_size(vector_bytes), may_alias));
typedef int32_t Ints __attribute__((vector_size(vector_bytes), may_alias));
typedef int64_t Longs __attribute__((vector_size(vector_bytes), may_alias));
typedef uint32_t Words __attribute__((vector_size(vector_bytes), may_alias));
typedef uint16_t Halves __attribute__((vector_size(vector_bytes), may_alias));
typedef uint8_t Octets __attribute__((vector_size(vector_bytes), may_alias));
typedef int8_t SignedOctets __attribute__((vector_size(vector_bytes), may_alias));
typedef int32_t FloatOrder __attribute__((vector_size(vector_bytes)));
typedef int64_t DoubleOrder __attribute__((vector_size(vector_bytes)));

template <class Vector>
JITGEN_INLINE Vector load_vector(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof(Vector));
  return vector;
}
template <class Vector>
JITGEN_INLINE void store_vector(void* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof(Vector));
}

JITGEN_INLINE Floats splat(float x) { return x - Floats{}; }
JITGEN_INLINE Doubles splat(double x) { return x - Doubles{}; }
JITGEN_INLINE Ints splat(int32_t x) { return x - Ints{}; }
JITGEN_INLINE Longs splat(int64_t x) { return x - Longs{}; }
JITGEN_INLINE Words splat(uint32_t x) { return x - Words{}; }

// Neighbours of integers, the first in the lowest bits.
enum class ShortPair : uint32_t {};
enum class ByteQuad : uint32_t {};
enum class SignedByteQuad : uint32_t {};
// Signed; the sums of its first two and of its last two are 128 at most, or the bytes that they multiply are below 128.
enum class SmallByteQuad : uint32_t {};
JITGEN_INLINE Halves splat(ShortPair x) { return (Halves)splat(uint32_t(x)); }
JITGEN_INLINE Octets splat(ByteQuad x) { return (Octets)splat(uint32_t(x)); }
JITGEN_INLINE SignedOctets splat(SignedByteQuad x) { return (SignedOctets)splat(uint32_t(x)); }
struct SmallOctets {
  SignedOctets bytes;
};
JITGEN_INLINE SmallOctets splat(SmallByteQuad x) { return {(SignedOctets)splat(uint32_t(x))}; }

// Vectors that are converted to a vector of floats: with as many lanes, and a half or a quarter of the bytes.
typedef float NarrowFloats __attribute__((vector_size(vector_bytes / 2)));
typedef uint32_t NarrowWords __attribute__((vector_size(vector_bytes / 2)));
typedef uint16_t NarrowHalves __attribute__((vector_size(vector_bytes / 2), may_alias, aligned(1)));
typedef uint16_t NarrowestHalves __attribute__((vector_size(vector_bytes / 4), may_alias, aligned(1)));

// As many unsigned numbers as a vector has floats. This is inline assembly, because GCC 12 makes several
// instructions of such a conversion.
JITGEN_INLINE Words widen_halves(const void* from) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  Words to;
  asm("vpmovzxwd %1, %0" : "=v"(to) : "m"(*static_cast<const NarrowHalves*>(from)));
  return to;
#else
  return __builtin_convertvector(load_vector<NarrowHalves>(from), Words);
#endif
}
JITGEN_INLINE Words widen_bytes(const uint8_t* from) {
  Words to;
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  asm("vpmovzxbd %1, %0" : "=v"(to) : "m"(*reinterpret_cast<const NarrowestHalves*>(from)));
#else
  for (int lane = 0; lane < float_lanes; ++lane) to[lane] = from[lane];
#endif
  return to;
}

JITGEN_INLINE void widen(const float* from, Floats& to) { to = load_vector<Floats>(from); }
JITGEN_INLINE void widen(const double* from, Doubles& to) { to = load_vector<Doubles>(from); }
JITGEN_INLINE void widen(const float* from, Doubles& to) {
  to = __builtin_convertvector(load_vector<NarrowFloats>(from), Doubles);
}
JITGEN_INLINE void widen(const bfloat16* from, Floats& to) { to = (Floats)(widen_halves(from) << 16); }
JITGEN_INLINE void widen(const float16* from, Floats& to) {
#if defined(JITGEN_AVX512) || (defined(JITGEN_AVX2) && defined(__F16C__))
  asm("vcvtph2ps %1, %0" : "=v"(to) : "m"(*reinterpret_cast<const NarrowHalves*>(from)));
#else
  for (int lane = 0; lane < float_lanes; ++lane) to[lane] = jitgen::load(from[lane]);
#endif
}
JITGEN_INLINE void widen(const bfloat16* from, Doubles& to) {
  const NarrowWords bits = __builtin_convertvector(load_vector<NarrowestHalves>(from), NarrowWords) << 16;
  to = __builtin_convertvector((NarrowFloats)bits, Doubles);
}
JITGEN_INLINE void widen(const float16* from, Doubles& to) {
  for (int lane = 0; lane < double_lanes; ++lane) to[lane] = jitgen::load(from[lane]);
}

JITGEN_INLINE void widen(const int32_t* from, Ints& to) { to = load_vector<Ints>(from); }
JITGEN_INLINE void widen(const int64_t* from, Longs& to) { to = load_vector<Longs>(from); }
#define JITGEN_WIDEN_INTEGERS(T, name)                                                             \
  typedef T name __attribute__((vector_size(sizeof(T) * float_lanes), may_alias, aligned(1)));     \
  JITGEN_INLINE void widen(const T* from, Ints& to) {                                              \
    to = __builtin_convertvector(load_vector<name>(from), Ints);                                   \
  }
JITGEN_WIDEN_INTEGERS(uint8_t, NarrowUnsignedBytes)
JITGEN_WIDEN_INTEGERS(int8_t, NarrowBytes)
JITGEN_WIDEN_INTEGERS(int16_t, NarrowShorts)
#undef JITGEN_WIDEN_INTEGERS

// ------------------------------------------------------------------------------------------ multiply and accumulate

// acc + w * x for every lane, rounded once where the target has the instruction.
JITGEN_INLINE void accumulate(Floats& acc, Floats w, Floats x) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#else
  acc += w * x;
#endif
}
JITGEN_INLINE void accumulate(Doubles& acc, Doubles w, Doubles x) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  asm("vfmadd231pd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#else
  acc += w * x;
#endif
}

// Integers wrap around: kernels are compiled with -fwrapv.
JITGEN_INLINE void accumulate(Ints& acc, Ints w, Ints x) { acc += w * x; }
JITGEN_INLINE void accumulate(Longs& acc, Longs w, Longs x) { acc += w * x; }

// Adds the products of both signed halves of a lane to the lane. The addition is inline assembly too: GCC would add
// products of several steps first, and spill them.
JITGEN_INLINE void accumulate(Ints& acc, Halves w, Halves x) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  Ints products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(w), "v"(x));
#else
  const Ints of_w = (Ints)w, of_x = (Ints)x;
  acc += (of_w << 16 >> 16) * (of_x << 16 >> 16) + (of_w >> 16) * (of_x >> 16);
#endif
}

// Adds the products of the four bytes of a lane to the lane.
JITGEN_INLINE void accumulate_bytes(Ints& acc, Octets unsigned_, SignedOctets signed_) {
#if defined(JITGEN_AVX512)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_), "v"(signed_));
#elif defined(JITGEN_AVX2)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(unsigned_), "x"(signed_));
#else
#pragma GCC unroll 4
  for (int byte = 0; byte < 4; ++byte) {
    acc += (Ints)((Words)unsigned_ >> (8 * byte) & 255u) * ((Ints)signed_ << (24 - 8 * byte) >> 24);
  }
#endif
}
JITGEN_INLINE void accumulate(Ints& acc, Octets w, SignedOctets x) { accumulate_bytes(acc, w, x); }
JITGEN_INLINE void accumulate(Ints& acc, SignedOctets w, Octets x) { accumulate_bytes(acc, x, w); }

// A bit for each lane, of lanes that are 0 or -1.
JITGEN_INLINE uint32_t lanes_of(Ints lanes) {
  uint32_t bits = 0;
#if defined(JITGEN_AVX512)
  asm("vpmovd2m %1, %%k1\n\tkmovw %%k1, %0" : "=r"(bits) : "v"(lanes) : "k1");
#elif defined(JITGEN_AVX2)
  asm("vmovmskps %1, %0" : "=r"(bits) : "x"(lanes));
#else
  for (int lane = 0; lane < float_lanes; ++lane) bits |= uint32_t(lanes[lane] & 1) << lane;
#endif
  return bits;
}

// Adds the products of the two bytes of a half to the half. They are nibbles and signed bytes, so that nothing saturates.
JITGEN_INLINE void accumulate(Halves& acc, Octets nibbles, SignedOctets x) {
#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
  Halves products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(nibbles), "v"(x));
#else
  typedef int16_t SignedHalves __attribute__((vector_size(vector_bytes)));
  const SignedHalves of_x = (SignedHalves)x;
  acc += ((Halves)nibbles & 255) * (Halves)((SignedHalves)(of_x << 8) >> 8) + ((Halves)nibbles >> 8) * (Halves)(of_x >> 8);
#endif
}

#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
// Adds the products of the four bytes of a lane to the lane, by halves first: 255 times 128 fits their 16 bits.
JITGEN_INLINE void accumulate(Ints& acc, Octets w, SmallOctets x) {
  static const Halves ones = (Halves)(Words{} + 0x00010001u);  // in memory, because accumulators need the registers
  Ints products;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
      : "+v"(acc), "=&v"(products)
      : "v"(w), "v"(x.bytes), "m"(ones));
}
#endif

#if defined(JITGEN_AVX512)
// Pairs of bfloat16: both products are added to the lane's float (VDPBF16PS).
JITGEN_INLINE void accumulate(Floats& acc, Words w, Words x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}
#endif

// The same with one element of x for all lanes.
template <class Vector, class Weights, class Element>
JITGEN_INLINE void accumulate_one(Vector& acc, Weights w, const Element* x) {
#if defined(JITGEN_AVX512)
  if constexpr (sizeof(Element) == 8) {
    asm("vfmadd231pd %2%{1to8%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  } else if constexpr (static_cast<Element>(0.5f) != 0) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  } else {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  }
#else
  accumulate(acc, w, splat(*x));
#endif
}

JITGEN_INLINE void accumulate_one(Ints& acc, Ints w, const int32_t* x) { accumulate(acc, w, splat(*x)); }
JITGEN_INLINE void accumulate_one(Longs& acc, Longs w, const int64_t* x) { accumulate(acc, w, splat(*x)); }
JITGEN_INLINE void accumulate_one(Ints& acc, Halves w, const ShortPair* x) { accumulate(acc, w, splat(*x)); }
JITGEN_INLINE void accumulate_one(Halves& acc, Octets w, const SignedByteQuad* x) { accumulate(acc, w, splat(*x)); }
#if defined(JITGEN_AVX512)
JITGEN_INLINE void accumulate_one(Ints& acc, Octets w, const SmallByteQuad* x) { accumulate(acc, w, splat(*x)); }
#endif
JITGEN_INLINE void accumulate_one(Ints& acc, SignedOctets w, const ByteQuad* x) { accumulate(acc, w, splat(*x)); }
JITGEN_INLINE void accumulate_one(Ints& acc, Octets w, const SignedByteQuad* x) {
#if defined(JITGEN_AVX512)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
#else
  accumulate(acc, w, splat(*x));
#endif
}

// The same for a whole block.
template <class Vector, class Weights, class Element, int count>
JITGEN_INLINE void accumulate_block(Vector (&acc)[count], const Weights (&w)[count], const Element* x) {
#if defined(JITGEN_AVX512)
  for (int v = 0; v < count; ++v) accumulate_one(acc[v], w[v], x);
#else
  const auto all = splat(*x);
  for (int v = 0; v < count; ++v) accumulate(acc[v], w[v], all);
#endif
}

// --------------------------------------------------------------------------------------------------------- look-ups

#if defined(JITGEN_AVX512)
// table[index mod 32] and table[index mod 16] (VPERMW, VPERMPS). This is inline assembly, because GCC 12 generates the
// two-table instruction for a shuffle by a variable.
JITGEN_INLINE Words look_up(Halves table, Words index) {
  Words permuted;
  asm("vpermw %2, %1, %0" : "=v"(permuted) : "v"(index), "v"(table));
  return permuted;
}
JITGEN_INLINE Floats look_up(Floats table, Words index) {
  Floats permuted;
  asm("vpermps %2, %1, %0" : "=v"(permuted) : "v"(index), "v"(table));
  return permuted;
}
#endif

// --------------------------------------------------------------------------------------------------------- transpose

namespace detail {

// Interleave the lanes of the lower halves of a and b, and those of the upper halves.
#if defined(__clang__)
#define JITGEN_SHUFFLE(Order, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JITGEN_SHUFFLE(Order, a, b, ...) __builtin_shuffle(a, b, Order{__VA_ARGS__})
#endif

#if defined(JITGEN_AVX512)
JITGEN_INLINE Floats low(Floats a, Floats b) {
  return JITGEN_SHUFFLE(FloatOrder, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
JITGEN_INLINE Floats high(Floats a, Floats b) {
  return JITGEN_SHUFFLE(FloatOrder, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
JITGEN_INLINE Doubles low(Doubles a, Doubles b) { return JITGEN_SHUFFLE(DoubleOrder, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
JITGEN_INLINE Doubles high(Doubles a, Doubles b) {
  return JITGEN_SHUFFLE(DoubleOrder, a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#elif defined(JITGEN_AVX2)
JITGEN_INLINE Floats low(Floats a, Floats b) { return JITGEN_SHUFFLE(FloatOrder, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
JITGEN_INLINE Floats high(Floats a, Floats b) { return JITGEN_SHUFFLE(FloatOrder, a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
JITGEN_INLINE Doubles low(Doubles a, Doubles b) { return JITGEN_SHUFFLE(DoubleOrder, a, b, 0, 4, 1, 5); }
JITGEN_INLINE Doubles high(Doubles a, Doubles b) { return JITGEN_SHUFFLE(DoubleOrder, a, b, 2, 6, 3, 7); }
#else
JITGEN_INLINE Floats low(Floats a, Floats b) { return JITGEN_SHUFFLE(FloatOrder, a, b, 0, 4, 1, 5); }
JITGEN_INLINE Floats high(Floats a, Floats b) { return JITGEN_SHUFFLE(FloatOrder, a, b, 2, 6, 3, 7); }
JITGEN_INLINE Doubles low(Doubles a, Doubles b) { return JITGEN_SHUFFLE(DoubleOrder, a, b, 0, 2); }
JITGEN_INLINE Doubles high(Doubles a, Doubles b) { return JITGEN_SHUFFLE(DoubleOrder, a, b, 1, 3); }
#endif
#undef JITGEN_SHUFFLE

}  // namespace detail

// Transposes as many vectors as one has lanes. Each stage interleaves the first half of them with the second.
template <class Vector, int lanes>
JITGEN_INLINE void transpose(Vector (&rows)[lanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < lanes; stage *= 2) {
    Vector next[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes / 2; ++i) {
      next[2 * i] = detail::low(rows[i], rows[i + lanes / 2]);
      next[2 * i + 1] = detail::high(rows[i], rows[i + lanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) rows[i] = next[i];
  }
}

}  // namespace jitgen
