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
    const uint64_t left = (a & 0x3fff) << 4, right = (b & 0x3fff) << 4;
    for (int i = 0; i < n / 2; ++i) {
      const int row = running / 32 % 4 * 16 + running % 32 / 4 + i % 4 / 2 * 8;
      const int column = i / 4 * 8 + running % 4 * 2 + i % 2;
      Sum sum = accumulate ? d[i] : Sum(0);
      for (int k = 0; k < 32; ++k) {
        sum += element<X>(left + row * 128 + k) * element<W>(right + column * 128 + k);
      }
      d[i] = sum;
    }
  }
  template <class Element>
  static Sum element(uint64_t address) {
    Element code;
    memcpy(&code, shared_memory + (address ^ (address >> 7 & 7) << 4), 1);
    return Sum(load(code));
  }
};

}  // namespace jitgen
