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

#include "jitgen/gemm_wgmma_batch.cuh"
#include "jitgen/gemm_wgmma_dense_shape.cuh"
#include "jitgen/gemm_wgmma_results.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"
#include "jitgen/lanes.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseKernel {
  using Shape = DenseShape<Config>;
  using Region = DenseRegion<Config::contractions>;
  using Multiply = Wgmma<typename Config::Element, Shape::width>;
  using Slice = Wgmma<typename Config::Element, Shape::slice>;
  using Ring = StageRing<Config::stages>;
  static constexpr int contractions = Config::contractions;
  static constexpr int blocks = Shape::blocks;
  using Product = typename Multiply::Sum;
  using Sum = typename ScaledSum<Scales::any, Product>::type;
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

  // The copies of a tile of x and of a weight: how many there are, their rows, where they begin, and those of a block that
  // shares them with others. The last copy of a weight may overlap the one before it.
  static constexpr int x_share = Shape::rows / Shape::x_shares;
  static constexpr int x_box = Shape::x_transposed ? 64 : x_share, x_boxes = Shape::rows / x_box;
  static constexpr int weight_box = Shape::transposed ? 64 : Shape::weight_piece;
  static constexpr int weight_boxes = Shape::transposed ? Config::columns / 64 : Shape::weight_shares;
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
    const uint32_t to = x_at(stage) + box * (x_box * 128);
    const int row = copied_from(tile.row + box * x_box, x_box, rows), k = chunk * Shape::depth;
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
    const int first = weight_box_at(box), k = chunk * Shape::depth;
    const int n = copied_from(tile.column + first, weight_box, columns_of(regions, tile.region));
    const uint32_t to = weight_at(stage, contraction) + first * 128;
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

  static JITGEN_DEVICE void clear(Sums& acc) {
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
#pragma unroll
        for (int i = 0; i < Shape::width / 2; ++i) acc[c][b][i] = Sum(0);
      }
    }
  }

  // Starts the products of a stage. `add`: whether they are added to what `acc` has, else the first of them are not.
  JITGEN_DEVICE void multiply(Products& acc, int stage, int down, int across, bool add) const {
    constexpr bool left = Shape::x_transposed;
    const uint32_t x_rows = x_at(stage) + down * (Shape::group_rows * 128);
    const uint64_t a = left ? descriptor_transposed(x_rows, 8192) : descriptor_k_major(x_rows);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const uint32_t at = weight_at(stage, c) + across * (Shape::width * 128);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
          const uint64_t of_block = a + b * (8192 / 16) + step * (left ? 128 : 2);
          const uint64_t weight =
              Shape::transposed ? descriptor_transposed(at, 8192) + step * 128 : descriptor_k_major(at) + step * 2;
          const int adds = add || step > 0;
          if constexpr (left) {
            Multiply::template shared<Shape::transposed, 1>(acc[c][b], of_block, weight, adds);
          } else {
            Multiply::template shared<Shape::transposed>(acc[c][b], of_block, weight, adds);
          }
        }
      }
    }
    wgmma_commit();
  }

  // Adds the products of a stage to `acc` in float32, a slice of columns after another. The tensor cores have those of
  // the other warpgroup while this one adds. The stage is released before the last slice is added: 0 to 4 % less time
  // than behind it (six products on an H200).
  JITGEN_DEVICE void promote(Sums& acc, int stage, int down, int across, bool alone) const {
    constexpr int slice = Shape::slice, slices = Shape::slices;
    float of_row[blocks][2], of_columns[contractions][slices];
    if constexpr (Scales::any) {
      const float* const found = reinterpret_cast<const float*>(memory + scales_at(stage));
      const int row = down * Shape::group_rows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int i = 0; i < blocks * 2; ++i) of_row[i / 2][i % 2] = Scales::of_rows ? found[row + i / 2 * 64 + i % 2 * 8] : 1.0f;
#pragma unroll
      for (int i = 0; i < contractions * slices; ++i) {
        const int piece = Shape::rows + (i / slices * Config::across + across) * slices + i % slices;
        of_columns[i / slices][i % slices] = Scales::of_blocks ? found[piece] : 1.0f;
      }
    }
    const uint64_t a = descriptor_k_major(x_at(stage) + down * (Shape::group_rows * 128));
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
#pragma unroll
        for (int s = 0; s < Shape::slices; ++s) {
          Product fresh[slice / 2];
          const uint64_t weight = descriptor_k_major(weight_at(stage, c) + (across * Shape::width + s * slice) * 128);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            Slice::template shared<0>(fresh, a + b * (8192 / 16) + step * 2, weight + step * 2, step > 0);
          }
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_written(fresh);
          if (c == contractions - 1 && b == blocks - 1 && s == Shape::slices - 1) release(stage, alone);
          Sum(&sums)[Shape::width / 2] = acc[c][b];
#pragma unroll
          for (int i = 0; i < slice / 2; ++i) {
            Sum& sum = sums[s * (slice / 2) + i];
            if constexpr (Scales::any) {
              const float scale = of_row[b][i % 4 / 2] * of_columns[c][s];
              sum = __fmaf_rn(float(fresh[i]), scale, sum);
            } else {
              sum += fresh[i];
            }
          }
        }
      }
    }
  }

  // Of a warpgroup whose rows are all beyond x: the tensor cores have the others' products alone.
  JITGEN_DEVICE void pass_by(int first, int last, bool alone, Ring& ring) const {
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk, ring.next()) {
      barrier_wait_in_place(full(ring.stage), ring.phase, "full");
      release(ring.stage, alone);
    }
  }

  // `matrix`: that the tile belongs to, and where its rows end.
  JITGEN_DEVICE void consume(Sums& acc, const TilePlace& tile, int first, int last, bool alone, Ring& ring, bool follows,
                             bool followed, const MatrixRows& matrix) const {
    const int warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int down = warpgroup % Config::down, across = warpgroup / Config::down;
    clear(acc);
    const bool beyond = tile.row + down * Shape::group_rows >= matrix.end ||
                        tile.column + across * Shape::width >= columns_of(regions, tile.region);
    if (!Shape::pingpong && beyond) return pass_by(first, last, alone, ring);
    Order::wait(follows);
    if (first == last) Order::pass(followed);
    int before = 0;
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      const int stage = ring.stage;
      barrier_wait_in_place(full(stage), ring.phase, "full");
      Order::pass(followed && chunk + 1 == last);
      if constexpr (promoted) {
        // wgmma adds 8-bit floats with some 14 bits, so that the sums of a stage are added to the others in float32.
        promote(acc, stage, down, across, alone);
      } else {
        multiply(acc, stage, down, across, true);
        wgmma_wait<1>();
        if (chunk > first) release(before, alone);
        before = stage;
      }
      ring.next();
    }
    if constexpr (!promoted) {
      wgmma_wait<0>();
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) wgmma_written(acc[c][b]);
      }
      if (first < last) release(before, alone);
    }
  }

  // Where x and the weight are swapped, rows of a tile are columns of the result, and a warpgroup has 64 of them.
  template <class Own>
  JITGEN_DEVICE void finish_swapped(const Own& epilogue, const TilePlace& tile, const Sums& acc, int columns) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, turns = Shape::width / chunk;
    const int thread = threadIdx.x % 128, warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
    Sum* const staging = reinterpret_cast<Sum*>(memory + Shape::staging_at) + threadIdx.x / 128 * chunk * pitch;
#pragma unroll 1
    for (int turn = 0; turn < blocks * turns; ++turn) {
      const int n = tile.row + warpgroup % Config::down * Shape::group_rows + turn / turns * 64;
      const int m = first + turn % turns * chunk;
      if (n >= rows) break;
      if (m >= columns) continue;
      group_barrier<128>(1 + threadIdx.x / 128, "staging of a warpgroup");
      spread_swapped<0>(turn, staging, acc);
      group_barrier<128>(1 + threadIdx.x / 128, "staging of a warpgroup");
      Sum sums[chunk / 16][1][8];  // all are read before the first is stored: one latency for all of them
      RunPlace places[chunk / 16];
      const int run = n + thread % 8 * 8, live = smaller(8, rows - run);
#pragma unroll
      for (int i = 0; i < chunk / 16; ++i) {
        const int token = i * 16 + thread / 8;
        const Sum* const from = staging + token * pitch + thread % 8 * 8;
        gather(sums[i][0], from + thread % 8 / 4 * 4, from + (1 - thread % 8 / 4) * 4);
        places[i] = {tile.below + smaller(m + token, columns - 1), live > 0 ? run : n, live > 0 ? live : smaller(8, rows - n),
                     m + token < columns && live > 0};
      }
      run_epilogues(epilogue, places, sums);
    }
  }
  template <int turn>
  static JITGEN_DEVICE void spread_swapped(int wanted, Sum* staging, const Sums& acc) {
    constexpr int chunk = Shape::chunk, turns = Shape::width / chunk;
    if constexpr (turn < blocks * turns) {
      if (wanted == turn) spread_columns<turn % turns * chunk>(staging, acc[0][turn / turns]);
      spread_swapped<turn + 1>(wanted, staging, acc);
    }
  }
  // Writes the sums of a chunk of a tile's columns from `first` on to [column][row] at `to`: this lane's of 64 rows. The
  // halves of each run of eight are swapped in the last 32 rows, so that 16-byte reads of neighbouring runs are in
  // different banks.
  template <int first>
  static JITGEN_DEVICE void spread_columns(Sum* to, const Sum (&acc)[Shape::width / 2]) {
    constexpr int pitch = Shape::pitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Sum* const corner = to + lane % 4 * 2 * pitch + warp * 16 + (lane / 4 ^ warp / 2 * 4);
#pragma unroll
    for (int i = 0; i < Shape::chunk / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) corner[(i * 8 + j % 2) * pitch + j / 2 * 8] = acc[(first / 8 + i) * 4 + j];
    }
  }

  // The same with results that are computed as their sums lie in registers.
  template <class Own>
  JITGEN_DEVICE void finish_swapped_in_pairs(const Own& epilogue, const TilePlace& tile, const Sums& acc, int columns) const {
    const int warpgroup = Shape::pingpong ? 0 : warp / 4;
    finish_in_pairs_of_tokens<blocks, Shape::width, Shape::chunk>(
        epilogue, [&](int block, int i) { return acc[0][block][i]; }, tile.column + warpgroup / Config::down * Shape::width,
        columns, tile.below, tile.row + warpgroup % Config::down * Shape::group_rows, rows, memory, base,
        Shape::staging_at + warp / 4 * (Shape::chunk * Shape::pitch * 4), 1 + warp / 4);
  }

  // Computes results as their sums lie in registers, two columns of a row at a time, and stages the results, which are
  // half as many bytes as the sums. With `at_once` all are computed before the first is staged, so that what they read is
  // read with one latency: 1 to 10 % less time (24 products on an H200). Without reads it is up to 4 % more.
  template <class Own>
  JITGEN_DEVICE void finish_in_pairs(const Own& epilogue, const TilePlace& tile, const Sums& acc, int columns, int rows) const {
    using Pair = typename Own::template Results<2>;
    using Eight = typename Own::template Results<8>;
    static_assert(sizeof(Pair) == 4 && sizeof(Eight) == 16 && contractions == 1 && Config::regions == 1, "one result of 16 bits");
    constexpr int wide = Shape::width % (2 * Shape::chunk) == 0 ? 2 * Shape::chunk : Shape::chunk;  // columns staged at once
    constexpr int runs = wide / 8, turns = Shape::width / wide, swizzle = runs < 8 ? runs : 8;
    const int lane = threadIdx.x % 32, warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int first_row = tile.row + warpgroup % Config::down * Shape::group_rows + warp % 4 * 16;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
    uint8_t* const staging = memory + Shape::staging_at + warp * 16 * wide * 2;
    Words<Pair> results[Shape::at_once ? blocks * turns : 1][runs][2];
    const auto compute = [&](int turn, Words<Pair>(&pairs)[runs][2]) {
      const int row = first_row + turn / turns * 64 + lane / 4, column = first + turn % turns * wide + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < runs; ++i) {
        const int n = smaller(column + i * 8, (columns - 1) / 2 * 2), live = smaller(2, columns - n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Sum* const from = acc[0][turn / turns] + (turn % turns * runs + i) * 4 + half * 2;
          const Sum sums[1][2] = {{from[0], from[1]}};
          const int m = tile.below + smaller(row + half * 8, rows - 1);
          pairs[i][half].whole = epilogue.template results<2>(m, n, sums, live);
        }
      }
    };
    if constexpr (Shape::at_once) {
#pragma unroll
      for (int turn = 0; turn < blocks * turns; ++turn) compute(turn, results[turn]);
    }
    // Runs of eight columns are permuted within `swizzle` of them, so that neither pairs nor reads meet in a bank.
#pragma unroll
    for (int turn = 0; turn < blocks * turns; ++turn) {
      const int row = first_row + turn / turns * 64, column = first + turn % turns * wide;
      if (row >= rows || column >= columns) continue;
      Words<Pair>(&pairs)[runs][2] = results[Shape::at_once ? turn : 0];
      if constexpr (!Shape::at_once) compute(turn, pairs);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < swizzle; ++i) {
        uint8_t* const to = staging + lane / 4 * (wide * 2) + (i ^ lane / 4 % swizzle) * 16 + lane % 4 * 4;
#pragma unroll
        for (int run = i; run < runs; run += swizzle) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<uint32_t*>(to + (half * 8 * wide * 2 + (run - i) * 16)) = pairs[run][half].word[0];
          }
        }
      }
      __syncwarp();
      const int run = lane % runs, n = column + run * 8;
      Words<Eight> eights[runs / 2];  // all are read before the first is stored: one latency for all of them
#pragma unroll
      for (int i = 0; i < runs / 2; ++i) {
        const int m = (i * 32 + lane) / runs;
        const uint4 words = *reinterpret_cast<const uint4*>(staging + m * (wide * 2) + (run ^ m % swizzle) * 16);
        eights[i].word[0] = words.x, eights[i].word[1] = words.y, eights[i].word[2] = words.z, eights[i].word[3] = words.w;
      }
#pragma unroll
      for (int i = 0; i < runs / 2; ++i) {
        const int m = row + (i * 32 + lane) / runs;
        if (m < rows && n < columns) epilogue.template store<8>(tile.below + m, n, eights[i].whole, smaller(8, columns - n));
      }
    }
  }

  template <class Own>
  JITGEN_DEVICE void finish(const Own& epilogue, const TilePlace& tile, const Sums& acc, int columns, int rows) const {
    if constexpr (Shape::swapped && Shape::in_pairs) return finish_swapped_in_pairs(epilogue, tile, acc, columns);
    if constexpr (Shape::swapped) return finish_swapped(epilogue, tile, acc, columns);
    if constexpr (Shape::in_pairs) return finish_in_pairs(epilogue, tile, acc, columns, rows);
    constexpr int chunk = Shape::chunk, run = Config::run, runs = chunk / run, turns = Shape::width / chunk;
    const int lane = threadIdx.x % 32, warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int first_row = tile.row + warpgroup % Config::down * Shape::group_rows + warp % 4 * 16;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
    Sum* const staging = reinterpret_cast<Sum*>(memory + Shape::staging_at) + warp * contractions * 16 * chunk;
#pragma unroll 1
    for (int turn = 0; turn < blocks * turns; ++turn) {
      const int row = first_row + turn / turns * 64, column = first + turn % turns * chunk;
      if (row >= rows) break;
      if (column >= columns) continue;
      __syncwarp();
      spread<0>(turn, staging, acc);
      __syncwarp();
      Sum sums[runs / 2][contractions][run];  // all are read before the first is stored: one latency for all of them
#pragma unroll
      for (int i = 0; i < runs / 2; ++i) {
        const int eight = staged_run<chunk>((i * 32 + lane) / runs, lane % runs * run / 8);
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          const Sum* const from = staging + c * 16 * chunk;
          if constexpr (run == 8) {
            gather(sums[i][c], from + staged_column(eight, 0), from + staged_column(eight, 4));
          } else {
            gather(sums[i][c], from + staged_column(eight, lane % 2 * 4));
          }
        }
      }
      const int n = column + lane % runs * run, live = smaller(run, columns - n);
      RunPlace places[runs / 2];
#pragma unroll
      for (int i = 0; i < runs / 2; ++i) {
        const int m = row + (i * 32 + lane) / runs;
        places[i] = {tile.below + smaller(m, rows - 1), live > 0 ? n : column,
                     live > 0 ? live : smaller(run, columns - column), m < rows && live > 0};
      }
      if constexpr (Config::regions == 1) {
        run_epilogues(epilogue, places, sums);
      } else {
#pragma unroll
        for (int i = 0; i < runs / 2; ++i) {
          if (places[i].stored) run_epilogue<true>(epilogue, tile.region, places[i].m, n, sums[i], live);
        }
      }
    }
  }
  // Registers can be indexed by constants only. So there is code for every turn, and only that of `wanted` is executed.
  template <int turn>
  static JITGEN_DEVICE void spread(int wanted, Sum* staging, const Sums& acc) {
    constexpr int chunk = Shape::chunk, turns = Shape::width / chunk;
    if constexpr (turn < blocks * turns) {
      if (wanted == turn) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
#pragma unroll
          for (int i = 0; i < chunk / 8; ++i) {
            const Sum* const from = acc[c][turn / turns] + (turn % turns * (chunk / 8) + i) * 4;
            const int at = staged_column(staged_run<chunk>(lane / 4, i), lane % 4 * 2);
            Sum* const to = staging + c * 16 * chunk + at;
            store_two(to, from[0], from[1]);
            store_two(to + 8 * chunk, from[2], from[3]);
          }
        }
      }
      spread<turn + 1>(wanted, staging, acc);
    }
  }

  // Of an epilogue that quantises in blocks of columns: `block_lanes` neighbouring lanes have a block of a row, each a
  // run of eight columns. By whole warps.
  static constexpr int block_lanes = scale_block / 8;
  template <class Own>
  static JITGEN_DEVICE void quantise(const Own& epilogue, int m, int n, const float (&sums)[contractions][8], bool live) {
    float kept[contractions][8], extremes[8];
    epilogue.template before<8>(m, n, sums, 8, kept, extremes);
    float extremum = extremes[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) extremum = Own::Extremum::combine(extremum, extremes[j]);
    extremum = combine_lanes<typename Own::Extremum, block_lanes>(extremum);
    const auto codes = epilogue.template codes<8>(kept, extremum);
    if (!live) return;
    if (threadIdx.x % block_lanes == 0) epilogue.of_block(m, n / scale_block, extremum);
    epilogue.template store<8>(m, n, codes, 8);
  }

  // Of one product a warp stages whole blocks of as many rows as there is room for, and loops over them: code for all of
  // its sums is fetched more slowly than a GELU of them takes. Of two products there is room for half the rows, and
  // registers are faster. (Layers of seven sizes on an H200 took 0.94 to 1.03 of their time in a loop with one product, and
  // 1.00 to 1.16 with SwiGLU's two.)
  template <class Own>
  JITGEN_DEVICE void finish_in_blocks(const Own& epilogue, const TilePlace& tile, const Sums& acc, int columns, int rows) const {
    static_assert(Shape::width % scale_block == 0 && !Shape::swapped && Config::regions == 1 && Shape::ranges == 1 &&
                      Own::held <= contractions && contractions == 1 && block_rows <= 8,
                  "a warpgroup has whole blocks, and room for what is kept");
    constexpr int turns = 16 / block_rows, slices = Shape::width / scale_block;
    const int lane = threadIdx.x % 32, warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int first_row = tile.row + warpgroup % Config::down * Shape::group_rows + warp % 4 * 16;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
    Sum* const staging = reinterpret_cast<Sum*>(memory + Shape::staging_at) + warp * 16 * Shape::chunk;
#pragma unroll 1
    for (int turn = 0; turn < blocks * slices * turns; ++turn) {
      const int row = first_row + turn / (slices * turns) * 64 + turn % turns * block_rows;
      const int column = first + turn / turns % slices * scale_block;
      if (row >= rows || column >= columns) continue;
      __syncwarp();
      spread_rows<0>(turn, staging, acc);
      __syncwarp();
#pragma unroll 1
      for (int i = lane / block_lanes; i < block_rows; i += 32 / block_lanes) {
        const int run = lane % block_lanes, eight = staged_run<scale_block>(i, run);
        float sums[1][8];
        gather(sums[0], staging + staged_column(eight, 0), staging + staged_column(eight, 4));
        quantise(epilogue, smaller(row + i, rows - 1), column + run * 8, sums, row + i < rows);
      }
    }
  }
  // Rows of a warp whose blocks are staged at once.
  static constexpr int block_rows = Shape::chunk * 16 / scale_block;
  // Like `spread`: the code of every turn. A lane has two columns of one row of eight in each run.
  template <int turn>
  static JITGEN_DEVICE void spread_rows(int wanted, Sum* staging, const Sums& acc) {
    constexpr int turns = 16 / block_rows, slices = Shape::width / scale_block;
    if constexpr (turn < blocks * slices * turns) {
      if (wanted == turn) {
        constexpr int first = turn % turns * block_rows, slice = turn / turns % slices;
        const int lane = threadIdx.x % 32, row = lane / 4 - first % 8;
        if (row >= 0 && row < block_rows) {
#pragma unroll
          for (int run = 0; run < block_lanes; ++run) {
            const Sum* const from = acc[0][turn / (slices * turns)] + (slice * block_lanes + run) * 4 + first / 8 * 2;
            store_two(staging + staged_column(staged_run<scale_block>(row, run), lane % 4 * 2), from[0], from[1]);
          }
        }
      }
      spread_rows<turn + 1>(wanted, staging, acc);
    }
  }

  // The same where four neighbouring lanes have a row of a block, as the sums lie in registers. What is computed of the
  // sums takes their place.
  template <class Own>
  JITGEN_DEVICE void finish_in_registers(const Own& epilogue, const TilePlace& tile, Sums& acc, int columns, int rows) const {
    static_assert(Shape::width % scale_block == 0 && !Shape::swapped && Config::regions == 1 && Shape::ranges == 1 &&
                      Own::held <= contractions,
                  "a warpgroup has whole blocks, and room for what is kept");
    constexpr int runs = scale_block / 8;
    const int lane = threadIdx.x % 32, warpgroup = Shape::pingpong ? 0 : warp / 4;
    const int first_row = tile.row + warpgroup % Config::down * Shape::group_rows + warp % 4 * 16;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
#pragma unroll
      for (int s = 0; s < Shape::width / scale_block; ++s) {
        const int row = first_row + b * 64, column = first + s * scale_block;
        if (row >= rows || column >= columns) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own_row = row + lane / 4 + half * 8, m = smaller(own_row, rows - 1);
          float extremum = 0.0f, kept[contractions][2];
#pragma unroll
          for (int i = 0; i < runs; ++i) {
            const int at = (s * runs + i) * 4 + half * 2;
            float sums[contractions][2], extremes[2];
#pragma unroll
            for (int c = 0; c < contractions; ++c) sums[c][0] = acc[c][b][at], sums[c][1] = acc[c][b][at + 1];
            epilogue.template before<2>(m, column + i * 8 + lane % 4 * 2, sums, 2, kept, extremes);
#pragma unroll
            for (int c = 0; c < Own::held; ++c) acc[c][b][at] = kept[c][0], acc[c][b][at + 1] = kept[c][1];
            const float both = Own::Extremum::combine(extremes[0], extremes[1]);
            extremum = i == 0 ? both : Own::Extremum::combine(extremum, both);
          }
          extremum = combine_lanes<typename Own::Extremum, 4>(extremum);
          if (lane % 4 == 0 && own_row < rows) epilogue.of_block(m, column / scale_block, extremum);
#pragma unroll
          for (int i = 0; i < runs; i += 4) {
            Words<Vector<typename Own::Code, 8>> all;
#pragma unroll
            for (int word = 0; word < 2; ++word) {
              float two[contractions][4];
#pragma unroll
              for (int c = 0; c < Own::held; ++c) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  two[c][j] = acc[c][b][(s * runs + i + word * 2 + j / 2) * 4 + half * 2 + j % 2];
                }
              }
              Words<Vector<typename Own::Code, 4>> some;
              some.whole = epilogue.template codes<4>(two, extremum);
              all.word[word] = some.word[0];
            }
            gather_runs_of_four_lanes(all.word);
            if (own_row < rows) epilogue.template store<8>(m, column + (i + lane % 4) * 8, all.whole, 8);
          }
        }
      }
    }
  }

  // Where K is split: each block writes its sums to its own shared memory; block r adds its share of them, by rank.
  JITGEN_DEVICE void leave(const Sums& acc) const {
    constexpr int pitch = Shape::sum_pitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    const int row = warpgroup % Config::down * Shape::group_rows + warp % 4 * 16 + lane / 4;
    const int column = warpgroup / Config::down * Shape::width + lane % 4 * 2;
    Sum* const corner = reinterpret_cast<Sum*>(memory) + row * pitch + column;
    group_barrier<Shape::consumers>(1, "end of the stages");  // the stages are not read any more
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
#pragma unroll
        for (int i = 0; i < Shape::width / 8; ++i) {
          const Sum* const from = acc[c][b] + i * 4;
          Sum* const to = corner + (c * Shape::rows + b * 64) * pitch + i * 8;
          store_two(to, from[0], from[1]);
          store_two(to + 8 * pitch, from[2], from[3]);
        }
      }
    }
  }
  template <class Own>
  JITGEN_DEVICE void finish_split(const Own& epilogue, const TilePlace& tile, int columns) const {
    constexpr int pitch = Shape::sum_pitch, width = Config::columns / 8;
    const int runs = smaller(rows - tile.row, Shape::rows) * width;  // runs of 8 columns of the result
    const int last = runs * (rank + 1) / splits;
#pragma unroll 1
    for (int i = runs * rank / splits + threadIdx.x; i < last; i += Shape::consumers) {
      const int m = i / width, n = i % width * 8;
      Sum sums[contractions][8];
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        add_of_cluster<Config::most_splits>(sums[c], base + ((c * Shape::rows + m) * pitch + n) * 4, splits);
      }
      const int live = smaller(8, columns - tile.column - n);
      if (live <= 0) continue;
      run_epilogue<(Config::regions > 1)>(epilogue, tile.region, tile.row + m, tile.column + n, sums, live);
    }
  }

  // The same of an epilogue that quantises in blocks of columns. `alone`: of a block that has all sums of the tile.
  template <bool alone, class Own>
  JITGEN_DEVICE void finish_split_in_blocks(const Own& epilogue, const TilePlace& tile, int columns) const {
    static_assert(!Batch::grouped, "a tile's rows end where x's do");
    constexpr int pitch = Shape::sum_pitch, across = Config::columns / scale_block;
    const int count = smaller(rows - tile.row, Shape::rows) * across;
    const int begin = alone ? 0 : count * rank / splits, last = alone ? count : count * (rank + 1) / splits;
#pragma unroll 1
    for (int i = begin + threadIdx.x / 32 * (32 / block_lanes); i < last; i += Shape::consumers / block_lanes) {
      const int mine = i + threadIdx.x % 32 / block_lanes, block = mine < last ? mine : i;
      const int m = block / across, within = block % across * scale_block;
      const bool live = mine < last && tile.column + within < columns;
      const int n = (live ? within : 0) + threadIdx.x % block_lanes * 8;
      float sums[contractions][8];
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const int at = (c * Shape::rows + m) * pitch + n;
        if constexpr (alone) {
          const Sum* const from = reinterpret_cast<const Sum*>(memory) + at;
          gather(sums[c], from, from + 4);
        } else {
          add_of_cluster<Config::most_splits>(sums[c], base + at * 4, splits);
        }
      }
      quantise(epilogue, tile.row + m, tile.column + n, sums, live);
    }
  }

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
        return finish_split_in_blocks<true>(epilogue, tile, columns);
      }
    }
    leave(acc);
    cluster_sync("sums of the cluster's blocks");
    if constexpr (IsInBlocks<Own>::value) finish_split_in_blocks<false>(epilogue, tile, columns);
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
