// The mma.sync of mma_bytes.cuh on the host (tests/compile/test_byte_products_on_host.py). Sums of 8-bit floats are as
// tensor cores make them: each term loses what is below the fourteenth bit of the largest.
#pragma once

#include "jitgen/bytes.cuh"
#include "jitgen/ptx.cuh"

namespace jitgen {

inline double drop_bits(double value, double largest) {
  int exponent;
  frexp(largest, &exponent);
  const double unit = ldexp(1.0, exponent - 14);
  return trunc(value / unit) * unit;
}

template <class X, class W, class Sum>
void multiply_bytes(Sum (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Sum (&start)[4]) {
  const int self = running, lane = self % 32, warp = self - lane;
  for (int i = 0; i < 4; ++i) operands[self][i] = a[i];
  operands[self][4] = b0;
  operands[self][5] = b1;
  pause();
  Sum found[4];
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, column = lane % 4 * 2 + i % 2;
    double terms[33] = {double(start[i])}, largest = fabs(terms[0]), total = 0.0;
    for (int k = 0; k < 32; ++k) {
      const int t = k % 16 / 4, q = k / 16, shift = k % 4 * 8;
      const uint8_t left = uint8_t(operands[warp + lane / 4 * 4 + t][row_half + 2 * q] >> shift);
      const uint8_t right = uint8_t(operands[warp + column * 4 + t][4 + q] >> shift);
      if constexpr (is_floating<Sum>) {
        terms[k + 1] = double(load(W{left})) * load(X{right});
      } else {
        terms[k + 1] = double(W(left)) * X(right);
      }
      largest = fmax(largest, fabs(terms[k + 1]));
    }
    for (const double term : terms) total += is_floating<Sum> && largest > 0 ? drop_bits(term, largest) : term;
    found[i] = is_floating<Sum> ? Sum(total) : Sum(uint32_t(int64_t(total)));
  }
  pause();
  for (int i = 0; i < 4; ++i) sum[i] = found[i];
}
template <class T>
void store_shared(uint32_t to, T value) {
  memcpy(shared_memory + to, &value, sizeof(T));
}

inline void load_matrices_transposed(uint32_t (&)[4], uint32_t) { abort(); }  // of operands of 16 bits alone

