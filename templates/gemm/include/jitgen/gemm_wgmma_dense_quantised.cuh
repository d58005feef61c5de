// From the sums of the dense mainloop on wgmma to an epilogue that quantises what it computes in blocks of columns, as
// IsInBlocks says.
#pragma once

#include "jitgen/gemm_wgmma_dense_results.cuh"
#include "jitgen/lanes.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseQuantised : DenseResults<Config, Epilogue, Batch, Scales> {
  using Base = DenseResults<Config, Epilogue, Batch, Scales>;
  using typename Base::Shape, typename Base::Sum, typename Base::Sums;
  using Base::base, Base::blocks, Base::contractions, Base::memory, Base::rank, Base::rows, Base::splits, Base::warp;

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
};

}  // namespace jitgen
