// jitgen 0.1.0: template elementwise/elementwise.cpp.j2
// target x86-64-v3: runs of 1024 elements, groups of 64 elements
// stages: map
#define JITGEN_LANES 64
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <jitgen/entry.hpp>
#include <jitgen/group.hpp>
#include <jitgen/walk.hpp>

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

constexpr int64_t block = 1024;  // elements of a run: its operands and results fit the first-level cache
// (N0, N1) as 2 dimensions: load float32 contiguous, load float32 strided, store float32 contiguous
void region_0(int64_t thread, int64_t team, const float* p0_0, const float* p0_1, float* p0_2, int64_t n0_0, int64_t n0_1, int64_t s0_0_0, int64_t s0_1_0, int64_t s0_1_1, int64_t s0_2_0, float a0, bool streaming) {
  alignas(jitgen::cache_line) float buffer2[block];
  jitgen::Seam seam2;
  const int64_t sizes[] = {n0_0, (n0_1 + block - 1) / block};
  const jitgen::Range mine = jitgen::share(n0_0 * ((n0_1 + block - 1) / block), 1, thread, team);
  auto at = jitgen::Walk<2>::from(sizes, mine.begin);
  const bool longer = n0_1 >= jitgen::lanes;  // shorter runs are neither fetched nor streamed
  auto later = jitgen::Walk<2>::from(sizes, mine.begin + jitgen::runs_ahead(block, n0_1));
  for (int64_t run = mine.begin; run < mine.end; ++run, at.next()) {
    const int64_t start = at.index[1] * block;
    const int64_t count = n0_1 - start < block ? n0_1 - start : block;
    const float* const x0 = p0_0 + at.index[0] * s0_0_0 + start;
    const float* const x1 = p0_1 + at.index[0] * s0_1_0 + start * s0_1_1;
    float* const x2 = p0_2 + at.index[0] * s0_2_0 + start;
    const float* const later0 = longer ? p0_0 + later.index[0] * s0_0_0 + later.index[1] * block : nullptr;
    if (longer) later.next();
    const jitgen::Output<float> output2(x2, buffer2, count, streaming && longer, seam2);
    float* const target2 = output2.begin(0);
    jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) {
      if (longer) jitgen::fetch(later0 + first);
      jitgen::Group<float, decltype(size)> group2(target2 + first, size);
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = jitgen::load(x0[i]);
        const float v1 = jitgen::load(x1[i * s0_1_1]);
        const float v3 = v1 * a0;
        const float v4 = v0 + v3;
        group2.set(lane, v4);
      }
      group2.write(output2.past);
    });
    output2.end(0, count);
  }
  seam2.flush();
}
void jitgen_elementwise_7051b7a5(const float* p0_0, const float* p0_1, float* p0_2, float a0, int32_t threads, int64_t n0_0, int64_t n0_1, int64_t s0_0_0, int64_t s0_1_0, int64_t s0_1_1, int64_t s0_2_0, int32_t streaming) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    region_0(thread, team, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_1_1, s0_2_0, a0, streaming);
    if (streaming) jitgen::stream_fence();
  }
}

}  // namespace

JITGEN_PACKED_ENTRY(jitgen_elementwise_7051b7a5)
