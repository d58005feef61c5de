// jitgen 0.1.0: template gemm/gemm.cu.j2
// target sm_90a: wgmma_quantized mainloop, tiles of 112 x 128, 64 of K a step, 12 warps a block, 8 stages, at most 2 blocks of a cluster share K, 2 products or loads at once, persistent blocks, 1 a
//     multiprocessor, raster of 16 tiles, 201856 bytes of shared memory, or, for some numbers of rows: wgmma_quantized mainloop, tiles of 128 x 128, 64 of K a step, 12 warps a block, 7 stages, at
//     most 2 blocks of a cluster share K, 2 products or loads at once, persistent blocks, 1 a multiprocessor, raster of 16 tiles, 210544 bytes of shared memory
// stages: 2 x contract over k; map
// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_wgmma_quantized.cuh>

using Index = int32_t;

struct Params {
  jitgen::TensorMap x_map;
  jitgen::TensorMap codes_map;
  jitgen::TensorMap codes_2_map;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> x;
  jitgen::Operand<const uint8_t, Index, 0> codes;
  jitgen::Operand<const jitgen::bfloat16, Index, 0> scales;
  jitgen::Operand<const uint8_t, Index, 0> codes_2;
  jitgen::Operand<const jitgen::bfloat16, Index, 0> scales_2;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  Index m;
  Index k;
  Index columns;
};
static_assert(
    sizeof(Params) == 512 && JITGEN_OFFSET(x_map) == 0 && JITGEN_OFFSET(codes_map) == 128 &&
    JITGEN_OFFSET(codes_2_map) == 256 && JITGEN_OFFSET(x) == 384 && JITGEN_OFFSET(codes) == 400 &&
    JITGEN_OFFSET(scales) == 408 && JITGEN_OFFSET(codes_2) == 416 && JITGEN_OFFSET(scales_2) == 424 &&
    JITGEN_OFFSET(result) == 432 && JITGEN_OFFSET(m) == 448 && JITGEN_OFFSET(k) == 452 &&
    JITGEN_OFFSET(columns) == 456, "the launch packs it so");

// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
struct Epilogue0 {
  const Params& params;
  // What one call computes, and where it goes: several may be computed before the first is stored.
  template <int width>
  struct Results {
    jitgen::Vector<jitgen::bfloat16, width> y5;
  };
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[2][width], int live) const {
    store<width>(m, n, results<width>(m, n, acc, live), live);
  }
  template <int width>
  __device__ __forceinline__ Results<width> results(
      Index m, Index n, const float (&acc)[2][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> y5;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float acc0 = acc[0][j];
      const float acc1 = acc[1][j];
      const float v1 = jitgen::coarse_sigmoid(acc0);
      const float v2 = acc0 * v1;
      const float v4 = v2 * acc1;
      y5[j] = jitgen::store<jitgen::bfloat16>(v4);
    }
    return {y5};
  }
  template <int width>
  __device__ __forceinline__ void store(Index m, Index n, const Results<width>& results, int live) const {
    const jitgen::Vector<jitgen::bfloat16, width>& y5 = results.y5;
    {
      jitgen::bfloat16* const to = params.result.pointer + (m * params.result.strides[0] + n);
      jitgen::store_vector(to, y5);
    }
  }
};
using Weight = jitgen::QuantWeight<jitgen::bfloat16, 4, false, jitgen::bfloat16, 128>;
struct Config : jitgen::QuantizedDefaults {
  static constexpr bool trimmed = true;
  static constexpr int ranges = 1;
  static constexpr int contractions = 2;
  static constexpr int regions = 1;
  static constexpr int tokens = 112;
  static constexpr int warpgroups = 2;
  static constexpr int blocks = 2;
  static constexpr int span = 1;
  static constexpr int steps = 2;
  static constexpr int stagger = 0;
  static constexpr int stages = 8;
  static constexpr int multicast = 1;
  static constexpr int raster = 16;
  static constexpr int most_splits = 2;
  static constexpr int resident = 1;
};
using Shape = jitgen::QuantizedShape<Config, Weight>;
static_assert(Shape::bytes == 201856, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
jitgen_gemm_eb6489bf(const __grid_constant__ Params params) {
  const jitgen::QuantizedRegion<Weight, 2> regions[] = {{{Weight{reinterpret_cast<const uint4*>(params.codes.pointer), params.scales.pointer, nullptr}, Weight{reinterpret_cast<const uint4*>(params.codes_2.pointer), params.scales_2.pointer, nullptr}}, {&params.codes_map, &params.codes_2_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_quantized<Config, Weight>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}

struct Config_1 : jitgen::QuantizedDefaults {
  static constexpr bool trimmed = true;
  static constexpr int ranges = 1;
  static constexpr int contractions = 2;
  static constexpr int regions = 1;
  static constexpr int tokens = 128;
  static constexpr int warpgroups = 2;
  static constexpr int blocks = 2;
  static constexpr int span = 1;
  static constexpr int steps = 2;
  static constexpr int stagger = 0;
  static constexpr int stages = 7;
  static constexpr int multicast = 1;
  static constexpr int raster = 16;
  static constexpr int most_splits = 2;
  static constexpr int resident = 1;
};
using Shape_1 = jitgen::QuantizedShape<Config_1, Weight>;
static_assert(Shape_1::bytes == 210544, "shared memory as the launch has it");
static_assert(Shape_1::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_1::threads, Config_1::resident)
jitgen_gemm_eb6489bf_1(const __grid_constant__ Params params) {
  const jitgen::QuantizedRegion<Weight, 2> regions[] = {{{Weight{reinterpret_cast<const uint4*>(params.codes.pointer), params.scales.pointer, nullptr}, Weight{reinterpret_cast<const uint4*>(params.codes_2.pointer), params.scales_2.pointer, nullptr}}, {&params.codes_map, &params.codes_2_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_quantized<Config_1, Weight>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}
