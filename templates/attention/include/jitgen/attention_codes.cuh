// Reads codes of keys and values: a lane takes eight neighbours, and makes numbers of them, exactly.
#pragma once

#include "jitgen/vector.cuh"

namespace jitgen {

// N neighbours at `address`, of a line of 128 bytes that the second-level cache fetches as a whole.
template <int N, class Storage>
JITGEN_DEVICE Vector<Storage, N> load_vector_of_line(const Storage* address) {
  Vector<Storage, N> vector;
  auto words = reinterpret_cast<const typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) vector.words[i] = read_own_line(words + i);
  return vector;
}

template <class Code>
JITGEN_DEVICE void numbers_of(float (&numbers)[8], const Vector<Code, 8>& codes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) numbers[i] = load(codes[i]);
}

// An integer is the low byte of 2^23 + `offset` + itself, from which the rest is subtracted: a permutation and an
// addition, which a multiprocessor does 64 and 128 of in a cycle, but only 16 conversions. The technique is
// FasterTransformer's (Kim et al., "Who Says Elephants Can't Run", 2022).
JITGEN_DEVICE void numbers_of_bytes(float (&numbers)[8], uint2 words, uint32_t flip, float offset) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = __byte_perm((i < 4 ? words.x : words.y) ^ flip, 0x4b000000u, 0x7440u | unsigned(i % 4));
    numbers[i] = __fadd_rn(__int_as_float(int(bits)), -offset);
  }
}
template <>
JITGEN_DEVICE void numbers_of<int8_t>(float (&numbers)[8], const Vector<int8_t, 8>& codes) {
  numbers_of_bytes(numbers, codes.words[0], 0x80808080u, 8388736.0f);
}
template <>
JITGEN_DEVICE void numbers_of<uint8_t>(float (&numbers)[8], const Vector<uint8_t, 8>& codes) {
  numbers_of_bytes(numbers, codes.words[0], 0u, 8388608.0f);
}

#if JITGEN_FP8_INSTRUCTIONS
// Two codes a conversion.
template <>
JITGEN_DEVICE void numbers_of<float8_e4m3fn>(float (&numbers)[8], const Vector<float8_e4m3fn, 8>& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? codes.words[0].x : codes.words[0].y;
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(word >> i % 2 * 16)));
    numbers[2 * i] = half_to_float(uint16_t(pair));
    numbers[2 * i + 1] = half_to_float(uint16_t(pair >> 16));
  }
}
#endif

}  // namespace jitgen
