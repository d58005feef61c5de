// The backward of attention on the host: products with functions of other products, which are computed again in tiles
// (Dao, "FlashAttention-2", 2023).
//
// Rows are in the lanes of vectors: a *chunk* is as many rows as two vectors have lanes. Of a chunk the left operands are
// transposed once, [depth][lanes]; products and functions of a tile are [streamed][lanes] and sums [width][lanes]. What is
// streamed is read row by row, element by element, each broadcast to all lanes. A block of chunks shares a tile of it in
// the second-level cache, widened to the compute type.
//
// The generated source has a struct with
//   Compute; products, results                       how many of each
//   int64_t rows, keys; depth(t), width(r); tasks(), groups()
//   shared(r)                                        the product whose right operand is the value of result r; -1: none
//   void at(int64_t task), group(int64_t group)      go to a task, and to one of what its results are summed over
//   Rows, place(Rows&, lane, row), settle(Rows&)     what a tile knows of the rows of a chunk
//   left(t, row, to), right(t, n, to), value(r, n, to)   rows of operands
//   masked; int state(const Rows&, first, last)      whether streamed rows first .. last are hidden, mixed or open
//   functions<open>(of, first, count, const T* const* products, T* const* functions)
//   finish(r, row, const T* sums)
#pragma once

#include "jitgen/attention_products.hpp"

extern "C" int omp_get_thread_num(void);

namespace jitgen {
namespace attention {

template <class A>
struct Backward {
  using T = typename A::Compute;
  using Rows = typename A::Rows;
  static constexpr int64_t lanes = lanes_of<T>;
  static constexpr int products = A::products, results = A::results;

  // In elements of the compute type. `left` and `sums` are of a chunk, `right` and `values` of a streamed row.
  struct Shape {
    int64_t chunks, keys, left, sums, right, values, line;
    int64_t bytes_of_rows() const { return round_up(chunks * int64_t(sizeof(Rows)), 64); }
    int64_t bytes() const {
      const int64_t tiles = (products + results) * keys * lanes;
      const int64_t elements = chunks * (left + sums) + round_up(keys * (right + values), lanes) + tiles + line;
      return round_up(elements * int64_t(sizeof(T)), 64) + bytes_of_rows();
    }
  };

  static Shape shape(const A& a, int64_t threads) {
    Shape shape{1, most_keys, 0, 0, 0, 0, 0};
    int64_t widest = 0;
    for (int t = 0; t < products; ++t) {
      const int64_t padded = round_up(a.depth(t), width_of<T>);
      shape.left += padded * lanes;
      shape.right += a.depth(t);
      widest = max(widest, padded);
    }
    for (int r = 0; r < results; ++r) {
      const int64_t padded = round_up(a.width(r), width_of<T>);
      shape.sums += padded * lanes;
      shape.values += a.shared(r) < 0 ? a.width(r) : 0;
      widest = max(widest, padded);
    }
    shape.line = widest * lanes;
    shape.chunks = block_bytes / ((shape.left + shape.sums) * int64_t(sizeof(T)));
    shape.chunks = shape.chunks < 1 ? 1 : shape.chunks > most_chunks ? most_chunks : shape.chunks;
    while (shape.chunks > 1 && (shape.chunks - 1) * lanes >= a.rows) --shape.chunks;
    while (shape.chunks > 1 && a.tasks() * blocks(a, shape) < 2 * threads) shape.chunks = (shape.chunks + 1) / 2;
    while (shape.keys > least_keys && shape.keys * (shape.right + shape.values) * int64_t(sizeof(T)) > tile_bytes) shape.keys /= 2;
    return shape;
  }
  static int64_t blocks(const A& a, const Shape& shape) { return (a.rows + shape.chunks * lanes - 1) / (shape.chunks * lanes); }

  A& a;
  const Shape shape_;
  T *left[products], *right[products], *values[results], *sums[results], *tiles[products], *functions[results], *line;
  Rows* rows;
  int64_t first_row = 0, chunks = 0;

  Backward(A& a, const Shape& shape, char* memory) : a(a), shape_(shape) {
    rows = reinterpret_cast<Rows*>(memory);
    T* next = reinterpret_cast<T*>(memory + shape_.bytes_of_rows());
    for (int t = 0; t < products; ++t) {
      left[t] = next;
      next += shape_.chunks * round_up(a.depth(t), width_of<T>) * lanes;
    }
    for (int r = 0; r < results; ++r) {
      sums[r] = next;
      next += shape_.chunks * padded_width(r) * lanes;
    }
    for (int t = 0; t < products; ++t, next += shape_.keys * lanes) tiles[t] = next;
    for (int r = 0; r < results; ++r, next += shape_.keys * lanes) functions[r] = next;
    line = next;
    next += shape_.line;
    for (int t = 0; t < products; ++t) {
      right[t] = next;
      next += shape_.keys * a.depth(t);
    }
    for (int r = 0; r < results; ++r) {
      values[r] = a.shared(r) < 0 ? next : right[a.shared(r)];
      next += a.shared(r) < 0 ? shape_.keys * a.width(r) : 0;
    }
  }

  int64_t padded_width(int r) const { return round_up(a.width(r), width_of<T>); }
  int64_t live(int64_t chunk) const { return min(a.rows - first_row - chunk * lanes, lanes); }
  T* left_of(int t, int64_t chunk) const { return left[t] + chunk * round_up(a.depth(t), width_of<T>) * lanes; }
  T* sums_of(int r, int64_t chunk) const { return sums[r] + chunk * padded_width(r) * lanes; }

  void run(int64_t task, int64_t block) {
    a.at(task);
    first_row = block * shape_.chunks * lanes;
    chunks = min((a.rows - first_row + lanes - 1) / lanes, shape_.chunks);
    for (int r = 0; r < results; ++r) __builtin_memset(sums[r], 0, chunks * padded_width(r) * lanes * sizeof(T));
    for (int64_t group = 0; group < a.groups(); ++group) {
      a.group(group);
      start();
      walk();
    }
    a.group(0);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int r = 0; r < results; ++r) {
        transposed(sums_of(r, chunk), lanes, padded_width(r), lanes, line, padded_width(r));
        for (int64_t lane = 0; lane < live(chunk); ++lane) {
          a.finish(r, first_row + chunk * lanes + lane, line + lane * padded_width(r));
        }
      }
    }
  }

  // What the tiles know of the rows. Lanes beyond the last row repeat it.
  void start() {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t count = live(chunk), row = first_row + chunk * lanes;
      for (int64_t lane = 0; lane < lanes; ++lane) a.place(rows[chunk], lane, row + min(lane, count - 1));
      a.settle(rows[chunk]);
      for (int t = 0; t < products; ++t) {
        const int64_t deep = round_up(a.depth(t), width_of<T>);
        for (int64_t lane = 0; lane < lanes; ++lane) a.left(t, row + min(lane, count - 1), line + lane * deep);
        transposed(line, deep, lanes, deep, left_of(t, chunk), lanes);
      }
    }
  }

  void walk() {
    for (int64_t n = 0; n < a.keys; n += shape_.keys) {
      const int64_t last = min(n + shape_.keys, a.keys);
      Seen some[most_chunks];
      int64_t from = last, to = n;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        some[chunk] = seen(a, rows[chunk], n, last);
        if (some[chunk].first == some[chunk].last) continue;
        from = min(some[chunk].first, from);
        to = max(some[chunk].last, to);
      }
      if (from >= to) continue;
      for (int64_t row = from; row < to; ++row) {
        for (int t = 0; t < products; ++t) a.right(t, row, right[t] + (row - from) * a.depth(t));
        for (int r = 0; r < results; ++r) {
          if (a.shared(r) < 0) a.value(r, row, values[r] + (row - from) * a.width(r));
        }
      }
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const Seen own = some[chunk];
        if (own.first < own.last) take(chunk, own, own.first - from);
      }
    }
  }

  // One chunk's rows and the streamed rows that they see of a tile, the first of which is the tile's number `at`.
  void take(int64_t chunk, const Seen& own, int64_t at) {
    const int64_t count = own.last - own.first;
    for (int t = 0; t < products; ++t) {
      const int64_t depth = a.depth(t);
      product<T, false, false>(right[t] + at * depth, depth, count, left_of(t, chunk), depth, tiles[t]);
    }
    if (own.state == open) a.template functions<true>(rows[chunk], own.first, count, tiles, functions);
    else a.template functions<false>(rows[chunk], own.first, count, tiles, functions);
    for (int r = 0; r < results; ++r) {
      const int64_t width = a.width(r);
      product<T, true, true>(values[r] + at * width, width, width, functions[r], count, sums_of(r, chunk));
    }
  }
};

// All rows of all tasks. A piece of work is a block of rows; each result is one piece's, so that none depends on threads.
template <class A>
void backward(const A& all, int32_t threads) {
  if (all.tasks() == 0 || all.rows == 0) return;
  using Block = Backward<A>;
  const auto shape = Block::shape(all, threads);
  const int64_t blocks = Block::blocks(all, shape), pieces = all.tasks() * blocks, bytes = round_up(shape.bytes(), 4096);
  char* const memory = static_cast<char*>(needed_memory(4096, threads * bytes));
  if (memory == nullptr) return;
  int64_t next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    A a = all;
    Block block(a, shape, memory + thread * bytes);
    for (;;) {  // pieces differ in how much of them masks hide, so that threads take one after another
      const int64_t piece = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (piece >= pieces) break;
      block.run(piece / blocks, blocks - 1 - piece % blocks);
    }
  }
  __builtin_free(memory);
}

}  // namespace attention
}  // namespace jitgen
