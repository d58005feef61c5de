// jitgen 0.1.0: template reduction/reduction.cu.j2
// target sm_90a: 64 threads a row, 64 rows a block, 8 neighbouring rows a thread, 8 accesses a thread of 1 element, the row stays in registers, 2 blocks a multiprocessor
// stages: reduce over j0; map; reduce over j0; map
// (N0, N1), rows of the last dimension: load bfloat16 strided, store bfloat16 strided
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/reduce.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input;
  jitgen::Operand<jitgen::bfloat16, Index, 2> result;
  Index length;
  Index size0;
};
static_assert(
    sizeof(Params) == 40 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(result) == 16 && JITGEN_OFFSET(length) == 32
    && JITGEN_OFFSET(size0) == 36, "the launch packs it so");

constexpr int threads = 64;  // of each row in one block
constexpr int lanes = 8;  // threads side by side
constexpr int beside = 8;  // rows of a thread
constexpr int cluster = 1;
constexpr int unroll = 8;
constexpr int whole = 8;  // elements of every thread that lie in the row

extern "C" __global__ void __launch_bounds__(threads * lanes, 2)
jitgen_reduction_56762275(const __grid_constant__ Params params) {
  const Index length = params.length;
  __shared__ jitgen::ColumnScratch<jitgen::column_groups<lanes, threads>, lanes * beside, float, float> scratch;
  const int thread = threadIdx.x / lanes;
  const Index rows = params.size0;
  const Index wanted = (Index(blockIdx.x) / cluster * lanes + threadIdx.x % lanes) * beside;
  // A block's surplus threads walk the last rows too and store nothing, so that all meet at every barrier.
  const bool live = wanted < rows;
  const Index row = live ? wanted : rows - beside;
  const Index i0 = Index(Unsigned(row));
  const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0];
  jitgen::bfloat16* const to1 = params.result.pointer + i0 * params.result.strides[0];
  const Index first = thread;
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  const float v3 = 1.4426950216293335f;
  const float v4 = 30.0f;
  float row_v8[beside];
  float row_v1[beside];
  float row_v7[beside];
  jitgen::Vector<jitgen::bfloat16, beside> x0[unroll];

  // Pass 0.
  float part_v1[beside];
#pragma unroll
  for (int j = 0; j < beside; ++j) part_v1[j] = -__int_as_float(0x7f800000);
  {
    constexpr Index start = 0;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index column = start + u * (cluster * threads) + first;
      {
        x0[u] = jitgen::load_vector<beside>(from0 + column * params.input.strides[1]);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index column = start + u * (cluster * threads) + first;
      {
#pragma unroll
        for (int j = 0; j < beside; ++j) {
          const float v0 = jitgen::load(x0[u][j]);
          part_v1[j] = jitgen::Max::combine(part_v1[j], v0);
        }
      }
    }
  }
  jitgen::combine_columns<jitgen::Max, lanes, threads>(part_v1, scratch);
#pragma unroll
  for (int j = 0; j < beside; ++j) row_v1[j] = part_v1[j];

  // Pass 1.
  float part_v7[beside];
#pragma unroll
  for (int j = 0; j < beside; ++j) part_v7[j] = 0.0f;
  {
    constexpr Index start = 0;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index column = start + u * (cluster * threads) + first;
      {
#pragma unroll
        for (int j = 0; j < beside; ++j) {
          const float v1 = row_v1[j];
          const float v0 = jitgen::load(x0[u][j]);
          const float v2 = v0 - v1;
          const float v5 = jitgen::fma(v2, v3, v4);
          const float v6 = jitgen::exp2_normal(v5);
          part_v7[j] = jitgen::Sum::combine(part_v7[j], v6);
        }
      }
    }
  }
  jitgen::combine_columns<jitgen::Sum, lanes, threads>(part_v7, scratch);
#pragma unroll
  for (int j = 0; j < beside; ++j) row_v7[j] = part_v7[j];

  // Pass 2.
#pragma unroll
  for (int j = 0; j < beside; ++j) {
    const float v7 = row_v7[j];
    const float v8 = jitgen::reciprocal(v7);
    row_v8[j] = v8;
  }
  {
    constexpr Index start = 0;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const Index column = start + u * (cluster * threads) + first;
      {
        jitgen::Vector<jitgen::bfloat16, beside> y1;
#pragma unroll
        for (int j = 0; j < beside; ++j) {
          const float v8 = row_v8[j];
          const float v1 = row_v1[j];
          const float v0 = jitgen::load(x0[u][j]);
          const float v2 = v0 - v1;
          const float v5 = jitgen::fma(v2, v3, v4);
          const float v6 = jitgen::exp2_normal(v5);
          const float v9 = v6 * v8;
          y1[j] = jitgen::store<jitgen::bfloat16>(v9);
        }
        if (live) jitgen::store_vector(to1 + column * params.result.strides[1], y1);
      }
    }
  }
}
