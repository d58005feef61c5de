// wgmma of operands of one byte: 64 rows of A by n rows of B, 32 k's, both contiguous along k, as the instruction
// demands. Integers are summed in int32, exactly, and 8-bit floats in float32, of which wgmma keeps some 14 bits.
// Operands may differ in sign, or in the kind of float.
#pragma once

#include "jitgen/bytes.cuh"
#include "jitgen/wgmma_atoms.cuh"

namespace jitgen {

// The instruction of X, W and n.
template <class X, class W, int n>
struct WgmmaBytes;

// The operands after the sums are numbered A, B, C, ... .
#define JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, N, EIGHTS, A, B, C, D, E, F)                                      \
  template <>                                                                                                         \
  struct WgmmaBytes<X, W, N> {                                                                                        \
    static JITGEN_DEVICE void shared(SUM (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                       \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES           \
          " {" JITGEN_TEXTS##EIGHTS "}, %" #A ", %" #B ", p" SIGNS ";\n}"                                             \
          : JITGEN_ALL##EIGHTS                                                                                        \
          : "l"(a), "l"(b), "r"(accumulate));                                                                         \
    }                                                                                                                 \
    static JITGEN_DEVICE void registers(SUM (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {        \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES           \
          " {" JITGEN_TEXTS##EIGHTS "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p" SIGNS ";\n}"                \
          : JITGEN_ALL##EIGHTS                                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                     \
    }                                                                                                                 \
  };
#define JITGEN_WGMMA_WIDTHS(X, W, SUM, TYPES, SIGNS)                                 \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 16, 1, 8, 9, 10, 11, 12, 13)           \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 32, 2, 16, 17, 18, 19, 20, 21)         \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 64, 4, 32, 33, 34, 35, 36, 37)         \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 80, 5, 40, 41, 42, 43, 44, 45)         \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 96, 6, 48, 49, 50, 51, 52, 53)         \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 112, 7, 56, 57, 58, 59, 60, 61)        \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 128, 8, 64, 65, 66, 67, 68, 69)        \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 144, 9, 72, 73, 74, 75, 76, 77)        \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 160, 10, 80, 81, 82, 83, 84, 85)       \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 176, 11, 88, 89, 90, 91, 92, 93)       \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 192, 12, 96, 97, 98, 99, 100, 101)     \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 208, 13, 104, 105, 106, 107, 108, 109) \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 224, 14, 112, 113, 114, 115, 116, 117) \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 240, 15, 120, 121, 122, 123, 124, 125) \
  JITGEN_WGMMA_BYTES(X, W, SUM, TYPES, SIGNS, 256, 16, 128, 129, 130, 131, 132, 133)
JITGEN_WGMMA_WIDTHS(float8_e4m3fn, float8_e4m3fn, float, "f32.e4m3.e4m3", ", 1, 1")
JITGEN_WGMMA_WIDTHS(float8_e4m3fn, float8_e5m2, float, "f32.e4m3.e5m2", ", 1, 1")
JITGEN_WGMMA_WIDTHS(float8_e5m2, float8_e4m3fn, float, "f32.e5m2.e4m3", ", 1, 1")
JITGEN_WGMMA_WIDTHS(float8_e5m2, float8_e5m2, float, "f32.e5m2.e5m2", ", 1, 1")
#undef JITGEN_SUMS
#define JITGEN_SUMS(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
JITGEN_WGMMA_WIDTHS(int8_t, int8_t, int32_t, "s32.s8.s8", "")
JITGEN_WGMMA_WIDTHS(int8_t, uint8_t, int32_t, "s32.s8.u8", "")
JITGEN_WGMMA_WIDTHS(uint8_t, int8_t, int32_t, "s32.u8.s8", "")
JITGEN_WGMMA_WIDTHS(uint8_t, uint8_t, int32_t, "s32.u8.u8", "")
#undef JITGEN_SUMS
#undef JITGEN_WGMMA_WIDTHS
#undef JITGEN_WGMMA_BYTES

template <class X, class W, int n>
struct Wgmma<Bytes<X, W>, n> {
  using Instruction = WgmmaBytes<X, W, n>;
  using Sum = typename SumType<X>::type;
  static constexpr bool promoted = is_floating<Sum>;
  template <int transposed>
  static JITGEN_DEVICE void shared(Sum (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(!transposed, "operands of one byte are contiguous along k");
    Instruction::shared(d, a, b, accumulate);
  }
  static JITGEN_DEVICE void registers(Sum (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    Instruction::registers(d, a, b, accumulate);
  }
};
template <class X, class W, int n>
struct Wgmma<FastBytes<X, W>, n> : Wgmma<Bytes<X, W>, n> {
  static constexpr bool promoted = false;
};

}  // namespace jitgen
