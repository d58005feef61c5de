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
//   const Key* key(n), key_step; const Value* value(n), value_step; or, where Key or Value is Computed,
//   void key(n, Compute* to), value(n, Compute* to)  a row of keys or values
//   masked; int state(const Rows&, first, last)      whether keys first .. last are hidden, mixed or open
//   scores<open>(...)                                the rule, of products in place
//   row_results(row, top, total); results(row, const Compute* sums, top, total)
#pragma once

#include <stddef.h>

#include "jitgen/math.hpp"
#include "jitgen/memory.hpp"
#include "jitgen/parallel.hpp"
#include "jitgen/vector.hpp"

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace jitgen {
namespace attention {

template <class T>
struct VectorOf {
  using type = Floats;
  static constexpr int64_t width = float_lanes;
};
template <>
struct VectorOf<double> {
  using type = Doubles;
  static constexpr int64_t width = double_lanes;
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr int64_t width_of = VectorOf<T>::width;
template <class T>
constexpr int64_t lanes_of = 2 * width_of<T>;

constexpr int64_t most_chunks = 8;        // of a block
constexpr int64_t block_bytes = 1 << 17;  // of its queries and sums, at most, unless it has one chunk
constexpr int64_t tile_bytes = 1 << 17;   // of a tile's keys and values, at most, unless it has `least_keys`
constexpr int64_t most_keys = 192, least_keys = 48;  // of a tile; multiples of a piece or of an even share of one
constexpr int64_t piece = 16;             // keys whose masks are looked at together

enum State { hidden = 0, mixed = 1, open = 2 };

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
template <class T>
constexpr T minus_infinity = -T(__builtin_inf());

// ------------------------------------------------------------------------------------------------------------ products

// Rows of a product that are computed at once: each takes two registers.
#if defined(JITGEN_AVX512)
constexpr int together = 12;
#else
constexpr int together = 6;
#endif

// to[i][lane] = sum over t of a[i][t] * b[t][lane], or that added to it. Neighbours of a are those of i if `along`, else
// those of t; `stride` is the other one's.
template <class T, int count, bool adds, bool along>
JITGEN_INLINE void product_tile(const T* a, int64_t stride, const T* b, int64_t depth, T* to) {
  constexpr int64_t lanes = lanes_of<T>, width = width_of<T>;
  Vector<T> sum[count][2];
#pragma GCC unroll 12
  for (int i = 0; i < count; ++i) {
    sum[i][0] = adds ? load_vector<Vector<T>>(to + i * lanes) : Vector<T>{};
    sum[i][1] = adds ? load_vector<Vector<T>>(to + i * lanes + width) : Vector<T>{};
  }
  for (int64_t t = 0; t < depth; ++t) {
    const Vector<T> row[2] = {load_vector<Vector<T>>(b), load_vector<Vector<T>>(b + width)};
#pragma GCC unroll 12
    for (int i = 0; i < count; ++i) accumulate_block(sum[i], row, a + (along ? i : i * stride));
    a += along ? stride : 1;
    b += lanes;
  }
#pragma GCC unroll 12
  for (int i = 0; i < count; ++i) {
    store_vector(to + i * lanes, sum[i][0]);
    store_vector(to + i * lanes + width, sum[i][1]);
  }
}

template <class T, int count, bool adds, bool along>
JITGEN_INLINE void product_rest(const T* a, int64_t stride, int64_t left, const T* b, int64_t depth, T* to) {
  if constexpr (count > 0) {
    if (left == count) return product_tile<T, count, adds, along>(a, stride, b, depth, to);
    product_rest<T, count - 1, adds, along>(a, stride, left, b, depth, to);
  }
}

template <class T, bool adds, bool along>
__attribute__((noinline)) void product(const T* a, int64_t stride, int64_t count, const T* b, int64_t depth, T* to) {
  int64_t i = 0;
  for (; i + together <= count; i += together) {
    product_tile<T, together, adds, along>(a + (along ? i : i * stride), stride, b, depth, to + i * lanes_of<T>);
  }
  product_rest<T, together - 1, adds, along>(a + (along ? i : i * stride), stride, count - i, b, depth,
                                             to + i * lanes_of<T>);
}

// ------------------------------------------------------------------------------------------------- in and out of lanes

// to[j][i] = from[i][j] for `rows` times `columns` elements, multiples of a vector's lanes.
template <class T>
void transposed(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
  constexpr int64_t width = width_of<T>;
  for (int64_t i = 0; i < rows; i += width) {
    for (int64_t j = 0; j < columns; j += width) {
      Vector<T> square[width];
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; ++k) square[k] = load_vector<Vector<T>>(from + (i + k) * from_stride + j);
      transpose(square);
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; ++k) store_vector(to + (j + k) * to_stride + i, square[k]);
    }
  }
}

// A row of keys or values as the compute type.
template <bool contiguous, class Storage, class T>
JITGEN_INLINE void widen_row(const Storage* from, int64_t step, int64_t count, T* to) {
  int64_t i = 0;
  if constexpr (contiguous) {
    for (; i + width_of<T> <= count; i += width_of<T>) {
      Vector<T> elements;
      widen(from + i, elements);
      store_vector(to + i, elements);
    }
  }
  for (; i < count; ++i) to[i] = load(from[i * (contiguous ? 1 : step)]);
}

// As the type of keys or values in memory: the generated source computes their rows.
struct Computed {};
template <class T>
constexpr bool is_computed = false;
template <>
constexpr bool is_computed<Computed> = true;

template <class A, class T>
void fill_keys(const A& a, int64_t first, int64_t last, T* to, int64_t stride) {
  for (int64_t n = first; n < last; ++n) {
    if constexpr (is_computed<typename A::Key>) a.key(n, to + (n - first) * stride);
    else widen_row<A::key_contiguous>(a.key(n), a.key_step, a.depth, to + (n - first) * stride);
  }
}
template <class A, class T>
void fill_values(const A& a, int64_t first, int64_t last, T* to, int64_t stride) {
  for (int64_t n = first; n < last; ++n) {
    if constexpr (is_computed<typename A::Value>) a.value(n, to + (n - first) * stride);
    else widen_row<A::value_contiguous>(a.value(n), a.value_step, a.width, to + (n - first) * stride);
  }
}

// ------------------------------------------------------------------------------------------------------------- softmax

// e^x for x <= 0, minus infinity and NaN included.
JITGEN_INLINE float power(float x) { return detail::exp_of_negative(x); }
JITGEN_INLINE double power(double x) { return jitgen::exp(x); }

// What is subtracted from scores whose maximum is `top`: rows without any score have sums of zero, and not of NaN.
template <class T>
JITGEN_INLINE T base_of_top(T top) {
  return top == minus_infinity<T> ? T(0) : top;
}

// Which keys of a tile some rows see: from `first` to before `last`; `state` of these.
struct Seen {
  int64_t first, last;
  State state;
};

template <class A>
JITGEN_INLINE Seen seen(const A& a, const typename A::Rows& rows, int64_t begin, int64_t end) {
  if constexpr (!A::masked) {
    return {begin, end, open};
  } else {
    Seen found{begin, begin, open};
    for (int64_t n = begin; n < end; n += piece) {
      const int64_t last = n + piece < end ? n + piece : end;
      const State state = a.state(rows, n, last - 1);
      if (state == hidden) {
        if (found.last == n && found.first == n) found.first = found.last = last;
        continue;
      }
      if (state == mixed || n != found.last) found.state = mixed;
      found.last = last;
    }
    return found;
  }
}

// ---------------------------------------------------------------------------------------------------------------- tiles

// Rows in lanes.
template <class A>
struct Tiles {
  using T = typename A::Compute;
  using Rows = typename A::Rows;
  static constexpr int64_t lanes = lanes_of<T>;

  // Of a block of rows: for each chunk top, total and sums. Of a thread: what it computes them with.
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
  T* top(T* of, int64_t chunk) const { return of + chunk * shape_.of_chunk(); }

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
      T* const of = top(state, chunk);
      for (int64_t lane = 0; lane < lanes; ++lane) of[lane] = minus_infinity<T>;
      __builtin_memset(of + lanes, 0, (1 + shape_.wide) * lanes * sizeof(T));
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
    T* const of = top(state, chunk);
    T *const total = of + lanes, *const sums = of + 2 * lanes;
    softmax(count, of, total, sums);
    product<T, true, true>(values + at * a.width, a.width, a.width, scores, count, sums);
  }

  // Weights in place of scores, relative to the rows' new maxima; what was summed before is scaled to them.
  void softmax(int64_t count, T* of, T* total, T* sums) {
    constexpr int64_t width = width_of<T>;
    Vector<T> most[2] = {load_vector<Vector<T>>(of), load_vector<Vector<T>>(of + width)};
    for (int64_t n = 0; n < count; ++n) {
      for (int v = 0; v < 2; ++v) {
        const Vector<T> score = load_vector<Vector<T>>(scores + n * lanes + v * width);
        most[v] = score > most[v] ? score : most[v];
      }
    }
    alignas(64) T base[lanes], scale[lanes];
    store_vector(base, most[0]);
    store_vector(base + width, most[1]);
    bool higher = false;
    for (int64_t lane = 0; lane < lanes; ++lane) higher |= base[lane] != of[lane];
#pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const T now = base[lane];
      base[lane] = base_of_top(now);
      scale[lane] = power(of[lane] - base[lane]);
      of[lane] = now;
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
      const Vector<T> before = load_vector<Vector<T>>(total + v * width);
      store_vector(total + v * width, (higher ? before * factor : before) + sum[v]);
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
      T *const mine = top(state, chunk), *const theirs = top(other, chunk);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const T most = theirs[lane] > mine[lane] ? theirs[lane] : mine[lane], base = base_of_top(most);
        const T scale = power(mine[lane] - base), factor = power(theirs[lane] - base);
        mine[lane] = most;
        for (int64_t e = 1; e < 2 + a.width; ++e) {
          mine[e * lanes + lane] = mine[e * lanes + lane] * scale + theirs[e * lanes + lane] * factor;
        }
      }
    }
  }

  void finish() {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      T* const of = top(state, chunk);
      transposed(of + 2 * lanes, lanes, shape_.wide, lanes, line, shape_.wide);
      for (int64_t lane = 0; lane < live(chunk); ++lane) {
        const int64_t row = first_row + chunk * lanes + lane;
        a.row_results(row, of[lane], of[lanes + lane]);
        // A product over no keys is zero, whatever its factors.
        const bool none = a.keys == 0;
        a.results(row, line + lane * shape_.wide, none ? T(0) : of[lane], none ? T(1) : of[lanes + lane]);
      }
    }
  }
};

// ------------------------------------------------------------------------------------------------------------- few rows

// A few rows that share keys: elements of a key or a value are in lanes.
template <class A>
struct Few {
  using T = typename A::Compute;
  using Rows = typename A::Rows;
  static constexpr int64_t width = width_of<T>;
  static constexpr int64_t in_flight = 8;  // accumulators

  struct Shape {
    int64_t rows, keys, wide, deep;
    int64_t state() const { return rows * (2 + wide); }
    int64_t own(const A&) const {
      return rows * deep + keys * (deep + wide) + rows * keys + int64_t(sizeof(Rows) / sizeof(T)) + 128;
    }
  };
  static Shape shape(const A& a, int64_t) {
    return {a.packed_rows(), 128, round_up(a.width, width), round_up(a.depth, width)};
  }
  static int64_t blocks(const A&, const Shape&) { return 1; }

  const A& a;
  const Shape shape_;
  T* const state;
  T *queries, *keys, *values, *scores;
  Rows* rows;

  Few(const A& a, const Shape& shape, int64_t, T* state, T* own) : a(a), shape_(shape), state(state) {
    queries = own;
    keys = queries + shape.rows * shape.deep;
    values = keys + shape.keys * shape.deep;
    scores = values + shape.keys * shape.wide;
    rows = reinterpret_cast<Rows*>(round_up(reinterpret_cast<intptr_t>(scores + shape.rows * shape.keys), 64));
  }

  T* top(T* of) const { return of; }
  T* total(T* of) const { return of + shape_.rows; }
  T* sums(T* of, int64_t row) const { return of + 2 * shape_.rows + row * shape_.wide; }

  void start() {
    for (int64_t lane = 0; lane < lanes_of<T>; ++lane) a.place(*rows, lane, lane < shape_.rows ? lane : shape_.rows - 1);
    a.settle(*rows);
    __builtin_memset(queries, 0, shape_.rows * shape_.deep * sizeof(T));
    for (int64_t row = 0; row < shape_.rows; ++row) {
      a.query(row, queries + row * shape_.deep);
      top(state)[row] = minus_infinity<T>;
    }
    __builtin_memset(total(state), 0, shape_.rows * (1 + shape_.wide) * sizeof(T));
    // What is beyond the end of a key and of a value stays zero.
    __builtin_memset(keys, 0, shape_.keys * (shape_.deep + shape_.wide) * sizeof(T));
  }

  void walk(int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += shape_.keys) {
      const int64_t last = n + shape_.keys < end ? n + shape_.keys : end;
      const Seen own = seen(a, *rows, n, last);
      if (own.first == own.last) continue;
      const int64_t count = own.last - own.first;
      int64_t stride = shape_.deep;
      const T* const from = in_place<A::key_contiguous>(a.key(own.first), a.key_stride, a.depth, keys, stride);
      if (from == keys) fill_keys(a, own.first, own.last, keys, shape_.deep);
      for (int64_t row = 0; row < shape_.rows; ++row) dots(queries + row * shape_.deep, from, stride, count, scores + row * shape_.keys);
      stride = shape_.wide;
      const T* const with = in_place<A::value_contiguous>(a.value(own.first), a.value_stride, a.width, values, stride);
      if (with == values) fill_values(a, own.first, own.last, values, shape_.wide);
      for (int64_t row = 0; row < shape_.rows; ++row) {
        T* const of = scores + row * shape_.keys;
        if (own.state == open) {
          a.template scores<true>(*rows, row, own.first, count, of);
        } else {
          a.template scores<false>(*rows, row, own.first, count, of);
        }
        softmax(row, count, of);
        weighted(of, count, with, stride, sums(state, row));
      }
    }
  }

  // The rows in memory themselves where they are vectors of the compute type, with their stride; else the buffer `to`.
  template <bool contiguous, class Storage>
  JITGEN_INLINE const T* in_place(const Storage* from, int64_t from_stride, int64_t elements, T* to, int64_t& stride) {
    if constexpr (contiguous && !is_computed<Storage> && sizeof(Storage) == sizeof(T)) {
      if (elements % width == 0) {
        stride = from_stride;
        return reinterpret_cast<const T*>(from);
      }
    }
    return to;
  }

  void dots(const T* query, const T* from, int64_t stride, int64_t count, T* to) const {
    int64_t n = 0;
    for (; n + width <= count; n += width) {
      Vector<T> sum[width] = {};
      for (int64_t d = 0; d < shape_.deep; d += width) {
        const Vector<T> element = load_vector<Vector<T>>(query + d);
#pragma GCC unroll 16
        for (int64_t k = 0; k < width; ++k) {
          accumulate(sum[k], load_vector<Vector<T>>(from + (n + k) * stride + d), element);
        }
      }
      transpose(sum);
      for (int64_t half = width / 2; half > 0; half /= 2) {
        for (int64_t k = 0; k < half; ++k) sum[k] += sum[k + half];
      }
      store_vector(to + n, sum[0]);
    }
    for (; n < count; ++n) {
      Vector<T> sum = {};
      for (int64_t d = 0; d < shape_.deep; d += width) {
        accumulate(sum, load_vector<Vector<T>>(from + n * stride + d), load_vector<Vector<T>>(query + d));
      }
      T parts[width];
      store_vector(parts, sum);
      for (int64_t half = width / 2; half > 0; half /= 2) {
        for (int64_t k = 0; k < half; ++k) parts[k] += parts[k + half];
      }
      to[n] = parts[0];
    }
  }

  void softmax(int64_t row, int64_t count, T* of) const {
    const T before = top(state)[row];
    T most = before;
#pragma omp simd reduction(max : most)
    for (int64_t n = 0; n < count; ++n) most = of[n] > most ? of[n] : most;
    const T base = base_of_top(most);
    T sum = 0;
#pragma omp simd
    for (int64_t n = 0; n < count; ++n) of[n] = power(of[n] - base);
#pragma omp simd reduction(+ : sum)
    for (int64_t n = 0; n < count; ++n) sum += of[n];
    top(state)[row] = most;
    if (most != before) {
      const T scale = power(before - base);
      total(state)[row] *= scale;
      T* const to = sums(state, row);
#pragma omp simd
      for (int64_t e = 0; e < shape_.wide; ++e) to[e] *= scale;
    }
    total(state)[row] += sum;
  }

  // Adds the values, each times its weight.
  void weighted(const T* weights, int64_t count, const T* from, int64_t stride, T* to) const {
    int64_t e = 0;
    for (; e + in_flight * width <= shape_.wide; e += in_flight * width) {
      weighted_columns<in_flight>(weights, count, from + e, stride, to + e);
    }
    for (; e < shape_.wide; e += width) weighted_columns<1>(weights, count, from + e, stride, to + e);
  }
  template <int vectors>
  JITGEN_INLINE void weighted_columns(const T* weights, int64_t count, const T* from, int64_t stride, T* to) {
    Vector<T> sum[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[v] = load_vector<Vector<T>>(to + v * width);
    for (int64_t n = 0; n < count; ++n) {
      const Vector<T> weight = splat(weights[n]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) accumulate(sum[v], load_vector<Vector<T>>(from + n * stride + v * width), weight);
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) store_vector(to + v * width, sum[v]);
  }

  void join(T* other) {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      const T mine = top(state)[row], theirs = top(other)[row];
      const T most = theirs > mine ? theirs : mine, base = base_of_top(most);
      const T scale = power(mine - base), factor = power(theirs - base);
      top(state)[row] = most;
      total(state)[row] = total(state)[row] * scale + total(other)[row] * factor;
      T *const to = sums(state, row), *const from = sums(other, row);
      for (int64_t e = 0; e < shape_.wide; ++e) to[e] = to[e] * scale + from[e] * factor;
    }
  }

  void finish() {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      a.row_results(row, top(state)[row], total(state)[row]);
      const bool none = a.keys == 0;
      a.results(row, sums(state, row), none ? T(0) : top(state)[row], none ? T(1) : total(state)[row]);
    }
  }
};

// -------------------------------------------------------------------------------------------------------------- threads

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
  T* const memory = static_cast<T*>(aligned_memory(4096, round_up((states * state + threads * own) * sizeof(T), 4096)));
  if (memory == nullptr) __builtin_trap();
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
