// Matmul on the host: y[m, n] = epilogue(sum over k of x[m, k] * w[n, k]), several weights and several regions at once.
//
// x is packed once, in tiles of up to 24 rows. Weights come in blocks of 16 rows: a tile keeps one accumulator for each
// of its rows and a block of weights, decoded in registers, meets all of them; x is read from memory by the
// multiply-add itself. So four bits a weight are all that is read, and above a few rows decoding is hidden behind the
// arithmetic. A thread takes a run of blocks, in groups of four: their sums over all of k are gathered in a buffer of
// its own, and the epilogue runs over that buffer, a row of up to 64 columns at a time.
//
// Sums are in one order whatever the number of threads: k is never split among threads.
//
// The generated source has, for each region, a struct with
//   Weight w0, w1, ...                      (Quantised or Dense, below)
//   static constexpr int contractions       how many
//   int64_t columns() const                 its N
//   template <class F> void each(const F& f) const        f(0, w0); f(1, w1); ...
//   template <class A> void epilogue(int64_t m, int64_t n, int64_t count, const A* acc, int64_t plane) const
//                                           columns n .. n + count of row m; contraction c's sums are at acc + c * plane
// and for x a struct with Storage and `void fill(int64_t m, int64_t k, int64_t count, Storage* to) const`.
#pragma once

#include <stddef.h>

#include "jitgen/gemm_dense.hpp"
#include "jitgen/gemm_weights.hpp"
#include "jitgen/parallel.hpp"

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" void* aligned_alloc(size_t alignment, size_t bytes);

namespace jitgen {
namespace gemm {

constexpr int64_t group_blocks = 4;                          // blocks whose sums are gathered together
constexpr int64_t group_columns = group_blocks * block_rows;
constexpr int64_t chunk_elements = 256;                      // of k: a tile's x, as long as this, fits the first-level cache
constexpr int64_t rows_at_once = 240;                        // of x: their sums fit the second-level cache
constexpr int64_t fill_elements = 1024;

// ------------------------------------------------------------------------------------------------------------ tiles

// Stands for the scales of weights that have none.
struct Unscaled {};

namespace detail {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// `units` of a block's weights against `rows` rows of x, added to `c` (put there, when `first`). Few rows have several
// accumulators each, so that one sum need not wait for the last.
template <class Compute, class Decoder, class Scale, int rows>
__attribute__((noinline)) void tile(const char* w, const typename Compute::Element* x, int64_t units,
                                    int64_t units_per_group, const Scale* scales, const uint8_t* zeros,
                                    typename Compute::Accumulator* c, int64_t row_stride, bool first) {
  using Vector = typename Compute::Vector;
  using Decode = typename Decoder::template type<rows>;
  constexpr int vectors = Compute::vectors;
  constexpr int elements = Decoder::elements;
  constexpr bool scaled = !same<Scale, Unscaled>;
  constexpr int wanted = rows <= 3 ? 4 : rows <= 5 ? 2 : 1;
  constexpr int ways = Decode::steps % wanted == 0 && rows * wanted <= Compute::most_rows ? wanted : 1;
  Decode decode;
  for (int64_t done = 0; done < units; done += units_per_group) {
    Vector acc[rows][ways][vectors];
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
      for (int way = 0; way < ways; ++way) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) acc[m][way][v] = Vector{};
      }
    }
    decode.group(zeros);
    const int64_t here = units - done < units_per_group ? units - done : units_per_group;
    for (int64_t unit = 0; unit < here; ++unit) {
      if (scaled) __builtin_prefetch(w + 1536);
      decode.open(w);
#pragma GCC unroll 8
      for (int step = 0; step < Decode::steps; ++step) {
        typename Compute::Weights weights[vectors];
        decode.take(step, weights);
        const typename Compute::Element* const at = x + Decode::element(step) * rows;
#pragma GCC unroll 24
        for (int m = 0; m < rows; ++m) accumulate_block(acc[m][step % ways], weights, at + m);
      }
      w += Decode::bytes;
      x += elements * rows;
    }
    Vector scale[vectors];
    if constexpr (scaled) {
      for (int v = 0; v < vectors; ++v) widen(scales + v * (block_rows / vectors), scale[v]);
      scales += block_rows;
      zeros += block_rows;
    }
#pragma GCC unroll 24
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        Vector sum = acc[m][0][v];
        if constexpr (ways == 2) sum += acc[m][1][v];
        if constexpr (ways == 4) sum = (sum + acc[m][1][v]) + (acc[m][2][v] + acc[m][3][v]);
        auto* const to = c + m * row_stride + v * (block_rows / vectors);
        Vector total = first ? Vector{} : load_vector<Vector>(to);
        if constexpr (scaled) {
          accumulate(total, scale[v], sum);
        } else {
          total += sum;
        }
        store_vector(to, total);
      }
    }
    first = false;
  }
}

template <class Compute, class Decoder, class Scale>
struct Tiles {
  using Tile = decltype(&tile<Compute, Decoder, Scale, 1>);
  template <int rows = Compute::tile_rows>
  JITGEN_INLINE Tile of(int64_t count) {
    if constexpr (rows > 1) {
      if (count < rows) return of<rows - 1>(count);
    }
    return tile<Compute, Decoder, Scale, rows>;
  }
};

}  // namespace detail

// --------------------------------------------------------------------------------------------------------- operands

// Rows of x as the tiles read them: tile t has rows share(rows, 1, t, tiles), `depth` elements each.
template <class Compute>
struct Packed {
  typename Compute::Element* data;
  int64_t rows;
  int64_t depth;
  int64_t tiles;

  inline Range tile(int64_t t) const { return share(rows, 1, t, tiles); }
};

// The sums of a group of blocks: `data` has group_columns for each row.
template <class Compute>
struct Task {
  const Packed<Compute>& x;
  Range tiles;
  int64_t block;   // the first of `blocks` blocks
  int64_t blocks;
  typename Compute::Accumulator* sums;
  typename Compute::Element* panel;
};

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Weights of `bits` bits in the layout "cpu" (jitgen/quant/layouts/cpu.py): 16 rows side by side, 64 bytes of codes for
// 8 or 4 k; scales and zero-points of 16 rows side by side for each group. `group` 0: one scale for each row.
template <int bits, int64_t group, bool zeroed, class Scale>
struct Quantised {
  const uint8_t* codes;
  const Scale* scales;
  const uint8_t* zeros;
  int64_t k;

  static constexpr int64_t unit_bytes = 64;
  static constexpr int64_t per_unit = unit_bytes * 8 / bits / block_rows;

  template <class Compute>
  static constexpr int64_t panel() {
    return 0;
  }
  template <class Compute>
  int64_t depth() const {
    return round_up(k, group != 0 ? group : 64) / Compute::per_element;
  }

  template <class Compute>
  void sum(const Task<Compute>& task) const {
    using Tiles = detail::Tiles<Compute, Decoder<Compute, bits, zeroed>, Scale>;
    constexpr int64_t elements = per_unit / Compute::per_element;
    constexpr int64_t per_group = group != 0 ? group / per_unit : 64;
    const int64_t units = depth<Compute>() / elements;
    const int64_t groups = group != 0 ? units / per_group : 1;
    // One tile reads the weights as they lie; several read as much of them as stays in the cache, one after another.
    const int64_t chunk = task.tiles.end - task.tiles.begin == 1 ? units : round_up(chunk_elements / elements, per_group);
    for (int64_t unit = 0; unit < units; unit += chunk) {
      const int64_t here = units - unit < chunk ? units - unit : chunk;
      const int64_t first_group = group != 0 ? unit / per_group : 0;
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const int64_t count = rows.end - rows.begin;
        const auto tile = Tiles::of(count);
        const auto* const x = task.x.data + rows.begin * task.x.depth + unit * elements * count;
        for (int64_t b = 0; b < task.blocks; ++b) {
          const int64_t block = task.block + b;
          const int64_t at = (block * groups + first_group) * block_rows;
          tile(reinterpret_cast<const char*>(codes) + (block * units + unit) * unit_bytes, x, here,
               group != 0 ? per_group : here, scales + at, zeroed ? zeros + at : nullptr,
               task.sums + rows.begin * group_columns + b * block_rows, group_columns, unit == 0);
        }
      }
    }
  }
};

// Weights of a floating-point dtype, any strides.
template <class Storage>
struct Dense {
  const Storage* data;
  int64_t n;
  int64_t k;
  int64_t stride_n;
  int64_t stride_k;

  template <class Compute>
  static constexpr int64_t panel() {
    return group_blocks * chunk_elements * block_rows;
  }
  template <class Compute>
  int64_t depth() const {
    return round_up(round_up(k, Compute::per_element) / Compute::per_element, ready_steps);
  }

  template <class Compute>
  void sum(const Task<Compute>& task) const {
    using Tiles = detail::Tiles<Compute, Panel<Compute>, Unscaled>;
    const int64_t elements = depth<Compute>();
    for (int64_t e = 0; e < elements; e += chunk_elements) {
      const int64_t here = elements - e < chunk_elements ? elements - e : chunk_elements;
      const int64_t k0 = e * Compute::per_element;
      const int64_t count = k - k0 < here * Compute::per_element ? k - k0 : here * Compute::per_element;
      for (int64_t b = 0; b < task.blocks; ++b) {
        const int64_t row = (task.block + b) * block_rows;
        pack_block<Compute>(data + row * stride_n + k0 * stride_k, stride_n, stride_k,
                            n - row < block_rows ? n - row : block_rows, count, here,
                            task.panel + b * here * block_rows);
      }
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const int64_t count = rows.end - rows.begin;
        const auto tile = Tiles::of(count);
        for (int64_t b = 0; b < task.blocks; ++b) {
          tile(reinterpret_cast<const char*>(task.panel + b * here * block_rows),
               task.x.data + rows.begin * task.x.depth + e * count, here / ready_steps, here / ready_steps, nullptr,
               nullptr, task.sums + rows.begin * group_columns + b * block_rows, group_columns, e == 0);
        }
      }
    }
  }
};

// ----------------------------------------------------------------------------------------------------------- matmul

namespace detail {

// The rows of x from `first` on, as many as `to` has, packed by all threads; beyond `k` there are zeros.
template <class Compute, class X>
void pack(const X& x, const Packed<Compute>& to, int64_t first, int64_t k, int64_t thread, int64_t threads) {
  constexpr int64_t per = Compute::per_element;
  alignas(64) typename X::Storage buffer[fill_elements * per];
  const int64_t pieces = (to.depth + fill_elements - 1) / fill_elements;
  const Range mine = share(to.tiles * pieces, 1, thread, threads);
  for (int64_t number = mine.begin; number < mine.end; ++number) {
    const Range rows = to.tile(number / pieces);
    const int64_t count = rows.end - rows.begin;
    const int64_t e = number % pieces * fill_elements;
    const int64_t elements = to.depth - e < fill_elements ? to.depth - e : fill_elements;
    const int64_t there = k - e * per < 0 ? 0 : k - e * per < elements * per ? k - e * per : elements * per;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      x.fill(first + m, e * per, there, buffer);
      __builtin_memset(buffer + there, 0, (elements * per - there) * sizeof(buffer[0]));
      pack_row<Compute>(buffer, elements, to.data + rows.begin * to.depth + e * count + (m - rows.begin), count);
    }
  }
}

// How threads are set on blocks and tiles: `across` of them on blocks, `down` on tiles.
struct Grid {
  int64_t across;
  int64_t down;
};

JITGEN_INLINE Grid grid_of(int64_t blocks, int64_t tiles, int64_t threads) {
  Grid best{threads, 1};
  int64_t least = -1;
  for (int64_t down = 1; down <= threads; ++down) {
    const int64_t across = threads / down;
    const int64_t load = ((blocks + across - 1) / across) * ((tiles + down - 1) / down);
    if (least < 0 || load < least) {
      best = {across, down};
      least = load;
    }
  }
  return best;
}

template <class Compute, class Region>
void region_groups(const Region& region, const Packed<Compute>& x, Range tiles, int64_t first_row, Range blocks,
                   typename Compute::Accumulator* sums, typename Compute::Element* panel) {
  const Range rows = {x.tile(tiles.begin).begin, x.tile(tiles.end - 1).end};
  const int64_t plane = x.rows * group_columns;
  for (int64_t block = blocks.begin; block < blocks.end; block += group_blocks) {
    const int64_t count = blocks.end - block < group_blocks ? blocks.end - block : group_blocks;
    region.each([&](int64_t contraction, const auto& weight) {
      auto* const to = sums + contraction * plane;
      if (x.depth == 0) __builtin_memset(to, 0, plane * sizeof(*to));
      weight.template sum<Compute>(Task<Compute>{x, tiles, block, count, to, panel});
    });
    const int64_t n = block * block_rows;
    const int64_t columns = region.columns() - n < count * block_rows ? region.columns() - n : count * block_rows;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      region.epilogue(first_row + m, n, columns, sums + m * group_columns, plane);
    }
  }
}

template <class T>
constexpr T largest(T a, T b) {
  return a > b ? a : b;
}

}  // namespace detail

// All of it, on `threads` threads. x is [m, k].
template <class Compute, class X, class... Regions>
void multiply(const X& x, int64_t m, int64_t k, int32_t threads, const Regions&... regions) {
  using Element = typename Compute::Element;
  using Accumulator = typename Compute::Accumulator;
  int64_t depth = 0, contractions = 0, panel = 0, blocks = 0;
  const auto measure = [&](const auto& region) {
    region.each([&](int64_t contraction, const auto& weight) {
      depth = detail::largest(depth, weight.template depth<Compute>());
      panel = detail::largest(panel, weight.template panel<Compute>());
      contractions = detail::largest(contractions, contraction + 1);
    });
    blocks += round_up(region.columns(), block_rows) / block_rows;
  };
  (measure(regions), ...);
  if (m == 0 || blocks == 0) return;
  const int64_t passes = (m + rows_at_once - 1) / rows_at_once;
  const int64_t most_rows = (m + passes - 1) / passes;
  const int64_t packed_bytes = round_up(most_rows * depth * sizeof(Element), 4096);
  const int64_t sums_bytes = round_up(contractions * most_rows * group_columns * sizeof(Accumulator), 4096);
  const int64_t own_bytes = sums_bytes + round_up(panel * sizeof(Element), 4096);
  char* const memory = static_cast<char*>(aligned_alloc(4096, packed_bytes + threads * own_bytes));
  if (memory == nullptr) __builtin_trap();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t present = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    char* const own = memory + packed_bytes + thread * own_bytes;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Range rows = share(m, 1, pass, passes);
      const int64_t count = rows.end - rows.begin;
      const Packed<Compute> packed{reinterpret_cast<Element*>(memory), count, depth,
                                   (count + Compute::tile_rows - 1) / Compute::tile_rows};
      detail::pack(x, packed, rows.begin, k, thread, present);
#pragma omp barrier
      const detail::Grid grid = detail::grid_of(blocks, packed.tiles, present);
      if (thread < grid.across * grid.down) {
        const Range mine = share(blocks, 1, thread % grid.across, grid.across);
        const Range tiles = share(packed.tiles, 1, thread / grid.across, grid.down);
        int64_t first = 0;
        const auto run = [&](const auto& region) {
          const int64_t here = round_up(region.columns(), block_rows) / block_rows;
          const Range own_blocks = {detail::largest<int64_t>(mine.begin - first, 0),
                                    mine.end - first < here ? mine.end - first : here};
          if (tiles.begin < tiles.end && own_blocks.begin < own_blocks.end) {
            detail::region_groups(region, packed, tiles, rows.begin, own_blocks, reinterpret_cast<Accumulator*>(own),
                                  reinterpret_cast<Element*>(own + sums_bytes));
          }
          first += here;
        };
        (run(regions), ...);
      }
      if (pass + 1 < passes) {
#pragma omp barrier
      }
    }
  }
  __builtin_free(memory);
}

}  // namespace gemm
}  // namespace jitgen
