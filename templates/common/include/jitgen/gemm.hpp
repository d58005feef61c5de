// Matmul on the host: y[m, n] = epilogue(sum over k of x[m, k] * w[n, k]), several weights and several regions at once.
//
// x is packed once, in tiles of up to 24 rows. Weights are in blocks of 16 rows. A tile has one accumulator for each of
// its rows; a block of weights is decoded in registers and multiplied with all of the tile's rows, and the multiply-add
// itself reads x from memory. So only four bits of a weight are read, and above a few rows the arithmetic hides the
// decoding. A thread computes a run of blocks, in groups. It collects their sums over all of k in a buffer of its own,
// and the epilogue then reads that buffer, one row of a group's columns at a time.
//
// Sums have the same order for every number of threads, because k is never split among threads.
//
// The generated source has, for each region, a struct with
//   Weight w0, w1, ...                      (of gemm_operands.hpp)
//   int64_t columns() const                 its N
//   template <class F> void each(const F& f) const        f(0, w0); f(1, w1); ...
//   void epilogue(int64_t m, int64_t n, int64_t count, const Accumulator* sums, int64_t plane) const
//                                           columns n .. n + count of row m; contraction c's are at sums + c * plane
// and for x a struct with Storage and `void fill(int64_t m, int64_t k, int64_t count, Storage* to) const`; where its
// rows are next to each other in memory, also `void fill_across(int64_t m, int64_t k, int64_t rows, Storage* to) const`.
#pragma once

#include <stddef.h>

#include "jitgen/gemm_operands.hpp"
#include "jitgen/memory.hpp"

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace jitgen {
namespace gemm {

constexpr int64_t rows_at_once = 240;    // rows of x whose sums fit the second-level cache
constexpr int64_t across_elements = 64;  // elements packed at a time of rows next to each other, whose lines the cache holds

// Memory that products computed one after another share. It grows, and is freed at the end. Null where there is none.
struct Workspace {
  char* memory = nullptr;
  int64_t bytes = 0;

  inline char* of(int64_t wanted) {
    if (wanted > bytes) {
      __builtin_free(memory);
      memory = static_cast<char*>(needed_memory(4096, wanted));
      bytes = memory == nullptr ? 0 : wanted;
    }
    return memory;
  }
  ~Workspace() { __builtin_free(memory); }
};

// The workspace that this thread's products use; nullptr where each has its own.
static thread_local Workspace* thread_workspace = nullptr;

struct WorkspaceScope {
  explicit WorkspaceScope(Workspace& workspace) { thread_workspace = &workspace; }
  ~WorkspaceScope() { thread_workspace = nullptr; }
};

namespace detail {

template <class X>
constexpr auto lies_across(int) -> decltype(&X::fill_across, true) {
  return true;
}
template <class X>
constexpr bool lies_across(long) {
  return false;
}

// As `pack`, of rows that are next to each other in memory: at each k all rows of a tile are copied at once.
template <class Compute, class X>
void pack_across(const X& x, const Packed<Compute>& to, int64_t first, int64_t k, int64_t thread, int64_t threads) {
  const Range mine = share(to.tiles, 1, thread, threads);
  for (int64_t e = 0; e < to.depth; e += across_elements) {
    const int64_t end = to.depth - e < across_elements ? to.depth : e + across_elements;
    const int64_t live = k < end ? k : end;
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const Range rows = to.tile(t);
      const int64_t count = rows.end - rows.begin;
      auto* const tile = to.data + rows.begin * to.depth;
      typename X::Storage buffer[Compute::tile_rows];
      const auto copied = [&](int64_t at, int64_t here) {
        x.fill_across(first + rows.begin, at, here, buffer);
        for (int64_t m = 0; m < here; ++m) tile[at * count + m] = element_of_x<Compute>(buffer, m);
      };
      if (count == Compute::tile_rows) {  // a length that the compiler knows
        for (int64_t at = e; at < live; ++at) copied(at, Compute::tile_rows);
      } else {
        for (int64_t at = e; at < live; ++at) copied(at, count);
      }
      for (int64_t at = live < e ? e : live; at < end; ++at) {
        for (int64_t m = 0; m < count; ++m) tile[at * count + m] = typename Compute::Element(0);
      }
    }
  }
}

// Interleaves `rows` rows of `count` floats, each `stride` from the one before, squares of them at a time. `from` has as
// many rows as whole squares.
inline void interleave(const float* from, int64_t stride, int64_t rows, int64_t count, float* to) {
  const int64_t last = (rows - 1) / float_lanes * float_lanes;
  int64_t e = 0;
  // The vectors of the last rows may exceed these: what follows them is written afterwards.
  for (; (e + float_lanes - 1) * rows + last + float_lanes <= count * rows; e += float_lanes) {
    for (int64_t first = last; first >= 0; first -= float_lanes) {
      Floats square[float_lanes];
#pragma GCC unroll 16
      for (int m = 0; m < float_lanes; ++m) square[m] = load_vector<Floats>(from + (first + m) * stride + e);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < float_lanes; ++i) store_vector(to + (e + i) * rows + first, square[i]);
    }
  }
  for (; e < count; ++e) {
    for (int64_t m = 0; m < rows; ++m) to[e * rows + m] = from[m * stride + e];
  }
}

// Halves those elements of `count` numbers of a row of x whose neighbours are too large together, and adds what is left
// of them to the `halved` ones in `rests`. Neighbours are those that `of_x` makes neighbours. A vector beyond x is read.
template <class Compute>
inline void halve(int8_t* x, int64_t count, int64_t row, Rest<typename Compute::Element>* rests, int32_t& halved) {
  for (int64_t e = 0; e < count / 4; e += float_lanes) {
    const Words words = load_vector<Words>(x + 4 * e);
    const auto byte = [&](int i) { return (Ints)(words << (24 - 8 * i)) >> 24; };
    const Ints sum = byte(0) + byte(Compute::distance), other = byte(3 - Compute::distance) + byte(3);
    uint32_t lanes = lanes_of((sum > 128) | (sum < -128) | (other > 128) | (other < -128));
    if (count / 4 - e < float_lanes) lanes &= (1u << (count / 4 - e)) - 1;
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t element = e + __builtin_ctz(lanes);
      int8_t* const four = x + 4 * element;
      int8_t rest[4];
      for (int i = 0; i < 4; ++i) {
        const int8_t half = four[i] >> 1;
        rest[i] = four[i] - half;
        four[i] = half;
      }
      rests[halved++] = {uint16_t(element), uint16_t(row), Compute::of_x(rest, 0)};
    }
  }
}

// Packs the rows of x from `first` on, as many as `to` has, by all threads. There are zeros beyond `k`.
template <class Compute, class X>
void pack(const X& x, const Packed<Compute>& to, int64_t first, int64_t k, int64_t thread, int64_t threads) {
  constexpr int64_t per = Compute::per_element;
  if constexpr (per == 1 && lies_across<X>(0)) return pack_across(x, to, first, k, thread, threads);
  constexpr int64_t read_beyond = halves_x<Compute>(0) ? vector_bytes : 0;
  alignas(64) typename X::Storage buffer[fill_elements * per + read_beyond];
  const int64_t pieces = (to.depth + fill_elements - 1) / fill_elements;
  const Range mine = share(to.tiles * pieces, 1, thread, threads);
  for (int64_t number = mine.begin; number < mine.end; ++number) {
    const Range rows = to.tile(number / pieces);
    const int64_t count = rows.end - rows.begin;
    const int64_t e = number % pieces * fill_elements;
    const int64_t elements = to.depth - e < fill_elements ? to.depth - e : fill_elements;
    const int64_t there = k - e * per < 0 ? 0 : k - e * per < elements * per ? k - e * per : elements * per;
    if constexpr (same<typename X::Storage, float> && same<typename Compute::Element, float> &&
                  Compute::tile_rows > 1) {
      if (count > 1) {
        constexpr int64_t together = 128, squares = (Compute::tile_rows + float_lanes - 1) / float_lanes;
        alignas(64) float square[squares * float_lanes][together] = {};
        for (int64_t at = 0; at < elements; at += together) {
          const int64_t here = elements - at < together ? elements - at : together;
          const int64_t live = there - at < 0 ? 0 : there - at < here ? there - at : here;
          for (int64_t m = 0; m < count; ++m) {
            x.fill(first + rows.begin + m, e + at, live, square[m]);
            __builtin_memset(square[m] + live, 0, (here - live) * sizeof(float));
          }
          interleave(square[0], together, count, here, to.data + rows.begin * to.depth + (e + at) * count);
        }
        continue;
      }
    }
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      x.fill(first + m, e * per, there, buffer);
      __builtin_memset(buffer + there, 0, (elements * per - there) * sizeof(buffer[0]));
      if constexpr (offset_of<Compute>(0) != 0) {
        for (int64_t i = 0; i < elements * per; i += to.span) {
          const int64_t end = elements * per - i < to.span ? elements * per : i + to.span;
          int32_t total = 0;
#pragma omp simd reduction(+ : total)
          for (int64_t j = i; j < end; ++j) total += buffer[j];
          const int64_t fact = (e * per + i) / to.span * to.rows + m;
          to.totals[fact] = Compute::offset * total;
          if constexpr (halves_x<Compute>(0)) {
            int32_t& halved = to.rest_counts[fact - (m - rows.begin)];
            if (m == rows.begin) halved = 0;
            halve<Compute>(buffer + i, end - i, m - rows.begin, to.rests + (fact - (m - rows.begin)) * (to.span / per),
                           halved);
          }
        }
      }
      if constexpr (whole_rows<Compute>(0)) {
        pack_row<Compute>(buffer, elements, to.data + m * to.depth + e, 1);
      } else {
        pack_row<Compute>(buffer, elements, to.data + rows.begin * to.depth + e * count + (m - rows.begin), count);
      }
    }
  }
}

// How work is distributed among threads: `across` of them share the blocks, `down` share the tiles.
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

// One block more than a group has, so that rows do not map to the same sets of a cache.
constexpr int64_t row_stride_of(int64_t group) { return (group + 1) * block_rows; }

template <class Compute, class Region>
void region_groups(const Region& region, const Packed<Compute>& x, Range tiles, int64_t first_row, Range blocks,
                   int64_t group, typename Compute::Accumulator* sums, typename Compute::Element* panel) {
  const Range rows = {x.tile(tiles.begin).begin, x.tile(tiles.end - 1).end};
  const int64_t row_stride = row_stride_of(group);
  const int64_t plane = x.rows * row_stride;
  for (int64_t block = blocks.begin; block < blocks.end; block += group) {
    const int64_t count = blocks.end - block < group ? blocks.end - block : group;
    region.each([&](int64_t contraction, const auto& weight) {
      auto* const to = sums + contraction * plane;
      if (x.depth == 0) __builtin_memset(to, 0, plane * sizeof(*to));
      weight.template sum<Compute>(Task<Compute>{x, tiles, block, count, to, row_stride, panel});
    });
    const int64_t n = block * block_rows;
    const int64_t columns = region.columns() - n < count * block_rows ? region.columns() - n : count * block_rows;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      region.epilogue(first_row + m, n, columns, sums + m * row_stride, plane);
    }
  }
}

template <class T>
constexpr T largest(T a, T b) {
  return a > b ? a : b;
}

}  // namespace detail

// The whole product, on `threads` threads. x is [m, k].
template <class Compute, class X, class... Regions>
void multiply(const X& x, int64_t m, int64_t k, int32_t threads, const Regions&... regions) {
  using Element = typename Compute::Element;
  using Accumulator = typename Compute::Accumulator;
  int64_t depth = 0, contractions = 0, panel = 0, blocks = 0, span = 1;
  const auto measure = [&](const auto& region) {
    region.each([&](int64_t contraction, const auto& weight) {
      depth = detail::largest(depth, weight.template depth<Compute>());
      if constexpr (detail::offset_of<Compute>(0) != 0) span = weight.template span<Compute>();
      panel = detail::largest(panel, weight.template panel<Compute>());
      contractions = detail::largest(contractions, contraction + 1);
    });
    blocks += round_up(region.columns(), block_rows) / block_rows;
  };
  (measure(regions), ...);
  if (m == 0 || blocks == 0) return;
  const int64_t passes = (m + rows_at_once - 1) / rows_at_once;
  const int64_t most_rows = (m + passes - 1) / passes;
  const int64_t totals = detail::offset_of<Compute>(0) != 0 ? depth * Compute::per_element / span + 1 : 0;
  const int64_t totals_at = round_up(most_rows * depth * sizeof(Element), 64);
  constexpr bool halves = detail::halves_x<Compute>(0);
  const int64_t counts_at = totals_at + totals * most_rows * sizeof(int32_t);
  const int64_t rests_at = round_up(halves ? counts_at + totals * most_rows * sizeof(int32_t) : counts_at, 64);
  const int64_t rests = halves ? totals * most_rows * (span / Compute::per_element) : 0;
  const int64_t packed_bytes = round_up(rests_at + rests * sizeof(Rest<Element>), 4096);
  const int64_t group = most_rows <= wide_rows ? wide_group_blocks : group_blocks;
  const int64_t sums = contractions * most_rows * detail::row_stride_of(group);
  const int64_t sums_bytes = round_up(sums * sizeof(Accumulator), 4096);
  const int64_t own_bytes = sums_bytes + round_up(panel * sizeof(Element), 4096);
  Workspace own_workspace, &workspace = thread_workspace != nullptr ? *thread_workspace : own_workspace;
  char* const memory = workspace.of(packed_bytes + threads * own_bytes);
  if (memory == nullptr) return;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t present = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    char* const own = memory + packed_bytes + thread * own_bytes;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Range rows = share(m, 1, pass, passes);
      const int64_t count = rows.end - rows.begin;
      const Packed<Compute> packed{reinterpret_cast<Element*>(memory), count, depth,
                                   (count + Compute::tile_rows - 1) / Compute::tile_rows,
                                   reinterpret_cast<int32_t*>(memory + totals_at), span,
                                   reinterpret_cast<int32_t*>(memory + counts_at),
                                   reinterpret_cast<Rest<Element>*>(memory + rests_at)};
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
            detail::region_groups(region, packed, tiles, rows.begin, own_blocks, group,
                                  reinterpret_cast<Accumulator*>(own), reinterpret_cast<Element*>(own + sums_bytes));
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
}

// Calls function(matrix, threads) for each of `count` matrices. As many as there are threads are computed at once, each
// by one thread; the remaining ones are computed one after another, by all threads.
template <class Function>
void each_matrix(int64_t count, int32_t threads, const Function& function) {
  const int64_t shared_out = threads > 1 ? count / threads * threads : 0;
  if (shared_out != 0) {
#pragma omp parallel num_threads(threads)
    {
      Workspace workspace;
      const WorkspaceScope scope(workspace);
      const Range mine = share(shared_out, 1, omp_get_thread_num(), omp_get_num_threads());
      for (int64_t matrix = mine.begin; matrix < mine.end; ++matrix) function(matrix, 1);
    }
  }
  Workspace workspace;
  const WorkspaceScope scope(workspace);
  for (int64_t matrix = shared_out; matrix < count; ++matrix) function(matrix, threads);
}

}  // namespace gemm
}  // namespace jitgen
