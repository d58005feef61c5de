// Computes attention with rows in the lanes of vectors. See jitgen/attention.hpp.
#pragma once

#include "jitgen/attention_products.hpp"

namespace jitgen {
namespace attention {

// ---------------------------------------------------------------------------------------------------------------- tiles

// Rows in lanes.
template <class A>
struct Tiles {
  using T = typename A::Compute;
  using Rows = typename A::Rows;
  static constexpr int64_t lanes = lanes_of<T>;

  // `state` has for each chunk of a block the row maxima, the row sums and the sums of values; `own` is what a thread
  // computes them with.
  struct Shape {
    int64_t chunks, keys, wide, deep;
    int64_t of_chunk() const { return (2 + wide) * lanes; }
    int64_t state() const { return chunks * of_chunk(); }
    int64_t own(const A& a) const {
      const int64_t rows = round_up(chunks * int64_t(sizeof(Rows)), 64) / int64_t(sizeof(T));
      return chunks * deep * lanes + keys * (a.depth + a.width) + keys * lanes + lanes * (deep > wide ? deep : wide) + rows + 64;
    }
  };

  static Shape shape(const A& a, int64_t threads) {
    Shape shape{1, most_keys, round_up(a.width, width_of<T>), round_up(a.depth, width_of<T>)};
    const int64_t chunk_bytes = (shape.wide + shape.deep) * lanes * int64_t(sizeof(T));
    shape.chunks = block_bytes / chunk_bytes;
    shape.chunks = shape.chunks < 1 ? 1 : shape.chunks > most_chunks ? most_chunks : shape.chunks;
    while (shape.chunks > 1 && (shape.chunks - 1) * lanes >= a.packed_rows()) --shape.chunks;
    while (shape.chunks > 1 && a.tasks() * blocks(a, shape) < 2 * threads) shape.chunks = (shape.chunks + 1) / 2;
    while (shape.keys > least_keys && shape.keys * (a.depth + a.width) * int64_t(sizeof(T)) > tile_bytes) shape.keys /= 2;
    return shape;
  }
  static int64_t blocks(const A& a, const Shape& shape) {
    const int64_t rows = shape.chunks * lanes;
    return (a.packed_rows() + rows - 1) / rows;
  }

  const A& a;
  const Shape shape_;
  T* const state;
  T *queries, *keys, *values, *scores, *line;
  Rows* rows;
  int64_t first_row, chunks;

  Tiles(const A& a, const Shape& shape, int64_t block, T* state, T* own) : a(a), shape_(shape), state(state) {
    queries = own;
    keys = queries + shape.chunks * shape.deep * lanes;
    values = keys + shape.keys * a.depth;
    scores = reinterpret_cast<T*>(round_up(reinterpret_cast<intptr_t>(values + shape.keys * a.width), 64));
    line = scores + shape.keys * lanes;
    rows = reinterpret_cast<Rows*>(round_up(reinterpret_cast<intptr_t>(line + lanes * (shape.deep > shape.wide ? shape.deep : shape.wide)), 64));
    first_row = block * shape.chunks * lanes;
    const int64_t left = a.packed_rows() - first_row;
    chunks = left < shape.chunks * lanes ? (left + lanes - 1) / lanes : shape.chunks;
  }

  int64_t live(int64_t chunk) const {
    const int64_t left = a.packed_rows() - first_row - chunk * lanes;
    return left < lanes ? left : lanes;
  }
  T* of_chunk(T* states, int64_t chunk) const { return states + chunk * shape_.of_chunk(); }

  void start() {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t count = live(chunk), row = first_row + chunk * lanes;
      // Lanes beyond the last row repeat it.
      for (int64_t lane = 0; lane < lanes; ++lane) a.place(rows[chunk], lane, row + (lane < count ? lane : count - 1));
      a.settle(rows[chunk]);
      for (int64_t lane = 0; lane < count; ++lane) a.query(row + lane, line + lane * shape_.deep);
      for (int64_t lane = count; lane < lanes; ++lane) {
        __builtin_memcpy(line + lane * shape_.deep, line + (count - 1) * shape_.deep, a.depth * sizeof(T));
      }
      transposed(line, shape_.deep, lanes, shape_.deep, queries + chunk * shape_.deep * lanes, lanes);
      T* const row_max = of_chunk(state, chunk);
      for (int64_t lane = 0; lane < lanes; ++lane) row_max[lane] = minus_infinity<T>;
      __builtin_memset(row_max + lanes, 0, (1 + shape_.wide) * lanes * sizeof(T));
    }
  }

  void walk(int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += shape_.keys) {
      const int64_t last = n + shape_.keys < end ? n + shape_.keys : end;
      Seen some[most_chunks];
      int64_t from = last, to = n;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        some[chunk] = seen(a, rows[chunk], n, last);
        if (some[chunk].first == some[chunk].last) continue;
        from = some[chunk].first < from ? some[chunk].first : from;
        to = some[chunk].last > to ? some[chunk].last : to;
      }
      if (from >= to) continue;
      fill_keys(a, from, to, keys, a.depth);
      fill_values(a, from, to, values, a.width);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const Seen own = some[chunk];
        if (own.first < own.last) take(chunk, own, own.first - from);
      }
    }
  }

  // One chunk's rows and the keys that they see of a tile, the first of which is the tile's number `at`.
  void take(int64_t chunk, const Seen& own, int64_t at) {
    const int64_t count = own.last - own.first;
    product<T, false, false>(keys + at * a.depth, a.depth, count, queries + chunk * shape_.deep * lanes, a.depth, scores);
    if (own.state == open) {
      a.template scores<true>(rows[chunk], own.first, count, scores);
    } else {
      a.template scores<false>(rows[chunk], own.first, count, scores);
    }
    T* const row_max = of_chunk(state, chunk);
    T *const row_sum = row_max + lanes, *const sums = row_max + 2 * lanes;
    softmax(count, row_max, row_sum, sums);
    product<T, true, true>(values + at * a.width, a.width, a.width, scores, count, sums);
  }

  // Probabilities in place of scores, relative to the rows' new maxima; what was summed before is scaled to them.
  void softmax(int64_t count, T* row_max, T* row_sum, T* sums) {
    constexpr int64_t width = width_of<T>;
    Vector<T> new_max[2] = {load_vector<Vector<T>>(row_max), load_vector<Vector<T>>(row_max + width)};
    for (int64_t n = 0; n < count; ++n) {
      for (int v = 0; v < 2; ++v) {
        const Vector<T> score = load_vector<Vector<T>>(scores + n * lanes + v * width);
        new_max[v] = score > new_max[v] ? score : new_max[v];
      }
    }
    alignas(64) T base[lanes], scale[lanes];
    store_vector(base, new_max[0]);
    store_vector(base + width, new_max[1]);
    bool higher = false;
    for (int64_t lane = 0; lane < lanes; ++lane) higher |= base[lane] != row_max[lane];
#pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const T now = base[lane];
      base[lane] = finite_base(now);
      scale[lane] = power(row_max[lane] - base[lane]);
      row_max[lane] = now;
    }
    for (int64_t n = 0; n < count; ++n) {
#pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) scores[n * lanes + lane] = power(scores[n * lanes + lane] - base[lane]);
    }
    Vector<T> sum[2] = {};
    for (int64_t n = 0; n < count; ++n) {
      for (int v = 0; v < 2; ++v) sum[v] += load_vector<Vector<T>>(scores + n * lanes + v * width);
    }
    for (int v = 0; v < 2; ++v) {
      const Vector<T> factor = load_vector<Vector<T>>(scale + v * width);
      const Vector<T> before = load_vector<Vector<T>>(row_sum + v * width);
      store_vector(row_sum + v * width, (higher ? before * factor : before) + sum[v]);
    }
    if (higher) scaled(sums, scale);
  }

  void scaled(T* sums, const T* scale) const {
    for (int64_t e = 0; e < a.width; ++e) {
#pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) sums[e * lanes + lane] *= scale[lane];
    }
  }

  // Adds what `other` has of the same rows and further keys.
  void join(T* other) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      T *const mine = of_chunk(state, chunk), *const theirs = of_chunk(other, chunk);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const T new_max = theirs[lane] > mine[lane] ? theirs[lane] : mine[lane], base = finite_base(new_max);
        const T scale = power(mine[lane] - base), factor = power(theirs[lane] - base);
        mine[lane] = new_max;
        for (int64_t e = 1; e < 2 + a.width; ++e) {
          mine[e * lanes + lane] = mine[e * lanes + lane] * scale + theirs[e * lanes + lane] * factor;
        }
      }
    }
  }

  void finish() {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      T* const row_max = of_chunk(state, chunk);
      transposed(row_max + 2 * lanes, lanes, shape_.wide, lanes, line, shape_.wide);
      for (int64_t lane = 0; lane < live(chunk); ++lane) {
        const int64_t row = first_row + chunk * lanes + lane;
        a.row_results(row, row_max[lane], row_max[lanes + lane]);
        // A product over no keys is zero, whatever its factors.
        const bool none = a.keys == 0;
        a.results(row, line + lane * shape_.wide, none ? T(0) : row_max[lane], none ? T(1) : row_max[lanes + lane]);
      }
    }
  }
};

}  // namespace attention
}  // namespace jitgen
