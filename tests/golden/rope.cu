// jitgen 0.1.0: template elementwise/elementwise.cu.j2
// target sm_80: 128 threads a block, 1 step a thread of 8 elements, 8 blocks a multiprocessor
// stages: map
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>

using Index = int32_t;
using Unsigned = uint32_t;
constexpr int threads = 128;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input;
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input_2;
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input_3;
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input_4;
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input_5;
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input_6;
  jitgen::Operand<jitgen::bfloat16, Index, 2> result;
  jitgen::Operand<jitgen::bfloat16, Index, 2> result_2;
  Index size0;
  Index size1;
  Index size2;
};
static_assert(
    sizeof(Params) == 144 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(input_2) == 16 &&
    JITGEN_OFFSET(input_3) == 32 && JITGEN_OFFSET(input_4) == 48 && JITGEN_OFFSET(input_5) == 64 &&
    JITGEN_OFFSET(input_6) == 80 && JITGEN_OFFSET(result) == 96 && JITGEN_OFFSET(result_2) == 112 &&
    JITGEN_OFFSET(size0) == 128 && JITGEN_OFFSET(size1) == 132 && JITGEN_OFFSET(size2) == 136, "the launch packs it so");

// (N0, N1, N2) as 3 dimensions: load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous, store bfloat16 contiguous
template <bool whole>
__device__ __forceinline__ void region0(const Params& params, Index block) {
  constexpr int width = 8;
  constexpr int unroll = whole ? 1 : 1;
  const Index steps = (params.size2 + (width - 1)) / width;
  const Index total = params.size0 * params.size1 * steps;
#pragma unroll 1
  for (int part = 0; part < 1; part += unroll) {
    const Index first = (block * 1 + part) * threads + Index(threadIdx.x);
    jitgen::Vector<jitgen::bfloat16, width> x0[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x1[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x2[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x3[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x4[unroll];
    jitgen::Vector<jitgen::bfloat16, width> x5[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index step = first + u * threads;
      if (whole || step < total) {
        const Index column = Index(Unsigned(step) % Unsigned(steps)) * width;
        const Unsigned r1 = Unsigned(step) / Unsigned(steps);
        const Index i1 = Index(r1 % Unsigned(params.size1));
        const Index i0 = Index(r1 / Unsigned(params.size1));
        const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0] + i1 * params.input.strides[1] + column;
        x0[u] = jitgen::load_vector<width>(from0);
        const jitgen::bfloat16* const from1 = params.input_2.pointer + i0 * params.input_2.strides[0] + i1 * params.input_2.strides[1] + column;
        x1[u] = jitgen::load_vector<width>(from1);
        const jitgen::bfloat16* const from2 = params.input_3.pointer + i0 * params.input_3.strides[0] + i1 * params.input_3.strides[1] + column;
        x2[u] = jitgen::load_vector<width>(from2);
        const jitgen::bfloat16* const from3 = params.input_4.pointer + i0 * params.input_4.strides[0] + i1 * params.input_4.strides[1] + column;
        x3[u] = jitgen::load_vector<width>(from3);
        const jitgen::bfloat16* const from4 = params.input_5.pointer + i0 * params.input_5.strides[0] + i1 * params.input_5.strides[1] + column;
        x4[u] = jitgen::load_vector<width>(from4);
        const jitgen::bfloat16* const from5 = params.input_6.pointer + i0 * params.input_6.strides[0] + i1 * params.input_6.strides[1] + column;
        x5[u] = jitgen::load_vector<width>(from5);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index step = first + u * threads;
      if (whole || step < total) {
        const Index column = Index(Unsigned(step) % Unsigned(steps)) * width;
        const Unsigned r1 = Unsigned(step) / Unsigned(steps);
        const Index i1 = Index(r1 % Unsigned(params.size1));
        const Index i0 = Index(r1 / Unsigned(params.size1));
        jitgen::Vector<jitgen::bfloat16, width> x6;
        jitgen::Vector<jitgen::bfloat16, width> x7;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const float v0 = jitgen::load(x0[u][j]);
          const float v1 = jitgen::load(x1[u][j]);
          const float v3 = jitgen::load(x2[u][j]);
          const float v5 = jitgen::load(x3[u][j]);
          const float v8 = jitgen::load(x4[u][j]);
          const float v10 = jitgen::load(x5[u][j]);
          const float v2 = v0 * v1;
          const float v4 = -v3;
          const float v6 = v4 * v5;
          const float v7 = v2 + v6;
          const float v9 = v3 * v8;
          const float v11 = v0 * v10;
          const float v12 = v9 + v11;
          x6[j] = jitgen::store<jitgen::bfloat16>(v7);
          x7[j] = jitgen::store<jitgen::bfloat16>(v12);
        }
        jitgen::bfloat16* const to6 = params.result.pointer + i0 * params.result.strides[0] + i1 * params.result.strides[1] + column;
        jitgen::store_vector(to6, x6);
        jitgen::bfloat16* const to7 = params.result_2.pointer + i0 * params.result_2.strides[0] + i1 * params.result_2.strides[1] + column;
        jitgen::store_vector(to7, x7);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(threads, 8)
jitgen_elementwise_3d82d3aa(const __grid_constant__ Params params) {
  {
    const Index block = Index(blockIdx.x) - 0;
    if ((block + 1) * 1024 <= params.size0 * params.size1 * params.size2) {
      region0<true>(params, block);
    } else {
      region0<false>(params, block);
    }
  }
}
