// jitgen 0.1.0: template scan/scan.cpp.j2
// target x86-64-v4: tiles of 1024 neighbouring rows
// stages: 2 x scan over j0
// (N0, N1), rows of the last dimension: load float32 strided, store float32 strided, store int64 strided
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
  float* result_pointer;
  int64_t* result_2_pointer;
  alignas(8) int32_t threads;
  int64_t length, size0;
  int64_t input_stride0, input_stride1;
  int64_t result_stride0, result_stride1;
  int64_t result_2_stride0, result_2_stride1;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 104, "the launch packs it so");

constexpr int64_t least = 128;  // elements for each thread from which on a row is shared
constexpr int64_t width = 1024;  // rows of a tile: their states fit the first-level cache

struct States {
  jitgen::Columns<jitgen::Placed<jitgen::Max>, float, width> scan0;
  void clear(int64_t rows) {
    scan0.clear(rows);
  }
  void join(const States& behind, int64_t rows) {
    scan0.join(behind.scan0, rows);
  }
};

// What a thread keeps from tile to tile.
struct Room {
  alignas(jitgen::cache_line) float buffer1[width];
  alignas(jitgen::cache_line) int64_t buffer2[width];
  void flush() {}
};

// Elements [begin, end) of neighbouring rows. Without `stores`, only what their states are.
template <bool stores>
void walk(int64_t begin, int64_t end, int64_t length, int64_t rows, States& states, Room& room, bool streaming, const float* x0, float* x1, int64_t* x2, int64_t input_stride1, int64_t result_stride1, int64_t result_2_stride1) {
  for (int64_t e = begin; e < end; ++e) {
    jitgen::fetch(x0 + (e + 4) * input_stride1, rows);
    float* const target1 = streaming ? room.buffer1 : x1 + e * result_stride1;
    int64_t* const target2 = streaming ? room.buffer2 : x2 + e * result_2_stride1;
#pragma omp simd
    for (int64_t j = 0; j < rows; ++j) {
      const float v0 = jitgen::load(x0[e * input_stride1 + j]);
      states.scan0.take(j, e, v0);
      if (stores) {
        const float v1 = states.scan0.result(j);
        const int64_t v2 = states.scan0.place(j);
        target1[j] = jitgen::store<float>(v1);
        target2[j] = jitgen::store<int64_t>(v2);
      }
    }
    if (stores && streaming) {
      jitgen::stream(x1 + e * result_stride1, room.buffer1, rows * sizeof(float));
      jitgen::stream(x2 + e * result_2_stride1, room.buffer2, rows * sizeof(int64_t));
    }
  }
}
void Params::run() const {
  const int64_t inner = size0;
  const int64_t others = 1;
  int64_t across = width;  // rows of a tile, so many that every thread has one where there are so many rows
  while (across > jitgen::lanes && others * ((inner + across - 1) / across) < threads) across /= 2;
  const int64_t sizes[] = {(inner + across - 1) / across};
  const int64_t tasks = others * sizes[0];
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
      const int64_t first = at.index[0] * across;
      const int64_t together = inner - first < across ? inner - first : across;
      const float* const x0 = input_pointer + first * input_stride0;
      float* const x1 = result_pointer + first * result_stride0;
      int64_t* const x2 = result_2_pointer + first * result_2_stride0;
      States states;
      states.clear(together);
      if (!piece_states) {
        walk<true>(0, length, length, together, states, room, streaming, x0, x1, x2, input_stride1, result_stride1, result_2_stride1);
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
        walk<true>(begin, middle, length, together, states, room, streaming, x0, x1, x2, input_stride1, result_stride1, result_2_stride1);
      } else {
        walk<false>(begin, middle, length, together, states, room, streaming, x0, x1, x2, input_stride1, result_stride1, result_2_stride1);
      }
      of_row[thread] = states;
#pragma omp barrier
      States before = of_row[0];
      for (int64_t other = 1; other <= thread; ++other) before.join(of_row[other], together);
      walk<true>(middle, end, length, together, before, room, streaming, x0, x1, x2, input_stride1, result_stride1, result_2_stride1);
    }
    room.flush();
    if (streaming) jitgen::stream_fence();
  }
  __builtin_free(piece_states);
}

}  // namespace

JITGEN_ENTRY(jitgen_scan_e7a4fc2d)
