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
  template <class Element>
  static Sum element(uint64_t address) {
    Element code;
    memcpy(&code, shared_memory + (address ^ (address >> 7 & 7) << 4), 1);
    return Sum(load(code));
  }
};

}  // namespace jitgen
