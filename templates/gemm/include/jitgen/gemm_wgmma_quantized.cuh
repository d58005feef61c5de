// Quantised weights times many tokens on Hopper's wgmma: y[m, n] = sum_k x[m, k] W[n, k], the weight being operand A.
//
// A warpgroup multiplies 64 rows of the weight (output columns) at a time, as wgmma's operand A from registers. The
// codes of the "mma" layout are in the order of its fragments, so they are dequantised in registers and never stored as
// floats. x is operand B, in shared memory, where tensor copies bring it. One warpgroup only copies. The consumers
// dequantise one k16 step while the tensor cores work on the step before. (Weights as A from registers are as in Marlin
// and Machete.)
//
// How to call it, from an entry of Shape::threads threads, with Shape::bytes of dynamic shared memory:
//
//   struct Config : jitgen::QuantizedDefaults {  // jitgen/families/gemm/wgmma_tiles.py chooses
//     static constexpr int tokens = 128;     // tokens of a tile: 16, 32, 64, 96, 128, 192, 256; wgmma's n
//     static constexpr int warpgroups = 2;   // consumer warpgroups
//     static constexpr int blocks = 2;       // blocks of 64 weight rows per warpgroup; blocks * tokens <= 256
//     static constexpr int contractions = 1; // weights that share x and have equal N; divides blocks
//     static constexpr int regions = 1;      // weights of different N, each with its own outputs
//     static constexpr int stages = 8;       // stages of the ring, of span chunks of 64 k's each
//     static constexpr int span = 1;         // 1 or 2 (less work per k)
//     static constexpr int steps = 1;        // k16 steps in a group of wgmmas: 1, or 2, with more registers
//     static constexpr int most_splits = 1;  // the most blocks of a cluster that split K: 1 to 8; a launch may have fewer
//     static constexpr int multicast = 1;    // blocks of a cluster that share x's tile: 1, 2, 4; not with most_splits
//     static constexpr bool trimmed = false; // whether x's box has no more rows than x; not with multicast. Rows outside
//                                            // a matrix, which become zeros, take the copy engine longer
//     static constexpr int stagger = 0;      // chunks by which a tile begins later along k than its neighbour
//     static constexpr int ranges = 1;       // ranges of K whose sums the epilogue gets separately, those of range r as
//                                            // rows r * M ..; above 1 with multicast = most_splits = 1
//     static constexpr int raster = 16;      // row tiles walked before the next column tile
//     static constexpr int resident = 1;     // blocks that a multiprocessor holds at once
//     static constexpr bool in_pairs = true; // whether the one result has 16 bits and is computed as the sums lie in
//                                            // registers (gemm_wgmma_results.cuh); false by default
//     static constexpr int narrow = 0;       // tokens of a tile whose group has no more rows; 0, the default, for none
//   };
//   using Shape = jitgen::QuantizedShape<Config, Weight>;                          // Weight: a QuantWeight
//   extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
//   entry(const __grid_constant__ jitgen::TensorMap x, const __grid_constant__ jitgen::TensorMap codes, ...) {
//     const jitgen::QuantizedRegion<Weight, Config::contractions> regions[] = {{{Weight{...}}, {&codes}, N}, ...};
//     jitgen::gemm_wgmma_quantized<Config, Weight>(x, M, K, regions, Epilogue{...});
//   }
//
// x may be of int8, with codes of 4 bits and a span of 2 (gemm_wgmma_codes.cuh); then its box has 128 k's.
// Tensor maps, outermost size first: x[M, K], box [tokens / multicast, 64], 128-byte swizzle; codes as 32-bit words,
// [tiles of 16 rows, chunks of 64 k's * 32 * bits], box [Shape::columns / 16, Shape::box_bytes / 4], no swizzle. So x has
// stride 1 along k, is aligned to 16 bytes, and its row stride is a multiple of 16 bytes. Scales and zero-points are
// aligned to 16 bytes.
// Cluster: {multicast, 1, 1}, or with most_splits any number of blocks up to it, as the launch says. Grid: along x only,
// a multiple of the cluster. Any such grid is correct; the best has as many blocks as are resident at once, or tiles
// times the cluster if those are fewer.
// Where a cluster splits K: as long as there is a tile for each block of the grid, each computes one of its own. The
// tiles that are then left, which would leave some blocks idle, are computed by whole clusters, whose blocks share K.
// Groups of rows: with RowGroups for the last argument, `batch`, the weight has the rows of a matrix for each group, one
// matrix after another, in blocks of 16; its codes have one tensor map. There is one region, and each tile is of one group.
// The last tile of a group rarely has all its rows: up to `narrow` of them are multiplied by no more. (All are copied.)
// The epilogue of several regions is called as run<8>(region, m, n, acc, live), that of one by its two parts,
// results<8>(m, n, acc, live) and store<8>(m, n, results, live). Where K is split it is run<8>.
#pragma once

#include "jitgen/gemm_wgmma_batch.cuh"
#include "jitgen/gemm_wgmma_finish.cuh"
#include "jitgen/gemm_wgmma_stage.cuh"

namespace jitgen {

// A Config whose wgmmas start `steps_` at a time.
template <class Config, int steps_>
struct PartOf : Config {
  static constexpr int steps = steps_;
};

template <class Config, class Weight, class Epilogue, class Batch>
struct QuantizedKernel {
  using Shape = QuantizedShape<Config, Weight>;
  using Region = QuantizedRegion<Weight, Config::contractions>;
  using Multiply = Wgmma<typename Weight::Element, Config::tokens>;
  using Ring = StageRing<Config::stages>;
  using Stage = QuantizedStage<Config, Weight>;
  template <int tokens>
  using Finish = QuantizedFinish<Config, Weight, Epilogue, tokens>;
  template <int tokens>
  using SumsOf = typename Finish<tokens>::Sums;
  using Sums = SumsOf<Config::tokens>;
  static constexpr int blocks = Config::blocks;
  static constexpr int contractions = Config::contractions;
  static constexpr int contraction_tiles = Shape::contraction_tiles;
  static constexpr int parts = Shape::parts;
  static constexpr int span = Shape::span;
  static constexpr int band = Shape::columns * Config::multicast;  // columns of a cluster whose blocks share x

  const TensorMap& x;
  const Region (&regions)[Config::regions];
  const Epilogue& epilogue;
  const int rows, chunks;  // chunks: of the length of a stage
  int row_tiles;
  const int groups;  // groups of a row of the weight
  const int rank;    // this block's, in the cluster
  const int splits;  // blocks of the cluster, if they split K; else 1
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`
  const Batch& batch;

  JITGEN_DEVICE uint32_t full(int stage) const { return base + Shape::barriers_at + stage * 16; }
  JITGEN_DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }

  // The tiles of 16 rows of a weight that are before matrix number `matrix`. Rows of no group read nothing.
  JITGEN_DEVICE int tiles_before(int matrix, int contraction) const {
    if constexpr (Batch::grouped) return matrix * batch.weights[contraction].inner;
    return 0;
  }
  // The region's weights, from those of one matrix on.
  JITGEN_DEVICE Region weights_at(const TilePlace& tile, int matrix) const {
    Region region = region_of(regions, tile.region);
    if constexpr (Batch::grouped) {
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const int64_t rows_before = int64_t(tiles_before(matrix, c)) * 16;
        region.weights[c].scales += rows_before * groups;
        if constexpr (Weight::zero_points) region.weights[c].zeros += rows_before * groups;
        if constexpr (Weight::factored) region.weights[c].factors += rows_before;
      }
    }
    return region;
  }
  JITGEN_DEVICE bool has_weights(int matrix) const {
    if constexpr (Batch::grouped) return matrix < batch.groups;
    return true;
  }

  JITGEN_DEVICE TilePlace place(int item, int column_tiles) const {
    const int tiles = row_tiles * column_tiles;
    const int inside = Shape::ranges > 1 ? item % tiles : item;
    TilePlace tile = place_in<Config::raster, band>(inside, row_tiles, column_tiles, regions);
    const int column = Config::multicast > 1 ? tile.column * Config::multicast + rank : tile.column;
    const int below = Shape::ranges > 1 ? item / tiles * rows : 0;
    return {tile.region, tile.row * height_of<Config::tokens, Batch>, column * Shape::columns, below};
  }
  // The chunk at which a tile begins along k. It differs between tiles, so that blocks that copy at the same time use
  // different memory channels.
  JITGEN_DEVICE int begin(TilePlace tile, int first, int last) const {
    if constexpr (Config::stagger == 0) return first;
    return first < last ? first + tile.column / Shape::columns * Config::stagger % (last - first) : first;
  }

  // ------------------------------------------------------------------------------------------------------- producer

  // Starts the copy of a chunk of x into a stage.
  JITGEN_DEVICE void copy_x(const TilePlace& tile, int chunk, int stage) const {
#pragma unroll
    for (int i = 0; i < Shape::boxes; ++i) {
      const uint32_t to = base + stage * Shape::x_bytes + i * (Config::tokens * 128);
      const int column = (chunk * Shape::boxes + i) * (128 / Shape::item);
      if constexpr (Config::multicast > 1) {
        constexpr int share = Config::tokens / Config::multicast, all = (1 << Config::multicast) - 1;
        copy_box_multicast(to + rank * share * 128, x, column, tile.row + rank * share, full(stage), all);
      } else {
        copy_box(to, x, column, tile.row, full(stage));
      }
    }
  }
  // Starts the copy of a chunk of all contractions' codes into a stage.
  JITGEN_DEVICE void copy_codes(const TilePlace& tile, const Region& region, int matrix, int chunk, int stage) const {
    const uint64_t policy = row_tiles == 1 ? evict_first : keep_normal;
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
      constexpr int words = Shape::box_bytes / 4, share = Shape::contraction_tiles * Shape::box_bytes;
      const uint32_t to = base + Shape::codes_at + stage * Shape::code_bytes + c * share;
      const int at = tiles_before(matrix, c) + tile.column / 16;
#pragma unroll
      for (int i = 0; i < Shape::code_boxes; ++i) {
        const int column = (chunk * Shape::code_boxes + i) * words;
        copy_box(to + i * (contractions * share), *region.codes[c], column, at, full(stage), policy);
      }
    }
  }

  // Called by two warps. A thread of the first starts the copies of x and the codes; the second copies scales and
  // zero-points. `early`: whether the kernel ahead may still compute x, so that this is the block's first tile. Its
  // first codes, which no kernel writes, are asked for before x can be.
  JITGEN_DEVICE void produce(const TilePlace& tile, int matrix, int first, int last, Ring& ring, bool early) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Region region = weights_at(tile, matrix);
    int chunk = begin(tile, first, last);
    const auto after = [&](int number) { return number + 1 == last ? first : number + 1; };
    if (warp == 0 && lane == 0) {
      const int copied = Config::trimmed ? smaller(rows, Config::tokens) : Config::tokens;
      const int bytes = copied * (128 * Shape::boxes) + Shape::code_bytes;
      const int asked = early ? smaller(last - first, Config::stages) : 0;
      int ahead = chunk;
#pragma unroll 1
      for (int stage = 0; stage < asked; ++stage, ahead = after(ahead)) {
        barrier_arrive_expect(full(stage), bytes);
        copy_codes(tile, region, matrix, ahead, stage);
      }
      if (early) previous_kernel_wait();
#pragma unroll 1
      for (int number = 0; number < last - first; ++number, ring.next(), chunk = after(chunk)) {
        if (number >= asked) {
          barrier_wait_in_place(empty(ring.stage), ring.phase ^ 1, "empty");
          barrier_arrive_expect(full(ring.stage), bytes);
        }
        copy_x(tile, chunk, ring.stage);
        if (number >= asked) copy_codes(tile, region, matrix, chunk, ring.stage);
      }
    } else if (Shape::side_bytes > 0 && warp == 1) {
      const int first_tile = tile.column / 16;
      const int live = smaller(contraction_tiles, (region.columns + 15) / 16 - first_tile);
#pragma unroll 1
      for (int left = last - first; left > 0; --left, ring.next(), chunk = after(chunk)) {
        const int stage = ring.stage;
        barrier_wait_in_place(empty(stage), ring.phase ^ 1, "empty");
        copy_side(region, first_tile, live, chunk, base + Shape::side_at + stage * Shape::side_bytes);
        barrier_arrive_on_copies(full(stage));
      }
    }
    if (!Batch::grouped && Shape::ranges == 1 && warp == 0 && first == 0) {
      const int end = smaller(tile.row + Config::tokens, rows);
      prefetch_for_epilogue<Shape::columns>(epilogue, tile.row, end, tile.column, region.columns);
    }
    __syncwarp();
  }

  static JITGEN_DEVICE Weight weight_of(const Region& region, int contraction) {
    Weight weight = region.weights[0];
#pragma unroll
    for (int c = 1; c < contractions; ++c) {
      if (contraction == c) weight = region.weights[c];
    }
    return weight;
  }

  // Copies a chunk's scales and zero-points in pieces of 16 bytes. Both are [part][tile][16 rows].
  JITGEN_DEVICE void copy_side(const Region& region, int first_tile, int live, int chunk, uint32_t to) const {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int k = chunk * (64 * span) + part * Shape::part;
      const int group = Weight::group == 0 ? 0 : smaller(k / (Weight::group ? Weight::group : 1), groups - 1);
      if constexpr (Shape::group_scales) {
        copy_numbers<sizeof(typename Weight::Scale)>(
            region, first_tile, live, group, to, part, [](const Weight& weight) { return weight.scales; });
      }
      if constexpr (Weight::zero_points) {
        copy_numbers<sizeof(typename Weight::Zero)>(
            region, first_tile, live, group, to + Shape::scale_bytes, part,
            [](const Weight& weight) { return weight.zeros; });
      }
    }
  }
  // Copies 16 numbers, of `pieces` bytes each, of every tile: those of part `part` to its place in the area at `to`.
  template <int pieces, class Numbers>
  JITGEN_DEVICE void copy_numbers(const Region& region, int first_tile, int live, int group, uint32_t to, int part,
                                  const Numbers& numbers) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::tiles * pieces; i += 32) {
      const int tile = (i + lane) / pieces, piece = lane % pieces;
      const int in_contraction = tile % contraction_tiles;
      if (tile < Shape::tiles && in_contraction < live) {
        const Weight weight = weight_of(region, tile / contraction_tiles);
        const int64_t at = (int64_t(first_tile + in_contraction) * groups + group) * 16;
        copy_async<16>(to + (part * Shape::tiles * pieces + i + lane) * 16,
                       reinterpret_cast<const uint8_t*>(numbers(weight) + at) + piece * 16, 16);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------- consumers

  JITGEN_DEVICE void release(int stage) const {  // by each consumer warp, for every block that writes to the stage
    warp_arrive<Config::multicast>(empty(stage));
  }

  template <int tokens>
  JITGEN_DEVICE void consume(SumsOf<tokens>& acc, int first, int last, Ring& ring) const {
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
#pragma unroll
      for (int i = 0; i < tokens / 2; ++i) acc[b][i] = 0.0f;
    }
    if (first == last) return;
    if constexpr (Shape::item == 1) {
      add_codes(acc, first, last, ring);
    } else {
      add_floats<tokens>(acc, first, last, ring);
    }
  }

  // Products of codes by codes. The int32 sums of a group are exact; times its scales they are added up in float32. So are
  // those of `exact_chunks` where all of K has one scale: beyond 131,071 products of codes of -128, int32 overflows.
  // Warpgroups start products as they come: in an order, or with a tile's tokens in two halves of which one is added while
  // the other one is multiplied, tiles of 128 to 192 tokens took 5 to 12 % longer (12 products on an H200).
  JITGEN_DEVICE void add_codes(Sums& acc, int first, int last, Ring& ring) const {
    using Part = QuantizedStage<PartOf<Config, 64 * span / parts / Shape::step_k>, Weight>;  // whose `steps` are a part's
    constexpr int steps = 64 * span / parts / Shape::step_k;
    constexpr int exact_chunks = Shape::group_scales ? 1 : 65536 / (64 * span);
    const typename Part::Lane lane;
    typename Part::Fetched fetched;
    typename Part::Held held;
    typename Part::Fragments fragments;
    typename Multiply::Sum sums[blocks][Config::tokens / 2];
    barrier_wait_in_place(full(ring.stage), ring.phase, "full");
    Part::fetch(fetched, memory, lane, ring.stage);
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      const int stage = ring.stage;
      const uint64_t tokens = descriptor_k_major(base + stage * Shape::x_bytes);
      ring.next();
      held.take(fetched);
      const bool fresh = Shape::group_scales || (chunk - first) % exact_chunks == 0;
      if (!Shape::group_scales && fresh && chunk > first) add_exact(acc, sums);
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        Part::dequantise(fragments, held, part);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < steps; ++s) {
#pragma unroll
          for (int b = 0; b < blocks; ++b) {
            const int step = part * steps + s;
            const uint64_t at = tokens + step / 4 * (Config::tokens * 128 / 16) + step % 4 * 2;
            const int adds = s > 0 || !(fresh && (Shape::group_scales || part == 0));
            Multiply::registers(sums[b], fragments[s][b], at, adds);
          }
        }
        wgmma_commit();
        if (part == parts - 1 && chunk + 1 < last) {
          barrier_wait_in_place(full(ring.stage), ring.phase, "full");
          Part::fetch(fetched, memory, lane, ring.stage);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < blocks; ++b) wgmma_written(sums[b]);
        if (part == parts - 1) release(stage);
        if constexpr (Shape::group_scales) {
#pragma unroll
          for (int b = 0; b < blocks; ++b) {
            const float2 scale = held.decode[b][part].scale;
#pragma unroll
            for (int i = 0; i < Config::tokens / 2; ++i) {
              acc[b][i] = __fmaf_rn(float(sums[b][i]), i % 4 < 2 ? scale.x : scale.y, acc[b][i]);
            }
          }
        }
      }
    }
    if constexpr (!Shape::group_scales) add_exact(acc, sums);
  }
  template <class Exact>
  static JITGEN_DEVICE void add_exact(Sums& acc, const Exact& sums) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
#pragma unroll
      for (int i = 0; i < Config::tokens / 2; ++i) acc[b][i] += float(sums[b][i]);
    }
  }

  template <int tokens>
  JITGEN_DEVICE void add_floats(SumsOf<tokens>& acc, int first, int last, Ring& ring) const {
    using Multiply = Wgmma<typename Weight::Element, tokens>;
    constexpr int groups = 4 * span / Config::steps;  // groups of wgmmas in a stage
    // Whether a stage's codes are read when the last ones before it are decoded, into the same registers: a few
    // instructions less, which count where wgmmas are short. Tiles of up to 128 tokens take 0.955 to 1.012 of the time
    // (0.987 by the geometric mean of 27 products on an H200), larger ones 0.98 to 1.055.
    constexpr bool late = tokens <= 128;
    const typename Stage::Lane lane;
    typename Stage::Fetched fetched;
    typename Stage::Held held;
    typename Stage::Fragments fragments[2];
    barrier_wait_in_place(full(ring.stage), ring.phase, "full");
    Stage::fetch(fetched, memory, lane, ring.stage);
    held.take(fetched);
    Stage::dequantise(fragments[0], held, 0);
    int before = 0;
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      const int stage = ring.stage;
      const uint64_t x_at = descriptor_k_major(base + stage * Shape::x_bytes);
      ring.next();
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < Config::steps; ++s) {
#pragma unroll
          for (int b = 0; b < blocks; ++b) {
            const int step = group * Config::steps + s;
            const uint64_t at = x_at + step / 4 * (Config::tokens * 128 / 16) + step % 4 * 2;
            Multiply::registers(acc[b], fragments[group & 1][s][b], at, 1);
          }
        }
        wgmma_commit();
        if (group == groups - (late ? 1 : 2) && chunk + 1 < last) {
          barrier_wait_in_place(full(ring.stage), ring.phase, "full");
          Stage::fetch(fetched, memory, lane, ring.stage);
        }
        if (!late && group == groups - 1) held.take(fetched);
        wgmma_wait<1>();  // the previous group has read its fragments, whose registers the next one uses
        if (late && group == groups - 1) held.take(fetched);
        if (group == 0 && chunk > first) release(before);
        Stage::dequantise(fragments[(group + 1) & 1], held, (group + 1) % groups);
      }
      before = stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < blocks; ++b) wgmma_written(acc[b]);
    release(before);
  }

  // A tile of `tokens` tokens, or a narrow one where its group has no more rows. That has sums and an epilogue of its own:
  // with those of the other the compiler would wait for each product.
  template <int tokens>
  JITGEN_DEVICE void compute(
      const TilePlace& tile, const MatrixRows& matrix, int first, int last, bool split, Ring& ring) const {
    constexpr int narrow = Shape::narrow;
    if constexpr (narrow > 0 && tokens > narrow) {
      if (matrix.end - tile.row <= narrow) return compute<narrow>(tile, matrix, first, last, split, ring);
    }
    const bool any = has_weights(matrix.number);
    const Finish<tokens> end{epilogue, matrix.end, rank, splits, memory, base};
    SumsOf<tokens> acc;
    consume<tokens>(acc, first, any ? last : first, ring);
    const Region region = weights_at(tile, matrix.number);
    if constexpr (!Shape::group_scales || Weight::factored) {
      if (any) end.scale_rows(acc, tile, region);
    }
    if (split) {
      end.leave(acc);
      cluster_sync("sums of the cluster's blocks");
      end.finish_split(tile, region.columns);
      proxy_fence();
      __syncwarp();
      cluster_sync("sums of the cluster's blocks");
    } else {
      end.finish(tile, acc, region.columns);
    }
  }

  // ------------------------------------------------------------------------------------------------------------ all

  JITGEN_DEVICE void work() const {
    const int column_tiles = column_tiles_of<band>(regions);
    const int tiles = row_tiles * column_tiles, items = tiles * Shape::ranges;
    const int from = chunks * rank / splits, to = chunks * (rank + 1) / splits;  // this block's chunks of a split tile
    const ChunkRanges<Shape::ranges> range{chunks, tiles};
    Ring ring;
    TileWalk<Config::most_splits, Config::multicast> walk(items, splits);
    if (threadIdx.x >= Shape::consumers) {
      registers_deal<Config::warpgroups, Config::resident, true>();
      for (bool early = !Batch::grouped; walk.item < items; walk.next(), early = false) {
        TilePlace tile = place(walk.item, column_tiles);
        const int matrix = matrix_of<Config::tokens, 1>(batch, tile, 0, rows).number;
        const int begin = walk.split() ? from : range.first(walk.item), end = walk.split() ? to : range.last(walk.item);
        produce(tile, matrix, begin, has_weights(matrix) ? end : begin, ring, early);
        if (walk.split()) {
          __syncwarp();
          cluster_sync("sums of the cluster's blocks");
          cluster_sync("sums of the cluster's blocks");
        }
      }
      __syncwarp();
    } else {
      registers_deal<Config::warpgroups, Config::resident, false>();
      previous_kernel_wait();  // which may read what the epilogue writes, or compute what it reads
      for (; walk.item < items; walk.next()) {
        TilePlace tile = place(walk.item, column_tiles);
        const MatrixRows matrix = matrix_of<Config::tokens, 1>(batch, tile, 0, rows);
        const int begin = walk.split() ? from : range.first(walk.item), last = walk.split() ? to : range.last(walk.item);
        compute<Config::tokens>(tile, matrix, begin, last, walk.split(), ring);
      }
      __syncwarp();
    }
    if constexpr (Config::multicast > 1) cluster_sync("the end of the cluster's blocks");  // no block ends while another may write to it
  }
};

template <class Config, class Weight, class Epilogue, class Batch = OneMatrix>
JITGEN_DEVICE void gemm_wgmma_quantized(
    const TensorMap& x, int rows, int depth,
    const QuantizedRegion<Weight, Config::contractions> (&regions)[Config::regions], const Epilogue& epilogue,
    const Batch& batch = Batch()) {
  using Shape = QuantizedShape<Config, Weight>;
  extern __shared__ __align__(1024) uint8_t gemm_memory[];
  const int chunks = (depth + 64 * Shape::span - 1) / (64 * Shape::span);
  QuantizedKernel<Config, Weight, Epilogue, Batch> kernel{
      x, regions, epilogue, rows, chunks, (rows + Config::tokens - 1) / Config::tokens, Shape::groups(depth),
      Config::most_splits > 1 || Config::multicast > 1 ? cluster_rank() : 0,
      Config::most_splits > 1 ? cluster_blocks() : 1, gemm_memory, shared_address(gemm_memory), batch};
  waits_begin<(Config::most_splits > 1 || Config::multicast > 1)>();
  if (threadIdx.x == 0) {
    prefetch_map(x);
    for (int c = 0; c < Config::contractions; ++c) prefetch_map(*regions[0].codes[c]);
    for (int stage = 0; stage < Config::stages; ++stage) {
      barrier_init(kernel.full(stage), 1 + (Shape::side_bytes > 0 ? 32 : 0));
      barrier_init(kernel.empty(stage), Config::warpgroups * 4 * Config::multicast * warp_arrivals);
    }
    barrier_init_fence();
  }
  if constexpr (Config::multicast > 1) {
    cluster_sync("the start of the cluster's blocks");
  } else {
    __syncthreads();
  }
  // All blocks of this kernel are resident already, so blocks of the next one cannot delay them.
  next_kernel_may_start();
  if constexpr (Batch::grouped) {
    previous_kernel_wait();
    kernel.row_tiles = batch.template tiles<Config::tokens>(rows);
  }
  kernel.work();
}

}  // namespace jitgen
