// What the consumer warpgroups of the dense mainloop on wgmma do with the stages: they multiply, and add the products to
// their sums.
#pragma once

#include "jitgen/gemm_wgmma_dense_copies.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseProducts : DenseCopies<Config, Epilogue, Batch, Scales> {
  using Base = DenseCopies<Config, Epilogue, Batch, Scales>;
  using typename Base::Order, typename Base::Product, typename Base::Products, typename Base::Ring, typename Base::Shape;
  using typename Base::Multiply, typename Base::Slice, typename Base::Sum, typename Base::Sums;
  using Base::blocks, Base::contractions, Base::full, Base::memory, Base::promoted, Base::regions, Base::release;
  using Base::scales_at, Base::warp, Base::weight_at, Base::x_at;

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
};

}  // namespace jitgen
