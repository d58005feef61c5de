// mma.sync of operands of one byte: integers from sm_80 on, 8-bit floats from sm_89 on.
#pragma once

#include "jitgen/bytes.cuh"
#include "jitgen/ptx.cuh"

namespace jitgen {

// sum[16 x 8] = a[16 x 32] b[32 x 8] + start, a being the weight's and b that of x. Lane 4g+t holds a's rows g and g+8
// at columns 4t .. 4t+3 and 4t+16 .. 4t+19 (in the order of multiply_add in ptx.cuh), and b's column g at those rows.
template <class X, class W>
struct MmaBytes;

#define JITGEN_MMA_BYTES(X, W, SUM, REGISTER, TYPES)                                                                  \
  template <>                                                                                                         \
  struct MmaBytes<X, W> {                                                                                             \
    static JITGEN_DEVICE void add(SUM (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,                    \
                                  const SUM (&start)[4]) {                                                            \
      asm("mma.sync.aligned.m16n8k32.row.col." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                \
          "{%10, %11, %12, %13};"                                                                                     \
          : "=" REGISTER(sum[0]), "=" REGISTER(sum[1]), "=" REGISTER(sum[2]), "=" REGISTER(sum[3])                    \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), REGISTER(start[0]), REGISTER(start[1]),     \
            REGISTER(start[2]), REGISTER(start[3]));                                                                  \
    }                                                                                                                 \
  };
JITGEN_MMA_BYTES(int8_t, int8_t, int32_t, "r", "s32.s8.s8.s32")
JITGEN_MMA_BYTES(int8_t, uint8_t, int32_t, "r", "s32.u8.s8.s32")
JITGEN_MMA_BYTES(uint8_t, int8_t, int32_t, "r", "s32.s8.u8.s32")
JITGEN_MMA_BYTES(uint8_t, uint8_t, int32_t, "r", "s32.u8.u8.s32")
JITGEN_MMA_BYTES(float8_e4m3fn, float8_e4m3fn, float, "f", "f32.e4m3.e4m3.f32")
JITGEN_MMA_BYTES(float8_e4m3fn, float8_e5m2, float, "f", "f32.e5m2.e4m3.f32")
JITGEN_MMA_BYTES(float8_e5m2, float8_e4m3fn, float, "f", "f32.e4m3.e5m2.f32")
JITGEN_MMA_BYTES(float8_e5m2, float8_e5m2, float, "f", "f32.e5m2.e5m2.f32")
#undef JITGEN_MMA_BYTES

template <class Element>
struct ByteOperands {
  static constexpr bool are = false;
};
template <class X_, class W_>
struct ByteOperands<Bytes<X_, W_>> {
  static constexpr bool are = true;
  using X = X_;
  using W = W_;
};
template <class X_, class W_>
struct ByteOperands<BytePair<X_, W_>> : ByteOperands<Bytes<X_, W_>> {};

// Whether sums of products of an Element are added up outside of the tensor cores: of 8-bit floats these keep some 14
// bits (Hopper, and as it is said Ada), so that a chain of 64 products is added to the others in float32.
template <class Element>
constexpr bool promoted = ByteOperands<Element>::are && is_floating<typename SumType<Element>::type>;

// multiply_add of any Element: 16 k's of two bytes each, or 32 of one byte.
template <class Element, class Sum>
JITGEN_DEVICE void multiply_32_bytes(Sum (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                     const Sum (&start)[4]) {
  using Operands = ByteOperands<Element>;
  if constexpr (Operands::are) {
    MmaBytes<typename Operands::X, typename Operands::W>::add(sum, a, b0, b1, start);
  } else {
    multiply_add<Element>(sum, a, b0, b1, start);
  }
}

}  // namespace jitgen
