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

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const float* input_pointer;
  float* result_pointer;
  int64_t* result_2_pointer;
  alignas(8) float scalar0;
  alignas(8) int32_t threads;
  int64_t length, start, count, size0;
  int64_t input_stride0;
  int64_t result_stride0;
  int64_t result_2_stride0;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 104, "the launch packs it so");

using Element = float;
using Sorter = jitgen::Sorter<Element, uint32_t, true>;

// What one thread sorts. It has a copy of the parameters, which no value that it stores may change.
struct Share : Params {
  __attribute__((always_inline)) void sort(const jitgen::Range& mine, const int64_t* sizes) const;
};

void Share::sort(const jitgen::Range& mine, const int64_t* sizes) const {
  Sorter sorter(length, start + count);
  Element* const elements = sorter.elements;
  auto at = jitgen::Walk<1>::from(sizes, mine.begin);
  for (int64_t task = mine.begin; sorter.ready() && task < mine.end; ++task, at.next()) {
    const float* const x0 = input_pointer + at.index[0] * input_stride0;
    float* const x1 = result_pointer + at.index[0] * result_stride0;
    int64_t* const x2 = result_2_pointer + at.index[0] * result_2_stride0;
    jitgen::groups(length, [&](int64_t first, auto size) __attribute__((always_inline)) {
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = jitgen::load(x0[i]);
        const float v2 = v0 / scalar0;
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

void Params::run() const {
  const int64_t sizes[] = {size0};
  const int64_t tasks = size0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    const jitgen::Range mine = jitgen::share(tasks, 1, thread, team);
    const Share share{*this};
    if (mine.begin < mine.end) share.sort(mine, sizes);
  }
}

}  // namespace

JITGEN_ENTRY(jitgen_sort_8e29a80b)
