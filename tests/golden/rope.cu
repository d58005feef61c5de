// jitgen 0.1.0: rope, template elementwise/elementwise.cu.j2
// target sm_80: 128 threads a block, 1 step a thread of 8 elements, 8 blocks a multiprocessor
// stages: map
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>

using Index = int32_t;
using Unsigned = uint32_t;
constexpr int threads = 128;

// (s0_0, s0_1, (s0_2 // 2)) as 3 dimensions: load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous, store bfloat16 contiguous
template <bool whole>
__device__ __forceinline__ void region0(
    Index block, const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, const jitgen::bfloat16* p0_2, const jitgen::bfloat16* p0_3, const jitgen::bfloat16* p0_4, const jitgen::bfloat16* p0_5, jitgen::bfloat16* p0_6, jitgen::bfloat16* p0_7, Index n0_0, Index n0_1, Index n0_2, Index s0_0_0, Index s0_0_1, Index s0_1_0, Index s0_1_1, Index s0_2_0, Index s0_2_1, Index s0_3_0, Index s0_3_1, Index s0_4_0, Index s0_4_1, Index s0_5_0, Index s0_5_1, Index s0_6_0, Index s0_6_1, Index s0_7_0, Index s0_7_1) {
  constexpr int width = 8;
  constexpr int unroll = whole ? 1 : 1;
  const Index steps = (n0_2 + (width - 1)) / width;
  const Index total = n0_0 * n0_1 * steps;
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
        const Index i1 = Index(r1 % Unsigned(n0_1));
        const Index i0 = Index(r1 / Unsigned(n0_1));
        const jitgen::bfloat16* const from0 = p0_0 + i0 * s0_0_0 + i1 * s0_0_1 + column;
        x0[u] = jitgen::load_vector<width>(from0);
        const jitgen::bfloat16* const from1 = p0_1 + i0 * s0_1_0 + i1 * s0_1_1 + column;
        x1[u] = jitgen::load_vector<width>(from1);
        const jitgen::bfloat16* const from2 = p0_2 + i0 * s0_2_0 + i1 * s0_2_1 + column;
        x2[u] = jitgen::load_vector<width>(from2);
        const jitgen::bfloat16* const from3 = p0_3 + i0 * s0_3_0 + i1 * s0_3_1 + column;
        x3[u] = jitgen::load_vector<width>(from3);
        const jitgen::bfloat16* const from4 = p0_4 + i0 * s0_4_0 + i1 * s0_4_1 + column;
        x4[u] = jitgen::load_vector<width>(from4);
        const jitgen::bfloat16* const from5 = p0_5 + i0 * s0_5_0 + i1 * s0_5_1 + column;
        x5[u] = jitgen::load_vector<width>(from5);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index step = first + u * threads;
      if (whole || step < total) {
        const Index column = Index(Unsigned(step) % Unsigned(steps)) * width;
        const Unsigned r1 = Unsigned(step) / Unsigned(steps);
        const Index i1 = Index(r1 % Unsigned(n0_1));
        const Index i0 = Index(r1 / Unsigned(n0_1));
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
        jitgen::bfloat16* const to6 = p0_6 + i0 * s0_6_0 + i1 * s0_6_1 + column;
        jitgen::store_vector(to6, x6);
        jitgen::bfloat16* const to7 = p0_7 + i0 * s0_7_0 + i1 * s0_7_1 + column;
        jitgen::store_vector(to7, x7);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(threads, 8)
jitgen_rope(const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, const jitgen::bfloat16* p0_2, const jitgen::bfloat16* p0_3, const jitgen::bfloat16* p0_4, const jitgen::bfloat16* p0_5, jitgen::bfloat16* p0_6, jitgen::bfloat16* p0_7, Index n0_0, Index n0_1, Index n0_2, Index s0_0_0, Index s0_0_1, Index s0_1_0, Index s0_1_1, Index s0_2_0, Index s0_2_1, Index s0_3_0, Index s0_3_1, Index s0_4_0, Index s0_4_1, Index s0_5_0, Index s0_5_1, Index s0_6_0, Index s0_6_1, Index s0_7_0, Index s0_7_1) {
  {
    const Index block = Index(blockIdx.x) - 0;
    if ((block + 1) * 1024 <= n0_0 * n0_1 * n0_2) {
      region0<true>(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1);
    } else {
      region0<false>(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1);
    }
  }
}
