// jitgen 0.1.0: template gemm/gemm.cu.j2
// target sm_90a: mma mainloop, tiles of 1 x 16, 512 of K a step, 8 warps a block, 2 stages, 16384 bytes of shared memory
// stages: 2 x contract over k; map
// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_quant.cuh>
#include <jitgen/gemm_mma.cuh>

using Index = int32_t;

struct Params {
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
    sizeof(Params) == 80 && JITGEN_OFFSET(x) == 0 && JITGEN_OFFSET(codes) == 16 && JITGEN_OFFSET(scales) == 24 &&
    JITGEN_OFFSET(codes_2) == 32 && JITGEN_OFFSET(scales_2) == 40 && JITGEN_OFFSET(result) == 48 &&
    JITGEN_OFFSET(m) == 64 && JITGEN_OFFSET(k) == 68 && JITGEN_OFFSET(columns) == 72, "the launch packs it so");

// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
struct Epilogue0 {
  const Params& params;
  template <int width>
  __device__ __forceinline__ void run(
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
    {
      jitgen::bfloat16* const to = params.result.pointer + (m * params.result.strides[0] + n);
      jitgen::store_vector(to, y5);
    }
  }
};

struct Config0 {
  static constexpr int contractions = 2;
  static constexpr int tokens = 1;
  static constexpr int row_tiles = 1;
  static constexpr int warps_n = 1;
  static constexpr int warps_k = 8;
  static constexpr int cluster = 1;
  static constexpr int depth = 2;
  static constexpr int window = 8;
  static constexpr int width = 1;
  static constexpr bool sums = true;
};
using Weight0 = jitgen::QuantWeight<jitgen::bfloat16, 4, false, jitgen::bfloat16, 128>;
constexpr int tokens = 1;  // of a block: rows of x
constexpr int rows = 16;  // and of a weight
constexpr int split = 1;
static_assert(jitgen::MmaShared<Config0>::bytes == 16384, "shared memory as the launch has it");

extern "C" __global__ void __launch_bounds__(256, 4)
jitgen_gemm_de8e26b1(const __grid_constant__ Params params) {
  const Index m = params.m, k = params.k;
  extern __shared__ __align__(128) unsigned char shared[];
  const int m_blocks = int((m + tokens - 1) / tokens);
  int block = blockIdx.x / split;
  Weight0 weights[2] = {{reinterpret_cast<const uint4*>(params.codes.pointer), params.scales.pointer, nullptr}, {reinterpret_cast<const uint4*>(params.codes_2.pointer), params.scales_2.pointer, nullptr}};
  int columns = int(params.columns);
  const Epilogue0 epilogue0 = {params};
  jitgen::mma_gemm<Config0>(shared, jitgen::StoredActivation<jitgen::bfloat16, 8>{params.x.pointer, params.x.strides[0], 1}, int(m), columns, int(k), weights, epilogue0, block % m_blocks, block / m_blocks);
}
