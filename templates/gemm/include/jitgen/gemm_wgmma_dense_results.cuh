// From the sums of the dense mainloop on wgmma to the epilogue: a warp, or where x and the weight are swapped a warpgroup,
// stages its sums in shared memory, or the results of 16 bits that it computes of them in registers. Where K is split
// among the blocks of a cluster, they exchange sums through distributed shared memory.
#pragma once

#include "jitgen/gemm_wgmma_dense_products.cuh"
#include "jitgen/gemm_wgmma_results.cuh"

namespace jitgen {

template <class Config, class Epilogue, class Batch, class Scales>
struct DenseResults : DenseProducts<Config, Epilogue, Batch, Scales> {
  using Base = DenseProducts<Config, Epilogue, Batch, Scales>;
  using typename Base::Shape, typename Base::Sum, typename Base::Sums;
  using Base::base, Base::blocks, Base::contractions, Base::memory, Base::rank, Base::rows, Base::splits, Base::warp;

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
#pragma unroll
      for (int i = 0; i < chunk / 16; ++i) {
        const int token = i * 16 + thread / 8;
        const Sum* const from = staging + token * pitch + thread % 8 * 8;
        gather(sums[i][0], from + thread % 8 / 4 * 4, from + (1 - thread % 8 / 4) * 4);
        places[i] = run_place<8>(m + token, columns, tile.below, n + thread % 8 * 8, n, rows);
      }
      run_epilogues(epilogue, places, sums);
    }
  }
  template <int turn>
  static JITGEN_DEVICE void spread_swapped(int wanted, Sum* staging, const Sums& acc) {
    constexpr int chunk = Shape::chunk, turns = Shape::width / chunk;
    if constexpr (turn < blocks * turns) {
      if (wanted == turn) spread_tokens<turn % turns * chunk, chunk, Shape::pitch, true>(staging, acc[0][turn / turns], Sum(1));
      spread_swapped<turn + 1>(wanted, staging, acc);
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
        places[i] = run_place<run>(m, rows, tile.below, n, column, columns);
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
    add_share<contractions, Shape::rows, Config::columns, Shape::sum_pitch, Config::most_splits, Shape::consumers, Sum>(
        base, smaller(rows - tile.row, Shape::rows), rank, splits, [&](int m, int n, const Sum (&sums)[contractions][8]) {
          const int live = smaller(8, columns - tile.column - n);
          if (live > 0) run_epilogue<(Config::regions > 1)>(epilogue, tile.region, tile.row + m, tile.column + n, sums, live);
        });
  }
};

}  // namespace jitgen
