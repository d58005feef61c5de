// jitgen 0.1.0: template scan/scan.cpp.j2
// target x86-64-v4: rows one by one, 1024 elements at once
// stages: map; scan over j0; map
// (N0, N1), rows of the last dimension: load float32 contiguous, load float32 contiguous, store float32 contiguous
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <stddef.h>

#include <jitgen/entry.hpp>
#include <jitgen/group.hpp>
#include <jitgen/memory.hpp>
#include <jitgen/scan.hpp>
#include <jitgen/walk.hpp>

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const float* input_pointer;
  const float* input_2_pointer;
  float* result_pointer;
  alignas(8) int32_t threads;
  int64_t length, size0;
  int64_t input_stride0;
  int64_t input_2_stride0;
  int64_t result_stride0;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 80, "the launch packs it so");

constexpr int64_t least = 32768;  // elements for each thread from which on a row is shared
constexpr int64_t block = 1024;  // elements of a row: with its operands and results they fit the first-level cache

struct States {
  jitgen::Scan<jitgen::Sum, float> scan0;
  void clear(int64_t) { *this = States(); }
  void join(const States& behind, int64_t) {
    scan0.join(behind.scan0);
  }
  // Whether other pieces may be scanned from what this one has come to.
  bool is_regular(int64_t) const {
    return scan0.is_regular();
  }
};

// What a thread keeps from row to row.
struct Room {
  alignas(jitgen::cache_line) float values0[block];
  alignas(jitgen::cache_line) float buffer2[block];
  jitgen::Seam seam2;
  void flush() {
    seam2.flush();
  }
};

// Elements [begin, end) of a row. Without `stores`, only what their states are.
template <bool stores>
void walk(int64_t begin, int64_t end, int64_t length, int64_t, States& states, Room& room, bool streaming, const float* x0, const float* x1, float* x2) {
  float* const values0 = room.values0;
  const jitgen::Output<float> output2(x2, room.buffer2, length, streaming, room.seam2);
  const float v4 = 2.0f;
  for (int64_t start = begin; start < end; start += block) {
    const int64_t count = end - start < block ? end - start : block;
    jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) {
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = jitgen::load(x0[(start + i)]);
        const float v1 = jitgen::load(x1[(start + i)]);
        const float v2 = v0 * v1;
        values0[i] = v2;
      }
    });
    states.scan0.take(values0, count);
    if (!stores) continue;
    float* const target2 = output2.begin(start);
    jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) {
      jitgen::Group<float, decltype(size)> group2(target2 + first, size);
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = jitgen::load(x0[(start + i)]);
        const float v3 = values0[i];
        const float v5 = v3 * v4;
        const float v6 = v5 + v0;
        group2.set(lane, v6);
      }
      group2.write(output2.past);
    });
    output2.end(start, count);
  }
}
void Params::run() const {
  const int64_t sizes[] = {size0};
  const int64_t tasks = size0;
  const bool shared = threads > 1 && tasks < threads && length >= threads * least;
  // Of each thread's piece, of this row and the next in turn, so that no thread overwrites what another still reads.
  States* const piece_states =
      shared ? static_cast<States*>(jitgen::aligned_memory(alignof(States), 2 * threads * sizeof(States))) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t team = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    const jitgen::Range mine = piece_states ? jitgen::Range{0, tasks} : jitgen::share(tasks, 1, thread, team);
    auto at = jitgen::Walk<1>::from(sizes, mine.begin);
    Room room;
    for (int64_t task = mine.begin; task < mine.end; ++task, at.next()) {
      constexpr int64_t together = 1;
      const float* const x0 = input_pointer + at.index[0] * input_stride0;
      const float* const x1 = input_2_pointer + at.index[0] * input_2_stride0;
      float* const x2 = result_pointer + at.index[0] * result_stride0;
      States states;
      states.clear(together);
      if (!piece_states) {
        walk<true>(0, length, length, together, states, room, streaming, x0, x1, x2);
        continue;
      }
      // One piece more than there are threads: the first one's results need no other's state, the last one's state
      // nobody needs. So a thread walks two pieces, and waits once for the others.
      States* const of_row = piece_states + (task % 2) * team;
      const int64_t piece = jitgen::piece_of(length, team + 1);
      const int64_t begin = thread * piece < length ? thread * piece : length;
      const int64_t middle = begin + piece < length ? begin + piece : length;
      const int64_t end = middle + piece < length ? middle + piece : length;
      if (thread == 0) {
        walk<true>(begin, middle, length, together, states, room, streaming, x0, x1, x2);
      } else {
        walk<false>(begin, middle, length, together, states, room, streaming, x0, x1, x2);
      }
      of_row[thread] = states;
#pragma omp barrier
      bool regular = true;
      for (int64_t other = 0; other < team; ++other) regular &= of_row[other].is_regular(together);
      if (!regular) {  // one thread walks all that is left in the row's order
        if (thread == 0) walk<true>(middle, length, length, together, states, room, streaming, x0, x1, x2);
        continue;
      }
      States before = of_row[0];
      for (int64_t other = 1; other <= thread; ++other) before.join(of_row[other], together);
      walk<true>(middle, end, length, together, before, room, streaming, x0, x1, x2);
    }
    room.flush();
    if (streaming) jitgen::stream_fence();
  }
  __builtin_free(piece_states);
}

}  // namespace

JITGEN_ENTRY(jitgen_scan_b1644dea)
