// jitgen 0.1.0: gated_down, template gemm/gemm.cu.j2
// target sm_90a: rows mainloop, tiles of 4 x 32, 512 of K a step, 16 warps a block, 2 stages, 65536 bytes of shared memory
// stages: map; contract over k; map
// (rows, columns) over K: load bfloat16 full, x bfloat16 full, x bfloat16 full, weight bfloat16 k, store bfloat16 full
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_rows.cuh>
#include <jitgen/gemm_mma.cuh>

using Index = int32_t;

// x as it meets the weights: `width` of it from column n of its row m on.
struct Activation {
  using Element = jitgen::bfloat16;
  static constexpr bool computed = true;
  static constexpr int vector = 8;
  const jitgen::bfloat16* p0_1;
  Index s0_1_0;
  const jitgen::bfloat16* p0_2;
  Index s0_2_0;
  template <int width>
  __device__ __forceinline__ jitgen::Vector<Element, width> at(Index m, Index n, int live) const {
    jitgen::Vector<jitgen::bfloat16, width> x1;
    {
      const jitgen::bfloat16* const from = p0_1 + (m * s0_1_0 + n);
      x1 = jitgen::load_vector<width>(from);
    }
    jitgen::Vector<jitgen::bfloat16, width> x2;
    {
      const jitgen::bfloat16* const from = p0_2 + (m * s0_2_0 + n);
      x2 = jitgen::load_vector<width>(from);
    }
    jitgen::Vector<Element, width> y;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float x0_0 = jitgen::load(x1[j]);
      const float x0_3 = jitgen::load(x2[j]);
      const float x0_1 = jitgen::sigmoid(x0_0);
      const float x0_2 = x0_0 * x0_1;
      const float x0_4 = x0_2 * x0_3;
      y[j] = jitgen::store<Element>(x0_4);
    }
    return y;
  }
};

// (rows, columns) over K: load bfloat16 full, x bfloat16 full, x bfloat16 full, weight bfloat16 k, store bfloat16 full
struct Epilogue0 {
  const jitgen::bfloat16* p0_0;
  Index s0_0_0;
  jitgen::bfloat16* p0_4;
  Index s0_4_0;
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[1][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> x0;
    {
      const jitgen::bfloat16* const from = p0_0 + (m * s0_0_0 + n);
      x0 = jitgen::load_vector<width>(from);
    }
    jitgen::Vector<jitgen::bfloat16, width> y4;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float acc0 = acc[0][j];
      const float v0 = jitgen::load(x0[j]);
      const float v2 = v0 + acc0;
      y4[j] = jitgen::store<jitgen::bfloat16>(v2);
    }
    {
      jitgen::bfloat16* const to = p0_4 + (m * s0_4_0 + n);
      jitgen::store_vector(to, y4);
    }
  }
};
using Config0 = jitgen::MmaConfig<1, 4, 1, 2, 8, 1, 2, 8, 1, false>;
using Weight0 = jitgen::DenseRows<jitgen::bfloat16, false>;
constexpr int tokens = 4;  // of a block: rows of x
constexpr int rows = 32;  // and of a weight
constexpr int split = 1;
static_assert(jitgen::MmaShared<Config0>::bytes == 65536, "shared memory as the launch has it");

extern "C" __global__ void __launch_bounds__(512)
jitgen_gated_down(const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, const jitgen::bfloat16* p0_2, const jitgen::bfloat16* p0_3, jitgen::bfloat16* p0_4, Index m, Index k, Index n0, Index s0_0_0, Index s0_1_0, Index s0_2_0, Index s0_3_0, Index s0_4_0) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Activation activation = {p0_1, s0_1_0, p0_2, s0_2_0};
  const int m_blocks = int((m + tokens - 1) / tokens);
  int block = blockIdx.x / split;
  Weight0 weights[1] = {{{p0_3, s0_3_0, int(n0), int(k)}}};
  int columns = int(n0);
  const Epilogue0 epilogue0 = {p0_0, s0_0_0, p0_4, s0_4_0};
  jitgen::mma_gemm<Config0>(shared, activation, int(m), columns, int(k), weights, epilogue0, block % m_blocks, block / m_blocks);
}
