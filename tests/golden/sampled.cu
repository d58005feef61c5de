// jitgen 0.1.0: template sort/sort.cu.j2
// target sm_90a: 512 threads a block, one row a block, with room for 4096 elements of each
// stages: map; 2 x sort over j0
// (N0, N1), rows of the last dimension: load bfloat16 contiguous, store bfloat16 contiguous, store int32 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/sort.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  jitgen::Operand<int32_t, Index, 1> result_2;
  Index length;
  Index start;
  Index count;
  Index size0;
  float scalar0;
};
static_assert(
    sizeof(Params) == 72 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(result) == 16 &&
    JITGEN_OFFSET(result_2) == 32 && JITGEN_OFFSET(length) == 48 && JITGEN_OFFSET(start) == 52 &&
    JITGEN_OFFSET(count) == 56 && JITGEN_OFFSET(size0) == 60 && JITGEN_OFFSET(scalar0) == 64, "the launch packs it so");

using Element = jitgen::bfloat16;
using Order = jitgen::Order<Element, true>;
constexpr int threads = 512;
constexpr int tile = 4096;  // room for the elements of a row, a power of two
constexpr int room = 1 * tile;  // of all rows of a block

extern "C" __global__ void __launch_bounds__(threads)
jitgen_sort_b4d3db82(const __grid_constant__ Params params) {
  const Index length = params.length, start = params.start, count = params.count;
  __shared__ Element elements[room];
  __shared__ int32_t places[room];  // in the row
  const Index rows = params.size0;
  const Index chunks = (length + 4095) / 4096;
  const Index chunk = Index(blockIdx.x) % chunks, block = Index(blockIdx.x) / chunks;
  const Index begin = chunk * 4096;
  const Index end = begin + 4096 < length ? begin + 4096 : length;
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  for (int slot = threadIdx.x; slot < room; slot += threads) {
    const Index row = block * 1 + slot / tile;
    const Index column = begin + slot % tile;
    places[slot] = jitgen::nowhere;
    if (row < rows && column < end) {
      const Index i0 = Index(Unsigned(row));
      const float v0 = jitgen::load(params.input.pointer[i0 * params.input.strides[0] + column]);
      const float v2 = v0 / params.scalar0;
      elements[slot] = jitgen::store<Element>(v2);
      places[slot] = int32_t(column);
    } else {
      elements[slot] = Element();
    }
  }
  jitgen::sort_tiles<Order, threads, room, tile>(elements, places);
  for (int slot = threadIdx.x; slot < room; slot += threads) {
    const Index row = block * 1 + slot / tile;
    const Index rank = slot % tile;
    if (row < rows && begin + rank < end && rank < count) {
      const Index to = chunk * count + rank;
      const Index i0 = Index(Unsigned(row));
      params.result.pointer[i0 * params.result.strides[0] + to] = elements[slot];
      params.result_2.pointer[i0 * params.result_2.strides[0] + to] = places[slot];
    }
  }
}

// jitgen 0.1.0: template sort/sort.cu.j2
// target sm_90a: 256 threads a block, the ranks of 256 elements a block, 6 steps of bisection in each chunk
// stages: sort over j0
// (N0, N1), rows of the last dimension: load bfloat16 contiguous, load int32 contiguous, store bfloat16 contiguous, store int64 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/sort.cuh>

using Index = int32_t;
using Unsigned = uint32_t;

struct Params {
  jitgen::Operand<const jitgen::bfloat16, Index, 1> input;
  jitgen::Operand<const int32_t, Index, 1> input_2;
  jitgen::Operand<jitgen::bfloat16, Index, 1> result;
  jitgen::Operand<int64_t, Index, 1> result_2;
  Index length;
  Index start;
  Index count;
  Index ranks;
  Index size0;
};
static_assert(
    sizeof(Params) == 88 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(input_2) == 16 && JITGEN_OFFSET(result) == 32
    && JITGEN_OFFSET(result_2) == 48 && JITGEN_OFFSET(length) == 64 && JITGEN_OFFSET(start) == 68 &&
    JITGEN_OFFSET(count) == 72 && JITGEN_OFFSET(ranks) == 76 && JITGEN_OFFSET(size0) == 80, "the launch packs it so");

using Element = jitgen::bfloat16;
using Order = jitgen::Order<Element, true>;
constexpr int threads = 256;
constexpr int tile = 256;  // elements whose ranks a block finds
extern "C" __global__ void __launch_bounds__(threads)
jitgen_sort_0752b61a(const __grid_constant__ Params params) {
  const Index length = params.length, start = params.start, count = params.count, ranks = params.ranks;
  const Index chunks = (length + 4095) / 4096;
  const Index blocks = (chunks * ranks + tile - 1) / tile;  // of a row
  const Index row = Index(blockIdx.x) / blocks;
  const Index slot = Index(blockIdx.x) % blocks * tile + Index(threadIdx.x);
  const Index chunk = slot / ranks, own = slot % ranks;
  const Index i0 = Index(Unsigned(row));
  // The launch may overlap the kernel ahead in the stream, whose memory is ready behind the wait.
  jitgen::next_kernel_may_start();
  jitgen::previous_kernel_wait();
  // How many ranks a chunk has: the last one may have fewer.
  const auto ranks_of = [&](Index number) {
    const Index left = length - number * 4096;
    return left < ranks ? left : ranks;
  };
  if (chunk >= chunks || own >= ranks_of(chunk)) return;
  const Element* const row_elements = params.input.pointer + i0 * params.input.strides[0];
  const int32_t* const row_places = params.input_2.pointer + i0 * params.input_2.strides[0];
  const Element element = row_elements[slot];
  Index rank = own;
  for (Index other = 0; other < chunks && rank < start + count; ++other) {
    if (other == chunk) continue;
    // Of equal elements those of earlier chunks come first.
    const Element* const others = row_elements + other * ranks;
    Index low = 0, high = ranks_of(other);
    while (low < high) {
      const Index middle = (low + high) / 2;
      const bool before = other < chunk ? !Order::precedes(element, others[middle]) : Order::precedes(others[middle], element);
      if (before) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    rank += low;
  }
  if (rank < start || rank >= start + count) return;
  const Index to = rank - start;
  params.result.pointer[i0 * params.result.strides[0] + to] = element;
  params.result_2.pointer[i0 * params.result_2.strides[0] + to] = row_places[slot];
}
