// jitgen 0.1.0: mlp_up, template gemm/gemm.cu.j2
// target sm_90a: mma mainloop, tiles of 1 x 16, 512 of K a step, 8 warps a block, 2 stages, 16384 bytes of shared memory
// stages: 2 x contract over k; map
// (rows, columns) over K: x bfloat16 k, codes uint8 whole, scales bfloat16 whole, codes uint8 whole, scales bfloat16 whole, store bfloat16 full
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_quant.cuh>
#include <jitgen/gemm_mma.cuh>

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
jitgen_mlp_up(const jitgen::bfloat16* p0_0, const uint8_t* p0_1, const jitgen::bfloat16* p0_2, const uint8_t* p0_3, const jitgen::bfloat16* p0_4, jitgen::bfloat16* p0_5, Index m, Index k, Index n0, Index s0_0_0, Index s0_5_0) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int m_blocks = int((m + tokens - 1) / tokens);
  int block = blockIdx.x / split;
  Weight0 weights[2] = {{reinterpret_cast<const uint4*>(p0_1), p0_2, nullptr}, {reinterpret_cast<const uint4*>(p0_3), p0_4, nullptr}};
  int columns = int(n0);
  const Epilogue0 epilogue0 = {p0_5, s0_5_0};
  jitgen::mma_gemm<Config0>(shared, jitgen::StoredActivation<jitgen::bfloat16, 8>{p0_0, s0_0_0, 1}, int(m), columns, int(k), weights, epilogue0, block % m_blocks, block / m_blocks);
}
