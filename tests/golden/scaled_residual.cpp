// jitgen 0.1.0: template elementwise/elementwise.cpp.j2
// target x86-64-v3: runs of 1024 elements, groups of 64 elements
// stages: map
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#define JITGEN_LANES 64
#include <jitgen/entry.hpp>
#include <jitgen/group.hpp>
#include <jitgen/walk.hpp>

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const float* input_pointer;
  const float* input_2_pointer;
  float* result_pointer;
  alignas(8) float scalar0;
  alignas(8) int32_t threads;
  int64_t size0, size1;
  int64_t input_stride0;
  int64_t input_2_stride0, input_2_stride1;
  int64_t result_stride0;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 96, "the launch packs it so");

constexpr int64_t block = 1024;  // elements of a run: its operands and results fit the first-level cache
// (N0, N1) as 2 dimensions: load float32 contiguous, load float32 strided, store float32 contiguous
void region_0(int64_t thread, int64_t team, const float* input_pointer, const float* input_2_pointer, float* result_pointer, int64_t size0, int64_t size1, int64_t input_stride0, int64_t input_2_stride0, int64_t input_2_stride1, int64_t result_stride0, float scalar0, bool streaming) {
  alignas(jitgen::cache_line) float buffer2[block];
  jitgen::Seam seam2;
  const int64_t sizes[] = {size0, (size1 + block - 1) / block};
  const jitgen::Range mine = jitgen::share(size0 * ((size1 + block - 1) / block), 1, thread, team);
  auto at = jitgen::Walk<2>::from(sizes, mine.begin);
  const bool longer = size1 >= jitgen::lanes;  // shorter runs are neither fetched nor streamed
  auto later = jitgen::Walk<2>::from(sizes, mine.begin + jitgen::runs_ahead(block, size1));
  for (int64_t run = mine.begin; run < mine.end; ++run, at.next()) {
    const int64_t start = at.index[1] * block;
    const int64_t count = size1 - start < block ? size1 - start : block;
    const float* const x0 = input_pointer + at.index[0] * input_stride0 + start;
    const float* const x1 = input_2_pointer + at.index[0] * input_2_stride0 + start * input_2_stride1;
    float* const x2 = result_pointer + at.index[0] * result_stride0 + start;
    const float* const later0 = longer ? input_pointer + later.index[0] * input_stride0 + later.index[1] * block : nullptr;
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
        const float v1 = jitgen::load(x1[i * input_2_stride1]);
        const float v3 = v1 * scalar0;
        const float v4 = v0 + v3;
        group2.set(lane, v4);
      }
      group2.write(output2.past);
    });
    output2.end(0, count);
  }
  seam2.flush();
}
void Params::run() const {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    region_0(thread, team, input_pointer, input_2_pointer, result_pointer, size0, size1, input_stride0, input_2_stride0, input_2_stride1, result_stride0, scalar0, streaming);
    if (streaming) jitgen::stream_fence();
  }
}

}  // namespace

JITGEN_ENTRY(jitgen_elementwise_04dd77c6)
