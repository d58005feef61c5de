// jitgen 0.1.0: template sort/sort.cpp.j2
// target x86-64-v4: a row a thread
// stages: map; 2 x sort over j0
// (N0, N1), rows of the last dimension: load float32 contiguous, store float32 contiguous, store int64 contiguous
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <stddef.h>

#include <jitgen/entry.hpp>
#include <jitgen/group.hpp>
#include <jitgen/memory.hpp>
#include <jitgen/sort.hpp>
#include <jitgen/walk.hpp>

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

using Element = float;
using Sorter = jitgen::Sorter<Element, uint32_t, true>;

void jitgen_sort_6342447f(const float* p0, float* p1, int64_t* p2, float a0, int32_t threads, int64_t length, int64_t start, int64_t count, int64_t n0, int64_t s0_0, int64_t s1_0, int64_t s2_0, int32_t streaming) {
  const int64_t sizes[] = {n0};
  const int64_t tasks = n0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    const jitgen::Range mine = jitgen::share(tasks, 1, thread, team);
    if (mine.begin < mine.end) {
      Sorter sorter(length, start + count);
      Element* const elements = sorter.elements;
      auto at = jitgen::Walk<1>::from(sizes, mine.begin);
      for (int64_t task = mine.begin; sorter.ready() && task < mine.end; ++task, at.next()) {
        const float* const x0 = p0 + at.index[0] * s0_0;
        float* const x1 = p1 + at.index[0] * s1_0;
        int64_t* const x2 = p2 + at.index[0] * s2_0;
        jitgen::groups(length, [&](int64_t first, auto size) __attribute__((always_inline)) {
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = jitgen::load(x0[i]);
        const float v2 = v0 / a0;
        elements[i] = jitgen::store<float>(v2);
      }
        });
        const uint32_t* const sorted = sorter.sorted();
        for (int64_t rank = start; rank < start + count; ++rank) {
          x1[(rank - start)] = elements[sorted[rank]];
          x2[(rank - start)] = int64_t(sorted[rank]);
        }
      }
    }
  }
}

}  // namespace

JITGEN_PACKED_ENTRY(jitgen_sort_6342447f)
