// jitgen 0.1.0: template elementwise/elementwise.cu.j2
// target sm_90a: 128 threads a block, 1 step a thread of 8 elements
// stages: map
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>

using Index = int32_t;
using Unsigned = uint32_t;
constexpr int threads = 128;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 0> input;
  jitgen::Operand<const jitgen::bfloat16, Index, 0> input_2;
  jitgen::Operand<jitgen::bfloat16, Index, 0> result;
  Index size0;
};
static_assert(
    sizeof(Params) == 32 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(input_2) == 8 && JITGEN_OFFSET(result) == 16
    && JITGEN_OFFSET(size0) == 24, "the launch packs it so");

// (N0, N1) as 1 dimension: load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous
template <bool whole>
__device__ __forceinline__ void region0(const Params& params, Index block) {
  constexpr int width = 8;
  constexpr int unroll = whole ? 1 : 1;
  const Index steps = (params.size0 + (width - 1)) / width;
  const Index total = steps;
#pragma unroll 1
  for (int part = 0; part < 1; part += unroll) {
    const Index first = (block * 1 + part) * threads + Index(threadIdx.x);
    jitgen::Vector<jitgen::bfloat16, width> x0[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x1[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index step = first + u * threads;
      if (whole || step < total) {
        const Index column = step * width;
        const jitgen::bfloat16* const from0 = params.input.pointer + column;
        if (whole || column + width <= params.size0) {
          x0[u] = jitgen::load_vector<width>(from0);
        } else {
#pragma unroll
          for (int j = 0; j < width; ++j) {
            if (column + j < params.size0) x0[u][j] = from0[j];
          }
        }
        const jitgen::bfloat16* const from1 = params.input_2.pointer + column;
        if (whole || column + width <= params.size0) {
          x1[u] = jitgen::load_vector<width>(from1);
        } else {
#pragma unroll
          for (int j = 0; j < width; ++j) {
            if (column + j < params.size0) x1[u][j] = from1[j];
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index step = first + u * threads;
      if (whole || step < total) {
        const Index column = step * width;
        jitgen::Vector<jitgen::bfloat16, width> x2;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const float v0 = jitgen::load(x0[u][j]);
          const float v3 = jitgen::load(x1[u][j]);
          const float v1 = jitgen::coarse_sigmoid(v0);
          const float v2 = v0 * v1;
          const float v4 = v2 * v3;
          x2[j] = jitgen::store<jitgen::bfloat16>(v4);
        }
        jitgen::bfloat16* const to2 = params.result.pointer + column;
        if (whole || column + width <= params.size0) {
          jitgen::store_vector(to2, x2);
        } else {
#pragma unroll
          for (int j = 0; j < width; ++j) {
            if (column + j < params.size0) to2[j] = x2[j];
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(threads)
jitgen_elementwise_d90ef191(const __grid_constant__ Params params) {
  // The launch may overlap the kernel ahead in the stream, whose memory is ready from here on. That this kernel lets
  // the next one in only by ending is 20 % faster on an H200: of its many small blocks each would have to say so.
  jitgen::previous_kernel_wait();
  {
    const Index block = Index(blockIdx.x) - 0;
    if ((block + 1) * 1024 <= params.size0) {
      region0<true>(params, block);
    } else {
      region0<false>(params, block);
    }
  }
}

// jitgen 0.1.0: template gemm/gemm.cu.j2
// target sm_90a: rows mainloop, tiles of 8 x 32, 512 of K a step, 8 warps a block, 4 stages, 65536 bytes of shared memory
// stages: contract over k; map
// (rows, columns) over K: load bfloat16 full, x bfloat16 k, weight bfloat16 k, store bfloat16 full
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/gemm_rows.cuh>
#include <jitgen/gemm_mma.cuh>

using Index = int32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> x;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> weight;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  Index m;
  Index k;
  Index columns;
};
static_assert(
    sizeof(Params) == 80 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(x) == 16 && JITGEN_OFFSET(weight) == 32 &&
    JITGEN_OFFSET(result) == 48 && JITGEN_OFFSET(m) == 64 && JITGEN_OFFSET(k) == 68 && JITGEN_OFFSET(columns) == 72, "the launch packs it so");

// (rows, columns) over K: load bfloat16 full, x bfloat16 k, weight bfloat16 k, store bfloat16 full
struct Epilogue0 {
  const Params& params;
  template <int width>
  __device__ __forceinline__ void run(
      Index m, Index n, const float (&acc)[1][width], int live) const {
    jitgen::Vector<jitgen::bfloat16, width> x0;
    {
      const jitgen::bfloat16* const from = params.input.pointer + (m * params.input.strides[0] + n);
      x0 = jitgen::load_vector<width>(from);
    }
    jitgen::Vector<jitgen::bfloat16, width> y3;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float acc0 = acc[0][j];
      const float v0 = jitgen::load(x0[j]);
      const float v2 = v0 + acc0;
      y3[j] = jitgen::store<jitgen::bfloat16>(v2);
    }
    {
      jitgen::bfloat16* const to = params.result.pointer + (m * params.result.strides[0] + n);
      jitgen::store_vector(to, y3);
    }
  }
};

struct Config0 {
  static constexpr int contractions = 1;
  static constexpr int tokens = 8;
  static constexpr int row_tiles = 2;
  static constexpr int warps_n = 1;
  static constexpr int warps_k = 8;
  static constexpr int cluster = 1;
  static constexpr int depth = 4;
  static constexpr int window = 4;
  static constexpr int width = 1;
  static constexpr bool sums = false;
};
using Weight0 = jitgen::DenseRows<jitgen::bfloat16, false>;
constexpr int tokens = 8;  // of a block: rows of x
constexpr int rows = 32;  // and of a weight
constexpr int split = 1;
static_assert(jitgen::MmaShared<Config0>::bytes == 65536, "shared memory as the launch has it");

extern "C" __global__ void __launch_bounds__(256)
jitgen_gemm_6e684e87(const __grid_constant__ Params params) {
  const Index m = params.m, k = params.k;
  extern __shared__ __align__(128) unsigned char shared[];
  const int m_blocks = int((m + tokens - 1) / tokens);
  int block = blockIdx.x / split;
  Weight0 weights[1] = {{{params.weight.pointer, params.weight.strides[0], int(params.columns), int(k)}}};
  int columns = int(params.columns);
  const Epilogue0 epilogue0 = {params};
  jitgen::mma_gemm<Config0>(shared, jitgen::StoredActivation<jitgen::bfloat16, 8>{params.x.pointer, params.x.strides[0], 1}, int(m), columns, int(k), weights, epilogue0, block % m_blocks, block / m_blocks);
}
