// jitgen 0.1.0: template scan/scan.cu.j2
// target sm_90a: 256 threads a block, 32 rows at once, 8 elements of a row at once
// stages: 2 x scan over j0
// (N0, N1), rows of the last dimension: load bfloat16 strided, store bfloat16 strided, store int64 strided
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/scan.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 2> input;
  jitgen::Operand<jitgen::bfloat16, Index, 2> result;
  jitgen::Operand<int64_t, Index, 2> result_2;
  Index length;
  Index size0;
};
static_assert(
    sizeof(Params) == 56 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(result) == 16 &&
    JITGEN_OFFSET(result_2) == 32 && JITGEN_OFFSET(length) == 48 && JITGEN_OFFSET(size0) == 52, "the launch packs it so");

constexpr int threads = 256;
constexpr int along = 8;  // threads that share a row
constexpr int items = 8;  // elements of a row that a thread takes at once
constexpr int tile = 64;  // elements of a row that they take at once
constexpr int lanes = threads / along;  // threads side by side
constexpr int beside = 1;  // neighbouring rows of a thread
using Scan0 = jitgen::ArgMax<float>;
extern "C" __global__ void __launch_bounds__(threads)
jitgen_scan_6bf058ce(const __grid_constant__ Params params) {
  const Index length = params.length;
  __shared__ jitgen::ScanScratch<Scan0::Wide::State, 256> scratch0;
  const Index rows = params.size0;
  const Index block = Index(blockIdx.x);
  constexpr Index begin = 0;
  const Index end = length;
  const int part = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const Index wanted = (block * lanes + lane) * beside;
  // A block's surplus threads walk the last rows too and store nothing, so that all meet at every barrier.
  const bool live = wanted < rows;
  const Index row = live ? wanted : rows - beside;
  const Index i0 = Index(Unsigned(row));
  const jitgen::bfloat16* const from0 = params.input.pointer + i0 * params.input.strides[0];
  jitgen::bfloat16* const to1 = params.result.pointer + i0 * params.result.strides[0];
  int64_t* const to2 = params.result_2.pointer + i0 * params.result_2.strides[0];
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  int turn = 0;
  Scan0::Wide::State carry0[beside];
#pragma unroll
  for (int j = 0; j < beside; ++j) carry0[j] = Scan0::Wide::none();
#pragma unroll 1
  for (Index start = begin; start < end; start += tile, ++turn) {
    const Index first = start + part * items;
    jitgen::Vector<jitgen::bfloat16, beside> x0[items];
#pragma unroll
    for (int u = 0; u < items; ++u) {
      const Index column = first + u;
      if (column < end) {
        x0[u] = jitgen::load_vector<beside>(from0 + column * params.input.strides[1]);
      }
    }
    Scan0::State upto0[items][beside], before0[beside], total0[beside];
#pragma unroll
    for (int u = 0; u < items; ++u) {
      const Index column = first + u;
#pragma unroll
      for (int j = 0; j < beside; ++j) {
        auto own0 = Scan0::none();
        if (column < end) {
          const float v0 = jitgen::load(x0[u][j]);
          own0 = Scan0::of(v0, column);
        }
        upto0[u][j] = u == 0 ? own0 : Scan0::combine(upto0[u == 0 ? 0 : u - 1][j], own0);
      }
    }
    jitgen::scan_columns<Scan0, along, lanes, beside>(upto0[items - 1], before0, total0, scratch0, part, lane, turn);
#pragma unroll
    for (int j = 0; j < beside; ++j) {
      before0[j] = Scan0::combine(Scan0::narrowed(carry0[j]), before0[j]);
      carry0[j] = Scan0::Wide::combine(carry0[j], Scan0::widened(total0[j]));
    }
#pragma unroll
    for (int u = 0; u < items; ++u) {
      const Index column = first + u;
      if (live && column < end) {
        jitgen::Vector<jitgen::bfloat16, beside> y1;
        jitgen::Vector<int64_t, beside> y2;
#pragma unroll
        for (int j = 0; j < beside; ++j) {
          const auto state0 = Scan0::combine(before0[j], upto0[u][j]);
          const float v1 = Scan0::value(state0);
          const int64_t v2 = Scan0::place(state0);
          y1[j] = jitgen::store<jitgen::bfloat16>(v1);
          y2[j] = jitgen::store<int64_t>(v2);
        }
        jitgen::store_vector(to1 + column * params.result.strides[1], y1);
        jitgen::store_vector(to2 + column * params.result_2.strides[1], y2);
      }
    }
  }
}
