// What the producer warps of the dense mainloop on wgmma do: they copy the tiles of x and of the weights, and scales, to
// the stages.
#pragma once

#include "jitgen/gemm_wgmma_dense_block.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseCopies : DenseBlock<Config, Epilogue, Batch, Scales> {
  using Base = DenseBlock<Config, Epilogue, Batch, Scales>;
  using typename Base::Region, typename Base::Ring, typename Base::Shape;
  using Base::across_of, Base::base, Base::batch, Base::contractions, Base::down_of, Base::empty, Base::full, Base::rank;
  using Base::regions, Base::rows, Base::scales, Base::scales_at, Base::weight_at, Base::x, Base::x_at;

  // The copies of a tile of x and of a weight: how many there are, their rows, where they begin, and those of a block that
  // shares them with others. The last copy of a weight may overlap the one before it.
  static constexpr int x_share = Shape::rows / Shape::x_shares;
  static constexpr int x_box = Shape::x_transposed ? 64 : x_share, x_deep = Shape::x_transposed ? 64 / Shape::x_depth : 1;
  static constexpr int x_boxes = Shape::rows / x_box * x_deep;
  static constexpr int weight_box = Shape::transposed ? 64 : Shape::weight_piece;
  static constexpr int weight_deep = Shape::transposed ? 64 / Shape::weight_depth : 1;
  static constexpr int weight_boxes = Shape::transposed ? Config::columns / 64 * weight_deep : Shape::weight_shares;
  static JITGEN_DEVICE int weight_box_at(int box) { return smaller(box * weight_box, Config::columns - weight_box); }
  // Where a copy begins that would begin at `from`. One that is all beyond its matrix of `size` rows takes other rows, of
  // which nothing is stored: the copy engine is slower to write zeros than to read. (Every stage has all of its copies,
  // since a block that waits for no other's could release a stage twice before others have released it once.) A copy
  // begins at a multiple of 16 bytes, where the rows are the innermost dimension too: it is an illegal instruction else.
  static JITGEN_DEVICE int copied_from(int from, int box, int size) {
    return from < size ? from : size > box ? (size - box) / 8 * 8 : 0;
  }

  // Called by one thread. `alone`: whether the other blocks of the cluster take other chunks, so that nothing is shared.
  JITGEN_DEVICE void produce(int matrix, const TilePlace& tile, int first, int last, bool alone, Ring& ring) const {
    // This block's place in its cluster, and the blocks beside and below it, which it shares the tiles with.
    const int down = down_of(rank), across = across_of(rank);
    uint16_t beside = 0;
#pragma unroll
    for (int i = 0; i < Shape::x_shares; ++i) beside |= 1 << (down + i * Shape::weight_shares);
    const uint16_t below = ((1 << Shape::weight_shares) - 1) << (across * Shape::weight_shares);
    const Region region = region_of(regions, tile.region);
    const int copied = Config::trimmed && !Shape::x_transposed ? smaller(rows, x_share) : x_share;
    const int bytes = copied * Shape::x_shares * 128 + Shape::copied_weight_bytes * contractions;
    const bool x_shared = Shape::x_shares > 1 && !alone, weight_shared = Shape::weight_shares > 1 && !alone;
    // Divisions before the loop, which the compiler does not move there: in it they took longer than the copies.
    MatrixIndices of_x = {}, of_weights[contractions] = {};
    if constexpr (Batch::several) {
      if constexpr (!Batch::grouped) of_x = indices(matrix, batch.x);
#pragma unroll
      for (int c = 0; c < contractions; ++c) of_weights[c] = indices(matrix, batch.weights[c]);
    }
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk, ring.next()) {
      const int stage = ring.stage;
      barrier_wait_in_place(empty(stage), ring.phase ^ 1, "empty");
      barrier_arrive_expect(full(stage), bytes);
      if (x_shared) {
        constexpr int own = x_boxes / Shape::x_shares;
#pragma unroll
        for (int i = 0; i < own; ++i) copy_x(tile, chunk, stage, across * own + i, beside, Shape::x_shares > 1, of_x);
      } else {
#pragma unroll
        for (int i = 0; i < x_boxes; ++i) copy_x(tile, chunk, stage, i, beside, false, of_x);
      }
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const TensorMap& map = *region.weights[c];
        if (weight_shared) {
#pragma unroll
          for (int i = 0; i < weight_boxes; i += Shape::weight_shares) {
            copy_weight(map, tile, chunk, stage, c, i + down, below, Shape::weight_shares > 1, of_weights[c]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < weight_boxes; ++i) copy_weight(map, tile, chunk, stage, c, i, below, false, of_weights[c]);
        }
      }
    }
  }

  // Called by one warp: copies the scales of each stage, whatever their strides, as far ahead as the operands are copied.
  // (Where lanes of the consumers loaded them two stages ahead, products waited for them: blocks took 1.06 to 1.2 times as
  // long as products without scales, on an H200.)
  JITGEN_DEVICE void produce_scales(int group, const TilePlace& tile, int first, int last, Ring& ring) const {
    const int lane = threadIdx.x % 32;
    constexpr int row_copies = Shape::rows / 32;
    const float* of_row[row_copies];
#pragma unroll
    for (int i = 0; i < row_copies; ++i) {
      of_row[i] = scales.of_row(smaller(tile.row + i * 32 + lane, rows - 1)) + first * scales.x_step;
    }
    const float* of_piece = nullptr;
    int64_t step = 0;
#pragma unroll
    for (int piece = 0; piece < (Scales::of_blocks ? Shape::pieces : 0); ++piece) {
      if (lane != piece) continue;
      constexpr int own = Shape::pieces / contractions;  // of a contraction
      const int column = tile.column + piece % own * Shape::slice, last_block = (columns_of(regions, 0) - 1) / scale_block;
      step = scales.weights[piece / own].step;
      of_piece = scales.of_columns(group, piece / own, smaller(column / scale_block, last_block)) + first * step;
    }
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk, ring.next()) {
      const uint32_t to = base + scales_at(ring.stage) + lane * 4;
      barrier_wait_in_place(empty(ring.stage), ring.phase ^ 1, "empty");
      if constexpr (Scales::of_rows) {
#pragma unroll
        for (int i = 0; i < row_copies; ++i, of_row[i - 1] += scales.x_step) copy_async<4>(to + i * 128, of_row[i]);
      }
      if (of_piece) copy_async<4>(to + Shape::rows * 4, of_piece);
      of_piece += step;
      barrier_arrive_on_copies(full(ring.stage));
    }
  }

  JITGEN_DEVICE void copy_x(
      const TilePlace& tile, int chunk, int stage, int box, uint16_t mask, bool shared, MatrixIndices matrix) const {
    const int within = box % x_deep * Shape::x_depth;
    const uint32_t to = x_at(stage) + box / x_deep * (x_box * 128) + within * 128;
    const int row = copied_from(tile.row + box / x_deep * x_box, x_box, rows), k = chunk * Shape::depth + within;
    const int column = Shape::x_transposed ? row : k, line = Shape::x_transposed ? k : row;
    if constexpr (Batch::several && !Batch::grouped) {
      copy_of_matrix(to, x, column, line, full(stage), mask, shared, matrix);
    } else {
      copy(to, x, column, line, full(stage), mask, shared);
    }
  }
  JITGEN_DEVICE void copy_weight(
      const TensorMap& map, const TilePlace& tile, int chunk, int stage, int contraction, int box, uint16_t mask,
      bool shared, MatrixIndices matrix) const {
    const int first = weight_box_at(box / weight_deep), within = box % weight_deep * Shape::weight_depth;
    const int n = copied_from(tile.column + first, weight_box, columns_of(regions, tile.region));
    const int k = chunk * Shape::depth + within;
    const uint32_t to = weight_at(stage, contraction) + first * 128 + within * 128;
    const int column = Shape::transposed ? n : k, line = Shape::transposed ? k : n;
    if constexpr (Batch::several) {
      copy_of_matrix(to, map, column, line, full(stage), mask, shared, matrix);
    } else {
      copy(to, map, column, line, full(stage), mask, shared);
    }
  }

  // Copy a box, for all blocks of the cluster where they share it.
  JITGEN_DEVICE void copy(
      uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint16_t mask, bool shared) const {
    if (shared) {
      copy_box_multicast(to, map, column, row, barrier, mask);
    } else {
      copy_box(to, map, column, row, barrier);
    }
  }
  JITGEN_DEVICE MatrixIndices indices(int matrix, const MatrixWalk& walk) const {
    return {matrix / batch.inner * walk.outer, matrix % batch.inner * walk.inner};
  }
  JITGEN_DEVICE void copy_of_matrix(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier,
                                    uint16_t mask, bool shared, MatrixIndices matrix) const {
    if (shared) {
      copy_box_of_matrix_multicast(to, map, column, row, matrix.inner, matrix.outer, barrier, mask);
    } else {
      copy_box_of_matrix(to, map, column, row, matrix.inner, matrix.outer, barrier);
    }
  }
};

}  // namespace jitgen
