// jitgen 0.1.0: template reduction/reduction.cu.j2
// target sm_90a: 8 threads a row, 16 rows a block, 4 rows an iteration, 1 access a thread of 8 elements, the row stays in registers, 8 blocks a multiprocessor
// stages: reduce over j0; map; reduce over j0; map
// (N0, N1), rows of the last dimension: load bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/pair.cuh>
#include <jitgen/reduce.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  Index length;
  Index size0;
};
static_assert(
    sizeof(Params) == 40 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(result) == 16 && JITGEN_OFFSET(length) == 32
    && JITGEN_OFFSET(size0) == 36, "the launch packs it so");

constexpr int threads = 8;  // of one row in one block
constexpr int rows_of_block = 16;
constexpr int cluster = 1;
constexpr int width = 8;
constexpr int unroll = 1;
constexpr int whole = 1;  // vectors of every thread that lie in the row
constexpr int warps = threads < 32 ? 1 : threads / 32;
constexpr int turns = 4;  // rows of a thread, one after another

extern "C" __global__ void __launch_bounds__(threads * rows_of_block, 8)
jitgen_reduction_f2d360c0(const __grid_constant__ Params params) {
  const Index length = params.length;
  __shared__ jitgen::Scratch<float, warps> scratch_v1[rows_of_block];
  __shared__ jitgen::Scratch<float, warps> scratch_v7[rows_of_block];
  const int thread = threadIdx.x % threads;
  const int row_of_block = threadIdx.x / threads;
  const Index last = params.size0 - 1;
  const Index first = (thread) * width;
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  // All rows are asked for before the first is used.
  jitgen::Vector<jitgen::bfloat16, width> of_x0[turns][unroll];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    // A block's surplus threads walk the last row too and store nothing, so that all meet at every barrier.
    const Index wanted = (Index(blockIdx.x) * turns + turn) * rows_of_block + row_of_block;
    const bool live = wanted <= last;
    const Index row = live ? wanted : last;
    const Index i0 = Index(Unsigned(row));
    const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0];
    jitgen::bfloat16* const to1 = params.result.pointer + i0 * params.result.strides[0];
    auto& x0 = of_x0[turn];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index column = u * (threads * width) + first;
      {
        x0[u] = jitgen::load_vector<width>(from0 + column);
      }
    }
  }
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    // A block's surplus threads walk the last row too and store nothing, so that all meet at every barrier.
    const Index wanted = (Index(blockIdx.x) * turns + turn) * rows_of_block + row_of_block;
    const bool live = wanted <= last;
    const Index row = live ? wanted : last;
    const Index i0 = Index(Unsigned(row));
    const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0];
    jitgen::bfloat16* const to1 = params.result.pointer + i0 * params.result.strides[0];
    auto& x0 = of_x0[turn];
    float kept_v6[unroll][width];

    // Pass 0.
    const float v3 = 1.4426950216293335f;
    const float v4 = 30.0f;
    jitgen::Pair<jitgen::bfloat16> pair_v1 = jitgen::Pair<jitgen::bfloat16>::of(-__int_as_float(0x7f800000));
    {
      constexpr Index start = 0;
  #pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const Index column = start + u * (cluster * threads * width) + first;
        {
          pair_v1 = jitgen::maximum(pair_v1, x0[u]);
        }
      }
    }
    const float part_v1 = jitgen::maximum(pair_v1);
    const float v1 = jitgen::combine_row<jitgen::Max, threads>(part_v1, scratch_v1[row_of_block], thread);

    // Pass 1.
    float part_v7 = 0.0f;
    {
      constexpr Index start = 0;
  #pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const Index column = start + u * (cluster * threads * width) + first;
        {
  #pragma unroll
          for (int j = 0; j < width; ++j) {
            const float v0 = jitgen::load(x0[u][j]);
            const float v2 = v0 - v1;
            const float v5 = jitgen::fma(v2, v3, v4);
            const float v6 = jitgen::exp2_normal(v5);
            kept_v6[u][j] = v6;
            part_v7 = jitgen::Sum::combine(part_v7, v6);
          }
        }
      }
    }
    const float v7 = jitgen::combine_row<jitgen::Sum, threads>(part_v7, scratch_v7[row_of_block], thread);

    // Pass 2.
    const float v8 = jitgen::reciprocal(v7);
    {
      constexpr Index start = 0;
  #pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const Index column = start + u * (cluster * threads * width) + first;
        {
          jitgen::Vector<jitgen::bfloat16, width> y1;
  #pragma unroll
          for (int j = 0; j < width; ++j) {
            const float v6 = kept_v6[u][j];
            const float v9 = v6 * v8;
            y1[j] = jitgen::store<jitgen::bfloat16>(v9);
          }
          if (live) jitgen::store_vector(to1 + column, y1);
        }
      }
    }
  }
}
