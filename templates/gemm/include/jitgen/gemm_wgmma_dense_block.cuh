// What each thread of a block of the dense mainloop on wgmma (gemm_wgmma_dense.cuh) knows: the product, its place in the
// cluster, the stages in shared memory and their barriers, and the tiles.
#pragma once

#include "jitgen/gemm_wgmma_batch.cuh"
#include "jitgen/gemm_wgmma_dense_shape.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseBlock {
  using Shape = DenseShape<Config>;
  using Region = DenseRegion<Config::contractions>;
  using Multiply = Wgmma<typename Config::Element, Shape::width>;
  using Slice = Wgmma<typename Config::Element, Shape::slice>;
  using Ring = StageRing<Config::stages>;
  static constexpr int contractions = Config::contractions;
  static constexpr int blocks = Shape::blocks;
  using Product = typename Multiply::Sum;
  using Sum = Select<Scales::any, float, Product>;
  using Products = Product[contractions][blocks][Shape::width / 2];
  using Sums = Sum[contractions][blocks][Shape::width / 2];
  static constexpr bool promoted = Multiply::promoted || Scales::any;
  static_assert(Scales::any == Shape::scaled, "Config says whether there are scales");
  static_assert(!Scales::any || (Shape::depth == scale_block && scale_block % Shape::slice == 0 && Config::regions == 1 &&
                                 (!Batch::several || Batch::grouped)),
                "a stage has one block, and a slice's columns are of one");
  using Order = TileOrder<Shape::pingpong>;
  static constexpr int band = Shape::rows * Shape::weight_shares;         // rows of the tiles of a cluster
  static constexpr int band_columns = Config::columns * Shape::x_shares;  // and their columns
  static_assert(Shape::ranges == 1 || !Batch::several, "ranges of K of one product");
  static_assert(!Shape::x_transposed || !Batch::grouped, "groups of rows begin anywhere in a line of x");

  const TensorMap& x;
  const Region (&regions)[Config::regions];
  const Epilogue& epilogue;
  const int rows, chunks;
  int row_tiles;     // bands of tiles that share a weight's
  const int rank;    // this block's, in the cluster
  const int splits;  // blocks of the cluster, if they split K; else 1
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`
  const int warp;       // this thread's
  const Batch& batch;
  const Scales& scales;

  JITGEN_DEVICE uint32_t full(int stage) const { return base + Shape::barriers_at + stage * 16; }
  JITGEN_DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }
  JITGEN_DEVICE uint32_t x_at(int stage) const { return base + stage * Shape::stage_bytes; }
  JITGEN_DEVICE uint32_t weight_at(int stage, int contraction) const {
    return x_at(stage) + Shape::x_bytes + contraction * Shape::weight_bytes;
  }

  JITGEN_DEVICE uint32_t scales_at(int stage) const { return Shape::scales_at + stage * (Shape::stage_scales * 4); }

  // Where in its cluster's rectangle a block is. The blocks of a cluster that only splits K are all at its corner.
  static JITGEN_DEVICE int down_of(int block) {
    return Shape::weight_shares == 1 ? 0 : Shape::x_shares == 1 ? block : block % Shape::weight_shares;
  }
  static JITGEN_DEVICE int across_of(int block) { return Shape::x_shares == 1 ? 0 : block / Shape::weight_shares; }

  // `which`: of the tiles of an item, which a cluster's blocks share out.
  JITGEN_DEVICE TilePlace place(int item, int which, int column_tiles) const {
    const int tiles = row_tiles * column_tiles;
    const int inside = Shape::ranges > 1 ? item % tiles : item;
    TilePlace tile = place_in<Config::raster, band_columns>(inside, row_tiles, column_tiles, regions);
    const int row = tile.row * Shape::weight_shares + down_of(which);
    const int column = tile.column * Shape::x_shares + across_of(which);
    const int height = Shape::swapped ? regions[0].columns : rows;  // of the result
    const int below = Shape::ranges > 1 ? item / tiles * height : 0;
    return {tile.region, row * height_of<Shape::rows, Batch>, column * Config::columns, below};
  }

  // By each consumer warp, for every block that writes to the stage. A barrier always waits for as many arrivals, so
  // that a block that nothing is shared with arrives for the others.
  JITGEN_DEVICE void release(int stage, bool alone) const {
    const int lane = threadIdx.x % 32;
    if constexpr (Shape::cluster > 1) {
      constexpr bool line = Shape::x_shares == 1 || Shape::weight_shares == 1;
      const bool shares = line || down_of(lane) == down_of(rank) || across_of(lane) == across_of(rank);
      if (lane < Shape::cluster && shares) barrier_arrive_at(empty(stage), alone ? rank : lane);
    } else {
      if (lane == 0) barrier_arrive(empty(stage));
    }
  }
};

}  // namespace jitgen
