// Codes of 4 bits of the "mma8" layout times x of int8, for mma_gemm of gemm_mma.cuh. That counts pairs of k's, which
// have two bytes as its other elements do, so that a chunk is 128 k's, two of the layout's.
#pragma once

#include "jitgen/gemm_low_codes.cuh"
#include "jitgen/mma_bytes.cuh"

namespace jitgen {

template <bool zero_points_, class Scale_, int group_>
struct CodeWeight : QuantWeight<BytePair<int8_t, int8_t>, 4, zero_points_, Scale_, group_> {
  using Layout = QuantWeight<BytePair<int8_t, int8_t>, 4, zero_points_, Scale_, group_>;
  using Kind = LowCodes<zero_points_>;
  using typename Layout::Scale, typename Layout::ScalePair;
  using Layout::group, Layout::zero_points;
  static constexpr int unit = group == 0 ? 128 : group;
  static constexpr int parts = unit % 128 == 0 ? 1 : unit % 64 == 0 ? 2 : 4;  // scales of a row of a chunk
  static constexpr float shrunk = Kind::shrunk;

  int length;  // of a row, in pairs

  using Codes = CodeWords<2>;
  using Scales = ScalesOfRows<ScalePair, parts, zero_points>;
  using Offsets = typename Kind::Zeros;

  static JITGEN_DEVICE int chunks(int pairs) { return (Layout::chunks(2 * pairs) + 1) / 2; }

  // One lane's iteration along a row tile, as that of QuantWeight. The layout's last chunk may be half of one.
  template <int stride>
  struct Walk {
    const uint4* codes;
    const Scale* scales;
    const uint8_t* zeros;
    int first, chunks, last_group;  // chunks: of the layout

    JITGEN_DEVICE void start(const CodeWeight& weight, int tile, int, int first_, int lane) {
      first = first_;
      chunks = Layout::chunks(2 * weight.length);
      last_group = Layout::groups(chunks) - 1;
      codes = weight.codes + (int64_t(tile) * chunks * 32 + lane);
      const int64_t row = int64_t(tile) * (last_group + 1) * 16 + lane / 4 * 2;
      scales = weight.scales + row;
      zeros = weight.zeros + row;
    }
    JITGEN_DEVICE Codes load_codes(int step) const {
      Codes result;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = (first + step * stride) * 2 + i;
        result.words[i] = uint4{0, 0, 0, 0};
        if (i == 0 || chunk < chunks) result.words[i] = read_once(codes + chunk * 32);
      }
      return result;
    }
    JITGEN_DEVICE Scales load_scales(int step) const {
      Scales result;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const int k = (first + step * stride) * 128 + part * (128 / parts);
        const int place = group == 0 ? 0 : part == 0 ? k / unit : smaller(k / unit, last_group);
        result.scale[part] = __ldg(reinterpret_cast<const ScalePair*>(scales + place * 16));
        if constexpr (zero_points) result.zero[part] = __ldg(reinterpret_cast<const uint16_t*>(zeros + place * 16));
      }
      return result;
    }
    JITGEN_DEVICE void advance(int steps) { first += steps * stride; }
  };

  static JITGEN_DEVICE Offsets offsets(const Scales& s, int part) {
    if constexpr (zero_points) return Kind::zeros(s.zero[part]);
    return {};
  }
  // The fragment of k32 step `step` (0..3) of the chunk.
  template <bool exact>
  static JITGEN_DEVICE void fragment(uint32_t (&a)[4], const Codes& codes, int step, const Offsets& zeros, int = 0) {
    Kind::fragment(a, codes.word(step * 2), codes.word(step * 2 + 1), zeros);
  }
};

}  // namespace jitgen
