// Attention on the host: the keys of some rows are walked once, in tiles, with a running maximum and sum of each row
// (Dao et al., "FlashAttention", 2022; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// Rows are in the lanes of vectors: a *chunk* is as many rows as two vectors have lanes. Of a chunk the query is
// transposed once, [depth][lanes]; scores are [keys][lanes] and sums [width][lanes]. Keys and values are read row by row,
// element by element, each broadcast to all lanes. So nothing is reduced across lanes, and only queries and results are
// transposed. A block of chunks shares a tile of keys and values in the second-level cache, widened to the compute type.
//
// The generated source has a struct with
//   Compute, Key, Value                              types; key_contiguous, value_contiguous: along depth and width
//   int64_t keys, depth, width; tasks(), packed_rows()
//   void at(int64_t task)                            goes to a task: everything below is of its rows and keys
//   Rows, place(Rows&, lane, row), settle(Rows&, n)  what the rule of scores knows of the rows of a chunk
//   void query(row, Compute* to)                     a row of the query
//   const Key* key(n), const Value* value(n)         a row of keys or values; from it to the next one are next_key and
//                                                    next_value elements, from element to element key_step, value_step
//   void key(n, Compute* to), value(n, Compute* to)  the same in place of these, where Key or Value is Computed
//   masked; int state(const Rows&, first, last)      whether keys first .. last are hidden, mixed or open
//   scores<open>(...)                                the rule, of products in place
//   row_results(row, row_max, row_sum); results(row, const Compute* sums, row_max, row_sum)
#pragma once

#include "jitgen/attention_few.hpp"
#include "jitgen/attention_tiles.hpp"

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace jitgen {
namespace attention {

// All rows of all tasks. A piece of work is a block of rows and, where blocks are fewer than threads, a range of keys:
// then the states of a block's ranges are joined in their order.
template <class Way, class A>
void attend(const A& all, int32_t threads) {
  using T = typename A::Compute;
  if (all.tasks() == 0 || all.packed_rows() == 0) return;
  const auto shape = Way::shape(all, threads);
  const int64_t blocks = Way::blocks(all, shape), pieces = all.tasks() * blocks;
  int64_t ranges = 1;
  if (pieces < threads) {
    const int64_t most = (all.keys + 2 * shape.keys - 1) / (2 * shape.keys);
    ranges = (threads + pieces - 1) / pieces;
    ranges = ranges > most ? (most < 1 ? 1 : most) : ranges;
  }
  const int64_t unit = 64 / sizeof(T);
  const int64_t state = round_up(shape.state(), unit), own = round_up(shape.own(all), unit);
  const int64_t states = ranges > 1 ? pieces * ranges : threads;
  T* const memory = static_cast<T*>(needed_memory(4096, round_up((states * state + threads * own) * sizeof(T), 4096)));
  if (memory == nullptr) return;
  int64_t next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    T* const mine = memory + states * state + thread * own;
    A a = all;
    for (;;) {  // pieces differ in how much of them masks hide, so that threads take one after another
      const int64_t number = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (number >= pieces * ranges) break;
      const int64_t piece = number / ranges;
      a.at(piece / blocks);
      Way way(a, shape, blocks - 1 - piece % blocks, memory + (ranges > 1 ? number : thread) * state, mine);
      way.start();
      const Range keys = share(a.keys, attention::piece, number % ranges, ranges);
      way.walk(keys.begin, keys.end);
      if (ranges == 1) way.finish();
    }
    if (ranges > 1) {
#pragma omp barrier
      const int64_t present = threads > 1 ? omp_get_num_threads() : 1;
      for (int64_t piece = thread; piece < pieces; piece += present) {
        a.at(piece / blocks);
        T* const first = memory + piece * ranges * state;
        Way way(a, shape, blocks - 1 - piece % blocks, first, mine);
        for (int64_t range = 1; range < ranges; ++range) way.join(first + range * state);
        way.finish();
      }
    }
  }
  __builtin_free(memory);
}

}  // namespace attention
}  // namespace jitgen
