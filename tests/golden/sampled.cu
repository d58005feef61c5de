// jitgen 0.1.0: sampled_chunks, template sort/sort.cu.j2
// target sm_90a: 512 threads a block, 1 row of up to 4096 elements at once
// stages: map; 2 x sort over j0
// (s0_0, s0_1), rows of the last dimension: load bfloat16 contiguous, store bfloat16 contiguous, store int32 contiguous
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/sort.cuh>

using Index = int32_t;
using Unsigned = uint32_t;
using Element = jitgen::bfloat16;
using Order = jitgen::Order<Element, true>;
constexpr int threads = 512;
constexpr int tile = 4096;  // room for the elements of a row, a power of two

constexpr int room = 1 * tile;  // of all rows of a block

extern "C" __global__ void __launch_bounds__(threads)
jitgen_sampled_chunks(const jitgen::bfloat16* p0, jitgen::bfloat16* p1, int32_t* p2, Index length, Index start, Index count, Index n0, Index s0_0, Index s1_0, Index s2_0, float a0) {
  __shared__ Element elements[room];
  __shared__ int32_t places[room];  // in the row
  const Index rows = n0;
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
      const float v0 = jitgen::load(p0[i0 * s0_0 + column]);
      const float v2 = v0 / a0;
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
      p1[i0 * s1_0 + to] = elements[slot];
      p2[i0 * s2_0 + to] = places[slot];
    }
  }
}

// jitgen 0.1.0: sampled, template sort/sort.cu.j2
// target sm_90a: 256 threads a block, ranks of 256 elements, 6 steps of bisection each
// stages: sort over j0
// (s0_0, (50*((s0_1 + 4095) // 4096))), rows of the last dimension: load bfloat16 contiguous, load int32 contiguous, store bfloat16 contiguous, store int64 contiguous
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/dependent_launch.cuh>
#include <jitgen/sort.cuh>

using Index = int32_t;
using Unsigned = uint32_t;
using Element = jitgen::bfloat16;
using Order = jitgen::Order<Element, true>;
constexpr int threads = 256;
constexpr int tile = 256;  // elements whose ranks a block finds

extern "C" __global__ void __launch_bounds__(threads)
jitgen_sampled(const jitgen::bfloat16* p0, const int32_t* p1, jitgen::bfloat16* p2, int64_t* p3, Index length, Index start, Index count, Index ranks, Index n0, Index s0_0, Index s1_0, Index s2_0, Index s3_0) {
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
  const auto held = [&](Index of) {
    const Index left = length - of * 4096;
    return left < ranks ? left : ranks;
  };
  if (chunk >= chunks || own >= held(chunk)) return;
  const Element* const row_elements = p0 + i0 * s0_0;
  const int32_t* const row_places = p1 + i0 * s1_0;
  const Element element = row_elements[slot];
  Index rank = own;
  for (Index other = 0; other < chunks && rank < start + count; ++other) {
    if (other == chunk) continue;
    // Of equal elements those of earlier chunks come first.
    const Element* const others = row_elements + other * ranks;
    Index low = 0, high = held(other);
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
  p2[i0 * s2_0 + to] = element;
  p3[i0 * s3_0 + to] = row_places[slot];
}
