// What the wgmma mainloops multiply: one pair of matrices, a batch of pairs, or rows that belong to groups.
#pragma once

#include "jitgen/gemm_groups.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"

namespace jitgen {

// One product of matrices.
struct OneMatrix {
  static constexpr bool several = false, grouped = false;
  JITGEN_DEVICE int matrices() const { return 1; }
  JITGEN_DEVICE OneMatrix swapped() const { return *this; }
};
// `count` products in two batch dimensions, the inner one of size `inner`. A walk says for each dimension whether an
// operand has a matrix for each index (1), or the same one for all (0).
struct MatrixWalk {
  int outer, inner;
};
// The indices of an operand's matrix in these dimensions.
struct MatrixIndices {
  int outer, inner;
};
template <int contractions>
struct MatrixBatch {
  static constexpr bool several = true, grouped = false;
  int count, inner;
  MatrixWalk x, weights[contractions];
  JITGEN_DEVICE int64_t matrices() const { return count; }  // times tiles it can exceed 32 bits
  // The same where x and the weight change places.
  JITGEN_DEVICE MatrixBatch swapped() const { return {count, inner, weights[0], {x}}; }
};

// Rows that belong to `groups` matrices of weights, one group's after another's (gemm_groups.cuh). Tensor maps of dense
// weights have no matrix number `groups`, so that the weights of rows of no group are 0. The walk of a quantised weight
// has the tiles of 16 rows from one matrix to the next for its inner step. With `scaled`, the epilogue of a group's rows
// is epilogue.at(group).
template <int contractions, class Integer, bool scaled_ = false>
struct RowGroups {
  static constexpr bool several = true, grouped = true, scaled = scaled_;
  const Integer* ends;
  int64_t stride;
  int groups, inner;  // groups + 1
  MatrixWalk weights[contractions];
  JITGEN_DEVICE int matrices() const { return 1; }
  // How many tiles of `height` rows there are, and tile number `tile`. By whole warps.
  template <int height>
  JITGEN_DEVICE int tiles(int rows) const {
    return tiles_of_groups<height>(ends, stride, groups, rows);
  }
  template <int height>
  JITGEN_DEVICE GroupTile at(int rows, int tile) const {
    return group_of_tile<height>(ends, stride, groups, rows, tile);
  }
};
// The same where an id says each row's group: a tile has one row.
template <int contractions, class Integer, bool scaled_ = false>
struct RowIds {
  static constexpr bool several = true, grouped = true, scaled = scaled_;
  const Integer* ids;
  int64_t stride;
  int groups, inner;
  MatrixWalk weights[contractions];
  JITGEN_DEVICE int matrices() const { return 1; }
  template <int height>
  JITGEN_DEVICE int tiles(int rows) const {
    return rows;
  }
  template <int height>
  JITGEN_DEVICE GroupTile at(int, int tile) const {
    return group_of_id(ids, stride, groups, tile);
  }
};

// A matrix of the weights, and where the rows that it multiplies end.
struct MatrixRows {
  int number, end;
};
// Moves a tile, which so far is one of the tiles of all groups, to the rows of its group; returns the group's matrix, or
// number `groups`. Groups have whole bands of `shares` tiles of `height` rows, those of a cluster. Of groups `tile.row`
// comes as the number of a tile (`height_of`): of rows with ids each has a tile, so that rows of tiles exceed 32 bits.
// Without groups the matrix is `number`. By whole warps.
template <int height, int shares, class Batch>
JITGEN_DEVICE MatrixRows matrix_of(const Batch& batch, TilePlace& tile, int number, int rows) {
  if constexpr (Batch::grouped) {
    const GroupTile own = batch.template at<height * shares>(rows, tile.row / shares);
    tile.row = own.begin + (own.tile * shares + tile.row % shares) * height;
    return {own.group < 0 ? batch.groups : own.group, own.end};
  } else {
    return {number, rows};
  }
}
// The rows by which `matrix_of` expects tiles of `height` rows to be placed.
template <int height, class Batch>
constexpr int height_of = Batch::grouped ? 1 : height;
}  // namespace jitgen
