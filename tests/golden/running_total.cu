// jitgen 0.1.0: template scan/scan.cu.j2
// target sm_90a: 256 threads a block, 1 row at once, 8 elements of a row at once, accesses of 8 elements
// stages: map; scan over j0; map
// (N0, N1), rows of the last dimension: load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/scan.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input;
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input_2;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  Index length;
  Index size0;
};
static_assert(
    sizeof(Params) == 56 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(input_2) == 16 && JITGEN_OFFSET(result) == 32
    && JITGEN_OFFSET(length) == 48 && JITGEN_OFFSET(size0) == 52, "the launch packs it so");

constexpr int threads = 256;
constexpr int along = 256;  // threads that share a row
constexpr int items = 8;  // elements of a row that a thread takes at once
constexpr int tile = 2048;  // elements of a row that they take at once
constexpr int width = 8;  // elements of one access
using Scan0 = jitgen::Sum<float>;
extern "C" __global__ void __launch_bounds__(threads)
jitgen_scan_3efbb100(const __grid_constant__ Params params) {
  const Index length = params.length;
  __shared__ jitgen::ScanScratch<Scan0::Wide::State, 8> scratch0;
  const Index rows = params.size0;
  const Index block = Index(blockIdx.x);
  constexpr Index begin = 0;
  const Index end = length;
  const int thread = threadIdx.x % along;
  const Index wanted = block * (threads / along) + threadIdx.x / along;
  // A block's surplus threads walk the last row too and store nothing, so that all meet at every barrier.
  const bool live = wanted < rows;
  const Index row = live ? wanted : rows - 1;
  const Index i0 = Index(Unsigned(row));
  const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0];
  const jitgen::bfloat16* const from1 = params.input_2.pointer + i0 * params.input_2.strides[0];
  jitgen::bfloat16* const to2 = params.result.pointer + i0 * params.result.strides[0];
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  const float v4 = 2.0f;
  int turn = 0;
  Scan0::Wide::State carry0 = Scan0::Wide::none();
#pragma unroll 1
  for (Index start = begin; start < end; start += tile, ++turn) {
    const Index first = start + thread * items;
    jitgen::Vector<jitgen::bfloat16, width> x0[items / width];
#pragma unroll
    for (int k = 0; k < items / width; ++k) {
      if (first + k * width < end) x0[k] = jitgen::load_vector<width>(from0 + first + k * width);
    }
    jitgen::Vector<jitgen::bfloat16, width> x1[items / width];
#pragma unroll
    for (int k = 0; k < items / width; ++k) {
      if (first + k * width < end) x1[k] = jitgen::load_vector<width>(from1 + first + k * width);
    }
    Scan0::State upto0[items];
#pragma unroll
    for (int j = 0; j < items; ++j) {
      const Index column = first + j;
      auto own0 = Scan0::none();
      if (column < end) {
        const float v0 = jitgen::load(x0[j / width][j % width]);
        const float v1 = jitgen::load(x1[j / width][j % width]);
        const float v2 = v0 * v1;
        own0 = Scan0::of(v2, column);
      }
      upto0[j] = j == 0 ? own0 : Scan0::combine(upto0[j == 0 ? 0 : j - 1], own0);
    }
    const auto scanned0 = jitgen::scan_row<Scan0, along>(upto0[items - 1], scratch0, thread, turn);
    const auto before0 = Scan0::combine(Scan0::narrowed(carry0), scanned0.before);
    carry0 = Scan0::Wide::combine(carry0, Scan0::widened(scanned0.total));
    jitgen::Vector<jitgen::bfloat16, width> y2[items / width];
#pragma unroll
    for (int j = 0; j < items; ++j) {
      const Index column = first + j;
      if (live && column < end) {
        const float v0 = jitgen::load(x0[j / width][j % width]);
        const auto state0 = Scan0::combine(before0, upto0[j]);
        const float v3 = Scan0::value(state0);
        const float v5 = v3 * v4;
        const float v6 = v5 + v0;
        y2[j / width][j % width] = jitgen::store<jitgen::bfloat16>(v6);
      }
    }
#pragma unroll
    for (int k = 0; k < items / width; ++k) {
      if (live && first + k * width < end) jitgen::store_vector(to2 + first + k * width, y2[k]);
    }
  }
}
