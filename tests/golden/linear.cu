// jitgen 0.1.0: template gemm/gemm.cu.j2
// target sm_90a: wgmma_dense mainloop, tiles of 128 x 256, 64 of K a step, 12 warps a block, 4 stages, at most 4 blocks of a cluster share K, persistent blocks, 1 a multiprocessor, raster of 8
//     tiles, 229440 bytes of shared memory, or, for some numbers of rows: wgmma_dense mainloop, tiles of 128 x 192, 64 of K a step, 12 warps a block, 4 stages, at most 2 blocks of a cluster share K,
//     persistent blocks, 1 a multiprocessor, raster of 8 tiles, 196672 bytes of shared memory, or, for some numbers of rows: wgmma_dense mainloop, tiles of 192 x 192, 64 of K a step, 16 warps a
//     block, 4 stages, persistent blocks, 1 a multiprocessor, raster of 8 tiles, x and the weights swapped, 222784 bytes of shared memory, or, for some numbers of rows: wgmma_dense mainloop, tiles
//     of 160 x 256, 64 of K a step, 12 warps a block, 4 stages, persistent blocks, 1 a multiprocessor, raster of 8 tiles, x and the weights swapped, 230464 bytes of shared memory
// stages: contract over k; map
// (rows, columns) over K: x bfloat16 k, weight bfloat16 k, load bfloat16 column, store bfloat16 full
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_wgmma_dense.cuh>

using Index = int32_t;

struct Params {
  jitgen::TensorMap x_map;
  jitgen::TensorMap weight_map;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> x;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> weight;
  jitgen::Operand<const jitgen::bfloat16, Index, 0> input;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  Index m;
  Index k;
  Index columns;
};
static_assert(
    sizeof(Params) == 384 && JITGEN_OFFSET(x_map) == 0 && JITGEN_OFFSET(weight_map) == 128 &&
    JITGEN_OFFSET(x) == 256 && JITGEN_OFFSET(weight) == 272 && JITGEN_OFFSET(input) == 288 &&
    JITGEN_OFFSET(result) == 296 && JITGEN_OFFSET(m) == 312 && JITGEN_OFFSET(k) == 316 &&
    JITGEN_OFFSET(columns) == 320, "the launch packs it so");

// (rows, columns) over K: x bfloat16 k, weight bfloat16 k, load bfloat16 column, store bfloat16 full
struct Epilogue0 {
  const Params& params;
  // What one call computes, and where it goes: several may be computed before the first is stored.
  template <int width>
  struct Results {
    jitgen::Vector<jitgen::bfloat16, width> y3;
  };
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[1][width], int live) const {
    store<width>(m, n, results<width>(m, n, acc, live), live);
  }
  template <int width>
  __device__ __forceinline__ Results<width> results(
      Index m, Index n, const float (&acc)[1][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> x2;
    {
      const jitgen::bfloat16* const from = params.input.pointer + (n);
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
    return {y3};
  }
  template <int width>
  __device__ __forceinline__ void store(Index m, Index n, const Results<width>& results, int live) const {
    const jitgen::Vector<jitgen::bfloat16, width>& y3 = results.y3;
    {
      jitgen::bfloat16* const to = params.result.pointer + (m * params.result.strides[0] + n);
      jitgen::store_vector(to, y3);
    }
  }
};
struct Config : jitgen::DenseDefaults {
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
  static constexpr bool shares_x = false;
  static constexpr int raster = 8;
  static constexpr int most_splits = 4;
  static constexpr int resident = 1;
  static constexpr int staged = 64;
  static constexpr int run = 8;
  static constexpr bool in_pairs = true;
};
using Shape = jitgen::DenseShape<Config>;
static_assert(Shape::bytes == 229440, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
jitgen_gemm_878219f1(const __grid_constant__ Params params) {
  const jitgen::DenseRegion<1> regions[] = {{{&params.weight_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_dense<Config>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}

struct Config_1 : jitgen::DenseDefaults {
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
  static constexpr bool shares_x = false;
  static constexpr int raster = 8;
  static constexpr int most_splits = 2;
  static constexpr int resident = 1;
  static constexpr int staged = 64;
  static constexpr int run = 8;
  static constexpr bool in_pairs = true;
};
using Shape_1 = jitgen::DenseShape<Config_1>;
static_assert(Shape_1::bytes == 196672, "shared memory as the launch has it");
static_assert(Shape_1::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_1::threads, Config_1::resident)
jitgen_gemm_878219f1_1(const __grid_constant__ Params params) {
  const jitgen::DenseRegion<1> regions[] = {{{&params.weight_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_dense<Config_1>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}

struct Config_2 : jitgen::DenseDefaults {
  using Element = jitgen::bfloat16;
  static constexpr bool transposed = false;
  static constexpr bool trimmed = true;
  static constexpr bool pingpong = false;
  static constexpr int ranges = 1;
  static constexpr int contractions = 1;
  static constexpr int regions = 1;
  static constexpr int down = 3;
  static constexpr int across = 1;
  static constexpr int columns = 192;
  static constexpr int stages = 4;
  static constexpr int multicast = 1;
  static constexpr bool shares_x = false;
  static constexpr int raster = 8;
  static constexpr int most_splits = 1;
  static constexpr int resident = 1;
  static constexpr int staged = 32;
  static constexpr int run = 8;
  static constexpr bool swapped = true;
  static constexpr bool in_pairs = true;
};
using Shape_2 = jitgen::DenseShape<Config_2>;
static_assert(Shape_2::bytes == 222784, "shared memory as the launch has it");
static_assert(Shape_2::threads == 512, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_2::threads, Config_2::resident)
jitgen_gemm_878219f1_2(const __grid_constant__ Params params) {
  const jitgen::DenseRegion<1> regions[] = {{{&params.weight_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_dense<Config_2>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}

struct Config_3 : jitgen::DenseDefaults {
  using Element = jitgen::bfloat16;
  static constexpr bool transposed = false;
  static constexpr bool trimmed = true;
  static constexpr bool pingpong = false;
  static constexpr int ranges = 1;
  static constexpr int contractions = 1;
  static constexpr int regions = 1;
  static constexpr int down = 2;
  static constexpr int across = 1;
  static constexpr int columns = 160;
  static constexpr int stages = 4;
  static constexpr int multicast = 1;
  static constexpr bool shares_x = false;
  static constexpr int raster = 8;
  static constexpr int most_splits = 1;
  static constexpr int resident = 1;
  static constexpr int staged = 32;
  static constexpr int run = 8;
  static constexpr bool swapped = true;
  static constexpr int blocks = 2;
  static constexpr bool in_pairs = true;
};
using Shape_3 = jitgen::DenseShape<Config_3>;
static_assert(Shape_3::bytes == 230464, "shared memory as the launch has it");
static_assert(Shape_3::threads == 384, "threads as the launch has them");

extern "C" __global__ void __launch_bounds__(Shape_3::threads, Config_3::resident)
jitgen_gemm_878219f1_3(const __grid_constant__ Params params) {
  const jitgen::DenseRegion<1> regions[] = {{{&params.weight_map}, int(params.columns)}};
  const Epilogue0 epilogue0 = {params};
  jitgen::gemm_wgmma_dense<Config_3>(params.x_map, int(params.m), int(params.k), regions, epilogue0);
}
