
// jitgen 0.1.0: swiglu, template cpp/elementwise.cpp.j2
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
struct Element0 {
  float y2;
};
JITGEN_INLINE Element0 element_0(float v0, float v3) {
  const float v1 = jitgen::sigmoid(v0);
  const float v2 = v0 * v1;
  const float v4 = v2 * v3;
  return {v4};
}

// (s0_0, (s0_1 // 2)) as 2 dimensions: load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous
inline void run_0(const jitgen::bfloat16* x0, const jitgen::bfloat16* x1, jitgen::bfloat16* x2, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count / 2; ++i) {
    const jitgen::Pair v0 = jitgen::load_pair(x0 + 2 * i);
    const jitgen::Pair v3 = jitgen::load_pair(x1 + 2 * i);
    const Element0 low = element_0(v0.low, v3.low);
    const Element0 high = element_0(v0.high, v3.high);
    jitgen::store_pair(x2 + 2 * i, {low.y2, high.y2});
  }
  if (count % 2 == 0) return;
  const int64_t i = count - 1;
  {
    const float v0 = jitgen::load(x0[i]);
    const float v3 = jitgen::load(x1[i]);
    const float v1 = jitgen::sigmoid(v0);
    const float v2 = v0 * v1;
    const float v4 = v2 * v3;
    x2[i] = jitgen::store<jitgen::bfloat16>(v4);
  }
}

// A thread's share of the region's runs.
void region_0(int64_t thread, int64_t team, const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, jitgen::bfloat16* p0_2, int64_t n0_0, int64_t n0_1, int64_t s0_0_0, int64_t s0_1_0, int64_t s0_2_0, bool streaming) {
  alignas(jitgen::cache_line) jitgen::bfloat16 buffer2[block];
  const int64_t sizes[] = {n0_0, (n0_1 + block - 1) / block};
  const jitgen::Range mine = jitgen::share(n0_0 * ((n0_1 + block - 1) / block), 1, thread, team);
  auto at = jitgen::Walk<2>::from(sizes, mine.begin);
  for (int64_t run = mine.begin; run < mine.end; ++run, at.next()) {
    const int64_t start = at.index[1] * block;
    const int64_t count = n0_1 - start < block ? n0_1 - start : block;
    const jitgen::bfloat16* const x0 = p0_0 + at.index[0] * s0_0_0 + start;
    const jitgen::bfloat16* const x1 = p0_1 + at.index[0] * s0_1_0 + start;
    jitgen::bfloat16* const x2 = p0_2 + at.index[0] * s0_2_0 + start;
    jitgen::bfloat16* const target2 = streaming ? buffer2 : x2;
    run_0(x0, x1, target2, count);
    if (streaming) {
      jitgen::stream(x2, buffer2, count * sizeof(jitgen::bfloat16));
    }
  }
}
void jitgen_swiglu(const jitgen::bfloat16* p0_0, const jitgen::bfloat16* p0_1, jitgen::bfloat16* p0_2, int32_t threads, int64_t n0_0, int64_t n0_1, int64_t s0_0_0, int64_t s0_1_0, int64_t s0_2_0, int32_t streaming) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    region_0(thread, team, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0, streaming);
    if (streaming) jitgen::stream_fence();
  }
}

}  // namespace

JITGEN_PACKED_ENTRY(jitgen_swiglu)
