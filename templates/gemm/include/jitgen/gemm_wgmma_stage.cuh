// Reads a stage of the quantised wgmma mainloop: what a lane of a consumer takes of it, and how it decodes that to
// fragments.
#pragma once

#include "jitgen/gemm_wgmma_decode.cuh"
#include "jitgen/gemm_wgmma_shape.cuh"

namespace jitgen {

template <class Config, class Weight>
struct QuantizedStage {
  using Shape = QuantizedShape<Config, Weight>;
  static constexpr int blocks = Config::blocks, parts = Shape::parts, span = Shape::span;

  struct Fetched {  // what a lane reads of one stage
    typename Weight::Codes codes[blocks][span];
    typename Weight::Scales scales[blocks][parts];  // each with its first entry only
  };
  struct Held {  // what it computes fragments from
    typename Weight::Codes codes[blocks][span];
    Decode<Weight> decode[blocks][parts];
    JITGEN_DEVICE void take(const Fetched& fetched) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
#pragma unroll
        for (int i = 0; i < span; ++i) codes[b][i] = fetched.codes[b][i];
#pragma unroll
        for (int part = 0; part < parts; ++part) decode[b][part].set(fetched.scales[b][part]);
      }
    }
  };

  // Offsets of a lane's codes and scales in a stage, for block 0. The empty assembly statement forces the compiler to
  // hold them in registers; otherwise it computes them again for each stage.
  struct Lane {
    uint32_t codes, side;
    JITGEN_DEVICE Lane() {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const int tile = Shape::tile_of(warp / 4, 0) + warp % 4;
      codes = Shape::codes_at + tile * Shape::box_bytes + (Weight::planes ? 0 : lane * 16);
      side = Shape::side_at + (tile * 16 + lane / 4 * 2);
      asm("" : "+r"(codes), "+r"(side));
    }
  };

  static JITGEN_DEVICE void fetch(Fetched& fetched, const uint8_t* memory, const Lane& lane, int stage) {
    using Pair = typename Weight::ScalePair;
    constexpr int width = sizeof(typename Weight::Scale), zero_width = sizeof(typename Weight::Zero);
    const uint8_t* const codes = memory + lane.codes + stage * Shape::code_bytes;
    // A scale is `width` times as far from the beginning of its area as a byte for each row would be.
    const uint8_t* const bytes = memory + lane.side + stage * Shape::side_bytes;
    const uint8_t* const scales = bytes + (lane.side - Shape::side_at) * (width - 1);
    const uint8_t* const zeros = bytes + (lane.side - Shape::side_at) * (zero_width - 1) + Shape::scale_bytes;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int tile = Shape::tile_of(0, b) - Shape::tile_of(0, 0);
      if constexpr (Weight::planes) {
#pragma unroll
        for (int i = 0; i < span; ++i) {
          const uint8_t* const from = codes + tile * Shape::box_bytes + i * Shape::chunk_bytes;
          fetched.codes[b][i].read(reinterpret_cast<const uint32_t*>(from), threadIdx.x % 32,
                                   [](const auto* address) { return *address; });
        }
      } else {
#pragma unroll
        for (int i = 0; i < span * Weight::loads; ++i) {
          constexpr int loads = Weight::loads;
          const uint8_t* const from = codes + tile * Shape::box_bytes + i / loads * Shape::chunk_bytes + i % loads * 512;
          fetched.codes[b][i / Weight::loads].words[i % Weight::loads] = *reinterpret_cast<const uint4*>(from);
        }
      }
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const int at = (part * Shape::tiles + tile) * 16;
        if constexpr (Weight::zero_points) {
          using Zeros = typename Weight::ZeroPair;
          fetched.scales[b][part].zero[0] = *reinterpret_cast<const Zeros*>(zeros + at * zero_width);
        }
        if constexpr (Shape::group_scales) {
          fetched.scales[b][part].scale[0] = *reinterpret_cast<const Pair*>(scales + at * width);
        }
      }
    }
  }

  using Fragments = uint32_t[Config::steps][blocks][4];

  static JITGEN_DEVICE void dequantise(Fragments& fragments, const Held& held, int group) {
#pragma unroll
    for (int s = 0; s < Config::steps; ++s) {
      const int step = group * Config::steps + s;
      constexpr int in_chunk = 64 / Shape::step_k;
      const int part = step * Shape::step_k / Shape::part;
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        held.decode[b][part].fragment(fragments[s][b], held.codes[b][step / in_chunk], step % in_chunk);
      }
    }
  }
};

}  // namespace jitgen
