// Matmul of 16-bit floats, 8-bit floats and 8-bit integers on Hopper's wgmma, both operands from shared memory:
// y[m, n] = sum_k x[m, k] W[n, k]. Integers are summed in int32, floats in float32.
//
// A producer warp fills a ring of stages of 128 bytes along k by tensor copies. Consumer warpgroups run wgmma on it, each on its
// own rows or columns of the tile. Blocks are persistent, so that the first stages of a tile arrive during the epilogue
// of the tile before it. The blocks of a cluster compute tiles below each other and share the weight's tile, or tiles
// side by side and share x's; each copies a piece of it for all, which reduces reads of L2. (This is CUTLASS's
// cooperative warp-specialised kernel.)
// With `pingpong` a warpgroup computes a tile by itself, and multiplies while the other one stores the tile before. (This
// is CUTLASS's pingpong kernel.)
//
// How to call it, from an entry of Shape::threads threads, with Shape::bytes of dynamic shared memory:
//
//   struct Config : jitgen::DenseDefaults { ... };  // as gemm_wgmma_dense_shape.cuh explains
//   using Shape = jitgen::DenseShape<Config>;
//   extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
//   entry(const __grid_constant__ jitgen::TensorMap x, const __grid_constant__ jitgen::TensorMap w, ...) {
//     const jitgen::DenseRegion<Config::contractions> regions[] = {{{&w}, N}};
//     jitgen::gemm_wgmma_dense<Config>(x, M, K, regions, Epilogue{...});
//   }
//
// What follows says x and the weight as they are where nothing is swapped; only `shares_x` is always of x itself.
// Tensor maps, outermost size first, 128-byte swizzle: x[M, K], box [64 * down, depth]; a weight [N, K], box [columns,
// depth], of which one that is shared is divided by its blocks, in multiples of 8; a transposed weight [K, N] or x [K, M],
// box [64, 64]. `depth` k's are 128 bytes. So each matrix is aligned to 16 bytes, has stride 1 along its
// rows and a row stride that is a multiple of 16 bytes.
// Batches: with the last argument, `batch`, each operand is a batch of matrices. Its tensor map has four dimensions,
// [outer, inner, rows, columns], and boxes of one matrix; a dimension that an operand does not have has size 1. A batch
// has one region, and epilogue.at(matrix) is the epilogue of one matrix. With RowGroups for a batch the rows of one x
// belong to groups, and a tile has those of one group; the epilogue is that of all rows.
// Cluster: {multicast * other_multicast, 1, 1}, or with most_splits any number of blocks up to it, as the launch says. Grid: along x only,
// a multiple of the cluster. Any such grid is correct; the best has as many blocks as are resident at once, or tiles
// times the cluster if those are fewer. Which tiles are split, `TileWalk` says.
// The epilogue of several regions is called as run<Config::run>(region, m, n, acc, live), that of one by its two parts,
// results<..>(m, n, acc, live) and store<..>(m, n, results, live). Where K is split it is run<8>.
#pragma once
//
// A kernel is a DenseBlock, to which each of these headers adds what its threads do with it: _copies, _products, _results and
// _quantised.
#pragma once

#include "jitgen/gemm_wgmma_dense_quantised.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseKernel : DenseQuantised<Config, Epilogue, Batch, Scales> {
  using Base = DenseQuantised<Config, Epilogue, Batch, Scales>;
  using typename Base::Order, typename Base::Ring, typename Base::Shape, typename Base::Sums;
  using Base::batch, Base::band_columns, Base::chunks, Base::contractions, Base::epilogue, Base::place, Base::rank;
  using Base::regions, Base::row_tiles, Base::rows, Base::splits, Base::warp;
  using Base::clear, Base::consume, Base::finish, Base::finish_in_blocks, Base::finish_in_registers, Base::finish_split;
  using Base::leave, Base::produce, Base::produce_scales;

  template <class Own>
  JITGEN_DEVICE void finish_tile(
      const Own& epilogue, const TilePlace& tile, Sums& acc, bool split, int end, bool followed) const {
    const int columns = columns_of(regions, tile.region);
    if (!split) {
      if constexpr (!IsInBlocks<Own>::value) {
        return finish(epilogue, tile, acc, columns, end);
      } else if (Shape::pingpong || followed) {
        if constexpr (contractions == 1) return finish_in_blocks(epilogue, tile, acc, columns, end);
        else return finish_in_registers(epilogue, tile, acc, columns, end);
      } else {  // nothing is copied to the stages any more: all threads have a share of the rows there are
        static_assert(contractions * Shape::rows * Shape::sum_pitch * 4 <= Shape::staging_at, "sums fit there");
        leave(acc);
        group_barrier<Shape::consumers>(1, "sums of the tile");
        return this->template finish_split_in_blocks<true>(epilogue, tile, columns);
      }
    }
    leave(acc);
    cluster_sync("sums of the cluster's blocks");
    if constexpr (IsInBlocks<Own>::value) this->template finish_split_in_blocks<false>(epilogue, tile, columns);
    else finish_split(epilogue, tile, columns);
    proxy_fence();
    __syncwarp();
    cluster_sync("sums of the cluster's blocks");
  }

  JITGEN_DEVICE void work() const {
    const int column_tiles = column_tiles_of<band_columns>(regions);
    const int tiles = row_tiles * column_tiles;
    using Item = decltype(batch.matrices());
    const Item items = tiles * batch.matrices() * Shape::ranges;
    const int from = chunks * rank / splits, to = chunks * (rank + 1) / splits;  // this block's chunks of a split tile
    const ChunkRanges<Shape::ranges> range{chunks, tiles};
    Ring ring;
    TileWalk<Config::most_splits, Shape::cluster, Item> walk(items, splits);
    if (warp >= Shape::consumers / 32) {
      registers_deal<Shape::warpgroups, Config::resident, true>();
      for (; walk.item < items; walk.next()) {
        const int batch_number = Batch::several ? int(walk.item / tiles) : 0;
        const int item = int(walk.item - Item(batch_number) * tiles);
        TilePlace tile = place(item, walk.split() ? walk.tile : rank, column_tiles);
        const int matrix = matrix_of<Shape::rows, Shape::weight_shares>(batch, tile, batch_number, rows).number;
        const int begin = walk.split() ? from : range.first(item), end = walk.split() ? to : range.last(item);
        if (threadIdx.x == Shape::consumers) {
          produce(matrix, tile, begin, end, walk.split(), ring);
        }
        if (!Batch::several && Shape::ranges == 1 && warp == Shape::consumers / 32 && begin == 0) {
          const int columns = columns_of(regions, tile.region);
          if constexpr (Shape::swapped) {
            const int end = smaller(tile.column + Config::columns, columns);
            prefetch_for_epilogue<Shape::rows>(epilogue, tile.column, end, tile.row, rows);
          } else {
            const int end = smaller(tile.row + Shape::rows, rows);
            prefetch_for_epilogue<Config::columns>(epilogue, tile.row, end, tile.column, columns);
          }
        }
        if constexpr (Scales::any) {
          if (threadIdx.x / 32 == Shape::consumers / 32 + 1) {
            produce_scales(matrix, tile, begin, end, ring);
          }
        }
        if (walk.split()) {
          __syncwarp();
          cluster_sync("sums of the cluster's blocks");
          cluster_sync("sums of the cluster's blocks");
        }
      }
      __syncwarp();
    } else {
      registers_deal<Shape::warpgroups, Config::resident, false>();
      const Item first = walk.item;
      if (warp >= 4) Order::skip(walk, ring, chunks);
      for (; walk.item < items; walk.next()) {
        const int batch_number = Batch::several ? int(walk.item / tiles) : 0;
        const int item = int(walk.item - Item(batch_number) * tiles);
        TilePlace tile = place(item, walk.split() ? walk.tile : rank, column_tiles);
        const MatrixRows matrix = matrix_of<Shape::rows, Shape::weight_shares>(batch, tile, batch_number, rows);
        const bool follows = walk.item != first, followed = walk.followed(items);
        Sums acc;
        const int begin = walk.split() ? from : range.first(item), end = walk.split() ? to : range.last(item);
        consume(acc, tile, begin, end, walk.split(), ring, follows, followed, matrix);
        if constexpr (Batch::grouped) {
          if (matrix.number == batch.groups) clear(acc);  // whatever x has there
          if constexpr (Batch::scaled) {
            finish_tile(epilogue.at(smaller(matrix.number, batch.groups - 1)), tile, acc, walk.split(), matrix.end, followed);
          } else {
            finish_tile(epilogue, tile, acc, walk.split(), matrix.end, followed);
          }
        } else if constexpr (Batch::several) {
          finish_tile(epilogue.at(matrix.number), tile, acc, walk.split(), rows, followed);
        } else {
          finish_tile(epilogue, tile, acc, walk.split(), rows, followed);
        }
        Order::skip(walk, ring, chunks);
      }
      __syncwarp();
    }
    if constexpr (Shape::cluster > 1) cluster_sync("the end of the cluster's blocks");  // no block ends while another may write to it
  }
};

template <class Config, class Epilogue, class Batch, class Scales>
JITGEN_DEVICE void run_wgmma_dense(
    const TensorMap& x, int rows, int depth, const DenseRegion<Config::contractions> (&regions)[Config::regions],
    const Epilogue& epilogue, const Batch& batch, const Scales& scales) {
  using Shape = DenseShape<Config>;
  extern __shared__ __align__(1024) uint8_t gemm_memory[];
  constexpr int band = Shape::rows * Shape::weight_shares;
  DenseKernel<Config, Epilogue, Batch, Scales> kernel{
      x, regions, epilogue, rows, (depth + Shape::depth - 1) / Shape::depth, (rows + band - 1) / band,
      Config::most_splits > 1 || Shape::cluster > 1 ? cluster_rank() : 0,
      Config::most_splits > 1 ? cluster_blocks() : 1, gemm_memory, shared_address(gemm_memory), own_warp(), batch, scales};
  waits_begin<(Config::most_splits > 1 || Shape::cluster > 1)>();
  if (threadIdx.x == 0) {
    prefetch_map(x);
#pragma unroll
    for (int c = 0; c < Config::contractions; ++c) prefetch_map(*regions[0].weights[c]);
    for (int stage = 0; stage < Config::stages; ++stage) {
      barrier_init(kernel.full(stage), 1 + (Scales::any ? 32 : 0));
      barrier_init(kernel.empty(stage), Shape::tile_warps * (Shape::x_shares + Shape::weight_shares - 1));
    }
    barrier_init_fence();
  }
  if constexpr (Shape::cluster > 1) {
    cluster_sync("the start of the cluster's blocks");
  } else {
    __syncthreads();
  }
  // All blocks of this kernel are resident already, so blocks of the next one cannot delay them.
  next_kernel_may_start();
  previous_kernel_wait();
  if constexpr (Batch::grouped) {
    kernel.row_tiles = batch.template tiles<band>(rows);
  }
  kernel.work();
}

template <class Config, class Epilogue, class Batch = OneMatrix, class Scales = NoScales>
JITGEN_DEVICE void gemm_wgmma_dense(
    const TensorMap& x, int rows, int depth, const DenseRegion<Config::contractions> (&regions)[Config::regions],
    const Epilogue& epilogue, const Batch& batch = Batch(), const Scales& scales = Scales()) {
  if constexpr (DenseShape<Config>::swapped) {
    static_assert(!Batch::grouped && !Scales::any, "one product of a matrix or of each pair of a batch is swapped");
    const DenseRegion<Config::contractions> swapped[] = {{{&x}, rows}};
    run_wgmma_dense<Config>(*regions[0].weights[0], regions[0].columns, depth, swapped, epilogue, batch.swapped(), scales);
  } else {
    run_wgmma_dense<Config>(x, rows, depth, regions, epilogue, batch, scales);
  }
}

}  // namespace jitgen
