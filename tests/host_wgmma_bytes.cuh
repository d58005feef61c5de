// What wgmma_bytes.cuh does, on the host, with tests/host_wgmma.cuh. Sums of 8-bit floats have all bits of float32, which
// tensor cores have not.
#pragma once

#include "jitgen/bytes.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class X, class W, int n>
struct Wgmma<Bytes<X, W>, n> {
  using Sum = typename SumType<X>::type;
  static constexpr bool promoted = is_floating<Sum>;
  template <int transposed>
  static void shared(Sum (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    shared_product<32, 1>(d, a, b, accumulate, element<X>, element<W>);
  }
  static void registers(Sum (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    const int self = running, lane = self % 32, warp = self - lane;
    for (int i = 0; i < 4; ++i) operands[self][i] = a[i];
    pause();
    for (int i = 0; i < n / 2; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      Sum sum = accumulate ? d[i] : Sum(0);
      for (int k = 0; k < 32; ++k) {
        X code;
        memcpy(&code, reinterpret_cast<const uint8_t*>(&operands[warp + lane / 4 * 4 + k % 16 / 4][k / 16 * 2 + i % 4 / 2]) + k % 4, 1);
        sum += Sum(load(code)) * element<W>(operand_address<0, 1>(b, column, k));
      }
      d[i] = sum;
    }
    pause();
  }
  template <class Element>
  static Sum element(uint64_t address) {
    Element code;
    memcpy(&code, shared_memory + (address ^ (address >> 7 & 7) << 4), 1);
    return Sum(load(code));
  }
};

}  // namespace jitgen
