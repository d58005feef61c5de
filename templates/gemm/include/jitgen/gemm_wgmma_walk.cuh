// The wgmma mainloops share what is here: the order of tiles, the ring of stages, and the call of the epilogue.
#pragma once

#include "jitgen/ptx.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

// One piece of work: a region, and the position of a tile in it (`place_in` gives it in tiles). The epilogue gets rows
// that are greater by `below`: where ranges of K are summed separately, each has a matrix of results below the one before.
struct TilePlace {
  int region, row, column, below;
};

template <int width, class Region, int regions>
JITGEN_DEVICE int column_tiles_of(const Region (&all)[regions]) {
  int sum = 0;
#pragma unroll
  for (int r = 0; r < regions; ++r) sum += (all[r].columns + width - 1) / width;
  return sum;
}

// The tile of piece number `item`. Within a band of `raster` rows of tiles, tiles are numbered down a column before the
// next column, so that the pieces computed at one time share both x and weights in L2. Regions follow each other along
// the columns; their tiles have `width` columns.
template <int raster, int width, class Region, int regions>
JITGEN_DEVICE TilePlace place_in(int item, int row_tiles, int column_tiles, const Region (&all)[regions]) {
  const int first = item / (raster * column_tiles) * raster;
  const int height = smaller(raster, row_tiles - first);
  const int inside = item - first * column_tiles;
  TilePlace tile = {0, first + inside % height, inside / height, 0};
#pragma unroll
  for (int r = 0; r + 1 < regions; ++r) {
    const int tiles = (all[r].columns + width - 1) / width;
    if (tile.region == r && tile.column >= tiles) {
      tile.column -= tiles;
      tile.region = r + 1;
    }
  }
  return tile;
}

// The pieces of work of this block, one after another, where a cluster's blocks can split K (most_splits > 1). As long as
// there is a piece for each block of the grid, each computes one of its own. The pieces that are then left would leave
// some blocks idle: they are computed by whole clusters, unless those would take as long as single blocks.
//
// With multicast, the blocks of a cluster together take an item of `multicast` tiles, and as many blocks split K: then
// `tile` says which of the item's tiles it is.
template <int most_splits, int multicast, class Item = int>
struct TileWalk {
  Item item;
  int tile = 0;
  Item single;  // the items before this one are computed by single blocks
  bool shared = false;
  const int splits;  // blocks of a cluster
  static_assert(most_splits == 1 || multicast == 1 || most_splits == multicast, "all blocks of a cluster split K");

  JITGEN_DEVICE TileWalk(Item items, int splits)
      : item(blockIdx.x / multicast), single(items), splits(most_splits > 1 ? splits : 1) {
    if constexpr (most_splits > 1) {
      const int clusters = int(gridDim.x) / splits;
      const int left = int(items % (int(gridDim.x) / multicast));
      if (left * multicast <= clusters * (splits - 1)) single = items - left;
      begin_split();
    }
  }
  // Whether a cluster's blocks split the K of this piece.
  JITGEN_DEVICE bool split() const { return most_splits > 1 && shared; }
  JITGEN_DEVICE void next() {
    if (split()) {
      place(number() + int(gridDim.x) / splits);
    } else {
      item += int(gridDim.x) / multicast;
      if constexpr (most_splits > 1) begin_split();
    }
  }
  JITGEN_DEVICE void begin_split() {
    if (item < single) return;
    shared = true;
    place(single * multicast + int(blockIdx.x) / splits);
  }
  // Whether this block has another piece after this one, of its own or of its cluster.
  JITGEN_DEVICE bool followed(Item items) const {
    TileWalk after = *this;
    after.next();
    return after.item < items;
  }
  JITGEN_DEVICE Item number() const { return item * multicast + tile; }
  JITGEN_DEVICE void place(Item number) { item = number / multicast, tile = int(number % multicast); }
};

// What the mainloops exchange: two numbers that are neighbours, and the bits of a float as a sum.
JITGEN_DEVICE void store_two(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
JITGEN_DEVICE void store_two(int32_t* to, int32_t a, int32_t b) { *reinterpret_cast<int2*>(to) = make_int2(a, b); }
template <class Sum>
JITGEN_DEVICE Sum sum_of_bits(float bits) {
  if constexpr (is_floating<Sum>) {
    return bits;
  } else {
    return __float_as_int(bits);
  }
}

// The sum of eight numbers of each of the first `splits` blocks of the cluster, by rank. They are at `at` in each block's
// shared memory, aligned to 16 bytes. Four blocks' are loaded at a time: more would take registers that a mainloop has
// not left.
template <int most_splits, class Sum>
JITGEN_DEVICE void add_of_cluster(Sum (&sums)[8], uint32_t at, int splits) {
  constexpr auto number = sum_of_bits<Sum>;
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j] = Sum(0);
#pragma unroll
  for (int from = 0; from < most_splits; from += 4) {
    float4 low[4], high[4];
#pragma unroll
    for (int r = 0; r < 4 && from + r < most_splits; ++r) {
      if (from + r >= splits) break;
      low[r] = load_remote(at, from + r);
      high[r] = load_remote(at + 16, from + r);
    }
#pragma unroll
    for (int r = 0; r < 4 && from + r < most_splits; ++r) {
      if (from + r >= splits) break;
      sums[0] += number(low[r].x), sums[1] += number(low[r].y), sums[2] += number(low[r].z), sums[3] += number(low[r].w);
      sums[4] += number(high[r].x), sums[5] += number(high[r].y), sums[6] += number(high[r].z), sums[7] += number(high[r].w);
    }
  }
}

// This block's share of the runs of eight columns of a tile whose K is split among the blocks of a cluster: calls
// `run(m, n, sums)` for each, with the sums of all blocks. They have left theirs at `base` of their shared memory, as
// [contraction][height][pitch]; the tile has `rows` rows, which exist, of `width` columns.
template <int contractions, int height, int width, int pitch, int most_splits, int threads, class Sum, class Run>
JITGEN_DEVICE void add_share(uint32_t base, int rows, int rank, int splits, const Run& run) {
  const int runs = rows * (width / 8), last = runs * (rank + 1) / splits;
#pragma unroll 1
  for (int i = runs * rank / splits + threadIdx.x; i < last; i += threads) {
    const int m = i / (width / 8), n = i % (width / 8) * 8;
    Sum sums[contractions][8];
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
      add_of_cluster<most_splits>(sums[c], base + ((c * height + m) * pitch + n) * 4, splits);
    }
    run(m, n, sums);
  }
}

// all[region]. It is selected by comparisons, because an array of parameters that is indexed has to be in local memory.
template <class Region, int regions>
JITGEN_DEVICE Region region_of(const Region (&all)[regions], int region) {
  Region chosen = all[0];
#pragma unroll
  for (int r = 1; r < regions; ++r) {
    if (region == r) chosen = all[r];
  }
  return chosen;
}
template <class Region, int regions>
JITGEN_DEVICE int columns_of(const Region (&all)[regions], int region) {
  int columns = all[0].columns;
#pragma unroll
  for (int r = 1; r < regions; ++r) {
    if (region == r) columns = all[r].columns;
  }
  return columns;
}

// The current stage, and the parity of its barriers' current phase.
template <int stages>
struct StageRing {
  int stage = 0;
  uint32_t phase = 0;
  JITGEN_DEVICE void next() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  JITGEN_DEVICE void skip(int count) {
    stage += count;
    phase ^= stage / stages & 1;
    stage %= stages;
  }
};

// The chunks of K of an item: all, or those of its range. Each range has an item for each of `tiles` tiles, one range
// after another.
template <int ranges>
struct ChunkRanges {
  int chunks, tiles;
  JITGEN_DEVICE int first(int item) const { return ranges > 1 ? chunks * (item / tiles) / ranges : 0; }
  JITGEN_DEVICE int last(int item) const { return ranges > 1 ? chunks * (item / tiles + 1) / ranges : chunks; }
};

// The order of two warpgroups that compute tiles in turn. One begins to read the ring only when the other has waited for
// the last stage of the tile before: a wait for a barrier's phase is right only during that phase and the one before it.
template <bool pingpong>
struct TileOrder {
  static constexpr int first_barrier = 3;
  // Before a tile: `follows` says whether another tile of this block comes before it.
  static JITGEN_DEVICE void wait(bool follows) {
    if constexpr (pingpong) {
      if (follows) group_barrier<256>(first_barrier + threadIdx.x / 128, "turn of a warpgroup");
    }
  }
  // When the last stage of a tile has come, if another tile of this block follows.
  static JITGEN_DEVICE void pass(bool followed) {
    if constexpr (pingpong) {
      if (followed) group_arrive<256>(first_barrier + 1 - threadIdx.x / 128);
    }
  }
  // Over the other warpgroup's tile and its stages.
  template <class Walk, class Ring>
  static JITGEN_DEVICE void skip(Walk& walk, Ring& ring, int chunks) {
    if constexpr (pingpong) {
      walk.next();
      ring.skip(chunks);
    }
  }
};

// Loads eight sums from shared memory, four from each address; both are aligned to 16 bytes.
JITGEN_DEVICE void gather(float (&sums)[8], const float* first, const float* second) {
  const float4 low = *reinterpret_cast<const float4*>(first), high = *reinterpret_cast<const float4*>(second);
  sums[0] = low.x, sums[1] = low.y, sums[2] = low.z, sums[3] = low.w;
  sums[4] = high.x, sums[5] = high.y, sums[6] = high.z, sums[7] = high.w;
}
JITGEN_DEVICE void gather(int32_t (&sums)[8], const int32_t* first, const int32_t* second) {
  const int4 low = *reinterpret_cast<const int4*>(first), high = *reinterpret_cast<const int4*>(second);
  sums[0] = low.x, sums[1] = low.y, sums[2] = low.z, sums[3] = low.w;
  sums[4] = high.x, sums[5] = high.y, sums[6] = high.z, sums[7] = high.w;
}

// Loads four sums from shared memory.
JITGEN_DEVICE void gather(float (&sums)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
}
JITGEN_DEVICE void gather(int32_t (&sums)[4], const int32_t* from) {
  const int4 four = *reinterpret_cast<const int4*>(from);
  sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
}

// Where a run of columns begins, and how many of them exist. A run outside of the result has a place inside, and is not
// `stored`.
struct RunPlace {
  int m, n, live;
  bool stored;
};
// The place of the run of `width` columns from `n` on of row `m`. `inside` is a column of the tile that exists.
template <int width>
JITGEN_DEVICE RunPlace run_place(int m, int rows, int below, int n, int inside, int columns) {
  const int live = smaller(width, columns - n);
  return {below + smaller(m, rows - 1), live > 0 ? n : inside, live > 0 ? live : smaller(width, columns - inside),
          m < rows && live > 0};
}
// Calls the epilogue of one region for `count` runs of columns of one tile. All results are computed before the first is
// stored, so that what they read besides the sums is loaded at once.
template <class Epilogue, class Sum, int count, int contractions, int width>
JITGEN_DEVICE void run_epilogues(
    const Epilogue& epilogue, const RunPlace (&places)[count], const Sum (&sums)[count][contractions][width]) {
  typename Epilogue::template Results<width> results[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const RunPlace at = places[i];
    results[i] = epilogue.template results<width>(at.m, at.n, sums[i], at.live);
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const RunPlace at = places[i];
    if (at.stored) epilogue.template store<width>(at.m, at.n, results[i], at.live);
  }
}

// Whether an epilogue reads matrices, and says so by prefetch<W>(m, n, live), of W columns of a row.
template <class Epilogue, class = void>
struct ReadsMatrices {
  static constexpr bool value = false;
};
template <class Epilogue>
struct ReadsMatrices<Epilogue, decltype(void(Epilogue::reads_matrices))> {
  static constexpr bool value = true;
};
// Called by a warp that has started the last copies of a tile: brings what the epilogue reads of the tile's rows
// first .. end and of its `width` columns from `column` on, of which those below `columns` exist, to the second-level
// cache. Otherwise the epilogue waits for memory once for each few rows that it has staged.
template <int width, class Epilogue>
JITGEN_DEVICE void prefetch_for_epilogue(const Epilogue& epilogue, int first, int end, int column, int columns) {
  if constexpr (ReadsMatrices<Epilogue>::value) {
    constexpr int run = 16, runs = width / run;
    __syncwarp();
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < (end - first) * runs; i += 32) {
      const int n = column + i % runs * run;
      if (n < columns) epilogue.template prefetch<run>(first + i / runs, n, smaller(run, columns - n));
    }
  }
}

template <bool several, class Epilogue, class Sum, int contractions, int width>
JITGEN_DEVICE void run_epilogue(
    const Epilogue& epilogue, int region, int m, int n, const Sum (&sums)[contractions][width], int live) {
  if constexpr (several) {
    epilogue.template run<width>(region, m, n, sums, live);
  } else {
    epilogue.template run<width>(m, n, sums, live);
  }
}

}  // namespace jitgen
