// jitgen 0.1.0: linear, template gemm/gemm.cu.j2
// target sm_90a: wgmma_dense mainloop, tiles of 128 x 256, 64 of K a step, 12 warps a block, 4 stages, at most 4 blocks of a cluster share K, persistent blocks, 1 a multiprocessor, raster of 8
//     tiles, 229440 bytes of shared memory, or, for some numbers of rows: wgmma_dense mainloop, tiles of 128 x 192, 64 of K a step, 12 warps a block, 4 stages, at most 2 blocks of a cluster share K,
//     persistent blocks, 1 a multiprocessor, raster of 8 tiles, 196672 bytes of shared memory
// stages: contract over k; map
// (rows, columns) over K: x bfloat16 k, weight bfloat16 k, load bfloat16 column, store bfloat16 full
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_wgmma_dense.cuh>

using Index = int32_t;

// (rows, columns) over K: x bfloat16 k, weight bfloat16 k, load bfloat16 column, store bfloat16 full
struct Epilogue0 {
  const jitgen::bfloat16* p0_2;
  jitgen::bfloat16* p0_3;
  Index s0_3_0;
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[1][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> x2;
    {
      const jitgen::bfloat16* const from = p0_2 + (n);
      x2 = jitgen::load_vector<width>(from);
    }
    jitgen::Vector<jitgen::bfloat16, width> y3;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float acc0 = acc[0][j];
      const float v1 = jitgen::load(x2[j]);
      const float v2 = acc0 + v1;
      y3[j] = jitgen::store<jitgen::bfloat16>(v2);
    }
    {
      jitgen::bfloat16* const to = p0_3 + (m * s0_3_0 + n);
      jitgen::store_vector(to, y3);
    }
  }
};
struct Config {
  using Element = jitgen::bfloat16;
  static constexpr bool transposed = false;
  static constexpr bool trimmed = true;
  static constexpr bool pingpong = false;
  static constexpr int ranges = 1;
  static constexpr int contractions = 1;
  static constexpr int regions = 1;
  static constexpr int down = 2;
  static constexpr int across = 1;
  static constexpr int columns = 256;
  static constexpr int stages = 4;
  static constexpr int multicast = 1;
  static constexpr int raster = 8;
  static constexpr int most_splits = 4;
  static constexpr int resident = 1;
  static constexpr int staged = 64;
};
using Shape = jitgen::DenseShape<Config>;
static_assert(Shape::bytes == 229440, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
jitgen_linear(const __grid_constant__ jitgen::TensorMap map0, const __grid_constant__ jitgen::TensorMap map1, const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, const jitgen::bfloat16* p0_2, jitgen::bfloat16* p0_3, Index m, Index k, Index n0, Index s0_0_0, Index s0_1_0, Index s0_3_0) {
  const jitgen::DenseRegion<1> regions[] = {{{&map1}, int(n0)}};
  const Epilogue0 epilogue0 = {p0_2, p0_3, s0_3_0};
  jitgen::gemm_wgmma_dense<Config>(map0, int(m), int(k), regions, epilogue0);
}

struct Config_1 {
  using Element = jitgen::bfloat16;
  static constexpr bool transposed = false;
  static constexpr bool trimmed = true;
  static constexpr bool pingpong = false;
  static constexpr int ranges = 1;
  static constexpr int contractions = 1;
  static constexpr int regions = 1;
  static constexpr int down = 2;
  static constexpr int across = 1;
  static constexpr int columns = 192;
  static constexpr int stages = 4;
  static constexpr int multicast = 1;
  static constexpr int raster = 8;
  static constexpr int most_splits = 2;
  static constexpr int resident = 1;
  static constexpr int staged = 64;
};
using Shape_1 = jitgen::DenseShape<Config_1>;
static_assert(Shape_1::bytes == 196672, "shared memory as the launch has it");
static_assert(Shape_1::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_1::threads, Config_1::resident)
jitgen_linear_1(const __grid_constant__ jitgen::TensorMap map0, const __grid_constant__ jitgen::TensorMap map1, const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, const jitgen::bfloat16* p0_2, jitgen::bfloat16* p0_3, Index m, Index k, Index n0, Index s0_0_0, Index s0_1_0, Index s0_3_0) {
  const jitgen::DenseRegion<1> regions[] = {{{&map1}, int(n0)}};
  const Epilogue0 epilogue0 = {p0_2, p0_3, s0_3_0};
  jitgen::gemm_wgmma_dense<Config_1>(map0, int(m), int(k), regions, epilogue0);
}
