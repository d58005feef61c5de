
// jitgen 0.1.0: causal, template cpp/elementwise.cpp.j2
// target x86-64-v4, Schedule(threads=1, vectors=(1024,), unrolls=(1,), wide=True, blocks=0, pdl=False)
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <jitgen/entry.hpp>
#include <jitgen/walk.hpp>

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

constexpr int64_t block = 1024;  // elements of a run: its results fit the first-level cache
// (s0_0, s0_1) as 2 dimensions: iota int64 strided, iota int64 strided, load float32 contiguous, store float32 contiguous
inline void run_0(int64_t x0, int64_t step0, int64_t x1, int64_t step1, const float* x2, float* x3, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const int64_t v0 = x0 + i * step0;
    const int64_t v1 = x1 + i * step1;
    const float v4 = jitgen::load(x2[i]);
    const bool v2 = v0 < v1;
    const float v3 = -__builtin_huge_valf();
    const float v5 = v2 ? v3 : v4;
    x3[i] = jitgen::store<float>(v5);
  }
}

// A thread's share of the region's runs.
void region_0(int64_t thread, int64_t team, const float* p0_2, float* p0_3, int64_t n0_0, int64_t n0_1, int64_t o0_0, int64_t o0_1, int64_t s0_0_0, int64_t s0_0_1, int64_t s0_1_0, int64_t s0_1_1, int64_t s0_2_0, int64_t s0_3_0, bool streaming) {
  alignas(jitgen::cache_line) float buffer3[block];
  const int64_t sizes[] = {n0_0, (n0_1 + block - 1) / block};
  const jitgen::Range mine = jitgen::share(n0_0 * ((n0_1 + block - 1) / block), 1, thread, team);
  auto at = jitgen::Walk<2>::from(sizes, mine.begin);
  for (int64_t run = mine.begin; run < mine.end; ++run, at.next()) {
    const int64_t start = at.index[1] * block;
    const int64_t count = n0_1 - start < block ? n0_1 - start : block;
    const int64_t x0 = o0_0 + at.index[0] * s0_0_0 + start * s0_0_1;
    const int64_t x1 = o0_1 + at.index[0] * s0_1_0 + start * s0_1_1;
    const float* const x2 = p0_2 + at.index[0] * s0_2_0 + start;
    float* const x3 = p0_3 + at.index[0] * s0_3_0 + start;
    float* const target3 = streaming ? buffer3 : x3;
    run_0(x0, s0_0_1, x1, s0_1_1, x2, target3, count);
    if (streaming) {
      jitgen::stream(x3, buffer3, count * sizeof(float));
    }
  }
}
void jitgen_causal(const float* p0_2, float* p0_3, int32_t threads, int64_t n0_0, int64_t n0_1, int64_t o0_0, int64_t s0_0_0, int64_t s0_0_1, int64_t o0_1, int64_t s0_1_0, int64_t s0_1_1, int64_t s0_2_0, int64_t s0_3_0, int32_t streaming) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    region_0(thread, team, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0, streaming);
    if (streaming) jitgen::stream_fence();
  }
}

}  // namespace

JITGEN_PACKED_ENTRY(jitgen_causal)
