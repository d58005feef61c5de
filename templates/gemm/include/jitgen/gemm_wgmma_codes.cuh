// Codes of 4 bits of the "mma8" layout times x of int8, on wgmma: the counterpart of `Decode` in gemm_wgmma_decode.cuh.
#pragma once

#include "jitgen/gemm_low_codes.cuh"
#include "jitgen/gemm_wgmma_quantized.cuh"
#include "jitgen/wgmma_bytes.cuh"

namespace jitgen {

template <bool zero_points, class Scale, int group>
struct Decode<QuantWeight<Bytes<int8_t, int8_t>, 4, zero_points, Scale, group>> {
  using Weight = QuantWeight<Bytes<int8_t, int8_t>, 4, zero_points, Scale, group>;
  using Codes = LowCodes<zero_points>;
  static constexpr float shrunk = Codes::shrunk;

  float2 scale;  // of rows g and g+8
  typename Codes::Zeros zeros;

  JITGEN_DEVICE void set(const typename Weight::Scales& scales) {  // the first scales of the part
    if constexpr (group != 0) scale = unpack_pair(scales.scale[0]);
    if constexpr (zero_points) zeros = Codes::zeros(scales.zero[0]);
  }
  // The fragment of k32 step `step` (0, 1) of the chunk.
  JITGEN_DEVICE void fragment(uint32_t (&a)[4], const typename Weight::Codes& codes, int step) const {
    Codes::fragment(a, codes.word(step * 2), codes.word(step * 2 + 1), zeros);
  }
};

}  // namespace jitgen
