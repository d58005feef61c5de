// jitgen 0.1.0: mlp_up, template gemm/gemm.cu.j2
// target sm_90a: wgmma_quantized mainloop, tiles of 128 x 128, 64 of K a step, 12 warps a block, 7 stages, at most 2 blocks of a cluster share K, 2 products or loads at once, persistent blocks, 1 a
//     multiprocessor, raster of 16 tiles, 210544 bytes of shared memory, or, for some numbers of rows: wgmma_quantized mainloop, tiles of 112 x 128, 64 of K a step, 12 warps a block, 8 stages, at
//     most 2 blocks of a cluster share K, 2 products or loads at once, persistent blocks, 1 a multiprocessor, raster of 16 tiles, 201856 bytes of shared memory
// stages: 2 x contract over k; map
// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_wgmma_quantized.cuh>

using Index = int32_t;

// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
struct Epilogue0 {
  jitgen::bfloat16* p0_5;
  Index s0_5_0;
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[2][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> y5;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float acc0 = acc[0][j];
      const float acc1 = acc[1][j];
      const float v1 = jitgen::sigmoid(acc0);
      const float v2 = acc0 * v1;
      const float v4 = v2 * acc1;
      y5[j] = jitgen::store<jitgen::bfloat16>(v4);
    }
    {
      jitgen::bfloat16* const to = p0_5 + (m * s0_5_0 + n);
      jitgen::store_vector(to, y5);
    }
  }
};
using Weight = jitgen::QuantWeight<jitgen::bfloat16, 4, false, jitgen::bfloat16, 128>;
struct Config {
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
using Shape = jitgen::QuantizedShape<Config, Weight>;
static_assert(Shape::bytes == 210544, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
jitgen_mlp_up(const __grid_constant__ jitgen::TensorMap map0, const __grid_constant__ jitgen::TensorMap map1, const __grid_constant__ jitgen::TensorMap map2, const jitgen::bfloat16* p0_0, const uint8_t* p0_1, const jitgen::bfloat16* p0_2, const uint8_t* p0_3, const jitgen::bfloat16* p0_4, jitgen::bfloat16* p0_5, Index m, Index k, Index n0, Index s0_0_0, Index s0_5_0) {
  const jitgen::QuantizedRegion<Weight, 2> regions[] = {{{Weight{reinterpret_cast<const uint4*>(p0_1), p0_2, nullptr}, Weight{reinterpret_cast<const uint4*>(p0_3), p0_4, nullptr}}, {&map1, &map2}, int(n0)}};
  const Epilogue0 epilogue0 = {p0_5, s0_5_0};
  jitgen::gemm_wgmma_quantized<Config, Weight>(map0, int(m), int(k), regions, epilogue0);
}

struct Config_1 {
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
using Shape_1 = jitgen::QuantizedShape<Config_1, Weight>;
static_assert(Shape_1::bytes == 201856, "shared memory as the launch has it");
static_assert(Shape_1::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_1::threads, Config_1::resident)
jitgen_mlp_up_1(const __grid_constant__ jitgen::TensorMap map0, const __grid_constant__ jitgen::TensorMap map1, const __grid_constant__ jitgen::TensorMap map2, const jitgen::bfloat16* p0_0, const uint8_t* p0_1, const jitgen::bfloat16* p0_2, const uint8_t* p0_3, const jitgen::bfloat16* p0_4, jitgen::bfloat16* p0_5, Index m, Index k, Index n0, Index s0_0_0, Index s0_5_0) {
  const jitgen::QuantizedRegion<Weight, 2> regions[] = {{{Weight{reinterpret_cast<const uint4*>(p0_1), p0_2, nullptr}, Weight{reinterpret_cast<const uint4*>(p0_3), p0_4, nullptr}}, {&map1, &map2}, int(n0)}};
  const Epilogue0 epilogue0 = {p0_5, s0_5_0};
  jitgen::gemm_wgmma_quantized<Config_1, Weight>(map0, int(m), int(k), regions, epilogue0);
}
