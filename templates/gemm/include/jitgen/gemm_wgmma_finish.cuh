// From the accumulators of the quantised wgmma mainloop, whose rows are output columns, to the epilogue on runs of
// consecutive columns. Sums are staged in shared memory, a warpgroup's 64 columns of some tokens at a time. Where K is
// split among the blocks of a cluster, they exchange sums through distributed shared memory.
#pragma once

#include "jitgen/gemm_wgmma_decode.cuh"
#include "jitgen/gemm_wgmma_results.cuh"
#include "jitgen/gemm_wgmma_shape.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"
#include "jitgen/lanes.cuh"

namespace jitgen {

// Of a tile of `tokens` tokens, whole turns of `Shape::chunk`.
template <class Config, class Weight, class Epilogue, int tokens = Config::tokens>
struct QuantizedFinish {
  using Shape = QuantizedShape<Config, Weight>;
  using Region = QuantizedRegion<Weight, Config::contractions>;
  using Sums = float[Config::blocks][tokens / 2];
  static constexpr int blocks = Config::blocks, contractions = Config::contractions;

  const Epilogue& epilogue;
  const int rows;
  const int rank;    // this block's, in the cluster
  const int splits;  // blocks of the cluster
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`

  JITGEN_DEVICE void run(const TilePlace& tile, int m, int n, const float (&acc)[contractions][8], int columns) const {
    const int live = smaller(8, columns - n);
    if (m >= rows || live <= 0) return;
    run_epilogue<(Config::regions > 1)>(epilogue, tile.region, tile.below + m, n, acc, live);
  }

  // With one scale per row, or a factor besides the scales, the sums are scaled, in float32.
  JITGEN_DEVICE void scale_rows(Sums& acc, const TilePlace& tile, const Region& region) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int t = tile.column / 16 + Shape::tile_of(warp / 4, b) % Shape::contraction_tiles + warp % 4;
      float2 scale = {0.0f, 0.0f};
      if (t * 16 < region.columns) {
        const Weight& weight = region.weights[b / Shape::contraction_blocks];
        scale = {1.0f, 1.0f};
        if constexpr (!Shape::group_scales) {
          scale = Weight::load_pair(weight.scales + int64_t(t) * 16 + lane / 4 * 2);
          scale.x *= Decode<Weight>::shrunk;
          scale.y *= Decode<Weight>::shrunk;
        }
        if constexpr (Weight::factored) {
          scale.x *= weight.factors[t * 16 + lane / 4];
          scale.y *= weight.factors[t * 16 + lane / 4 + 8];
        }
      }
#pragma unroll
      for (int i = 0; i < tokens / 2; ++i) acc[b][i] *= i % 4 < 2 ? scale.x : scale.y;
    }
  }

  // The factor of the sums of what fragments have, where no scale of a row has it.
  static constexpr float grown = Shape::group_scales ? Decode<Weight>::shrunk : 1.0f;

  // Of products of codes, whose rows have scales: computes all results of a block as their sums lie in registers, so that
  // what they read is read at once, and stages the results, which are half as many bytes as the sums.
  JITGEN_DEVICE void finish_in_registers(const TilePlace& tile, const Sums& acc, int columns) const {
    using One = typename Epilogue::template Results<1>;
    using Eight = typename Epilogue::template Results<8>;
    static_assert(sizeof(One) == 2 && sizeof(Eight) == 16 && Config::regions == 1, "one result of 16 bits");
    constexpr int area = contractions * Shape::chunk * Shape::pitch * 4, most = area / 2048 * 16;  // tokens staged at once
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
    uint8_t* const staging = memory + Shape::staging_at + warpgroup * area;
    if (tile.column >= columns) return;  // the last blocks of a cluster that shares x may have no columns
#pragma unroll
    for (int block = 0; block < Shape::contraction_blocks; ++block) {
      const int first = tile.column + (warpgroup * Shape::contraction_blocks + block) * 64;
      One all[tokens / 2];
#pragma unroll
      for (int i = 0; i < tokens / 2; ++i) {
        const int m = tile.row + i / 4 * 8 + lane % 4 * 2 + i % 2, n = first + warp * 16 + lane / 4 + i % 4 / 2 * 8;
        float sums[contractions][1];
#pragma unroll
        for (int c = 0; c < contractions; ++c) sums[c][0] = acc[c * Shape::contraction_blocks + block][i] * grown;
        all[i] = epilogue.template results<1>(tile.below + smaller(m, rows - 1), smaller(n, columns - 1), sums, 1);
      }
      // A token's runs of eight columns are permuted, so that neither results nor reads of runs meet in a bank.
#pragma unroll
      for (int begin = 0; begin < tokens; begin += most) {
        if (tile.row + begin >= rows) continue;
        group_barrier<128>(1 + warpgroup, "staging of a warpgroup");
#pragma unroll
        for (int i = begin / 2; i < (begin + most) / 2; ++i) {
          if (i >= tokens / 2) continue;
          const int token = i / 4 * 8 - begin + lane % 4 * 2 + i % 2, run = warp * 2 + i % 4 / 2;
          *reinterpret_cast<One*>(staging + token * 128 + (run ^ token % 8) * 16 + lane / 4 * 2) = all[i];
        }
        group_barrier<128>(1 + warpgroup, "staging of a warpgroup");
        const int run = thread % 8, n = first + run * 8;
        Words<Eight> eights[most / 16];  // all are read before the first is stored: one latency for all of them
#pragma unroll
        for (int i = 0; i < most / 16; ++i) {
          if (begin + i * 16 >= tokens) continue;
          const int token = i * 16 + thread / 8;
          const uint4 words = *reinterpret_cast<const uint4*>(staging + token * 128 + (run ^ token % 8) * 16);
          eights[i].word[0] = words.x, eights[i].word[1] = words.y, eights[i].word[2] = words.z, eights[i].word[3] = words.w;
        }
#pragma unroll
        for (int i = 0; i < most / 16; ++i) {
          if (begin + i * 16 >= tokens) continue;
          const int m = tile.row + begin + i * 16 + thread / 8;
          if (m < rows && n < columns) epilogue.template store<8>(tile.below + m, n, eights[i].whole, smaller(8, columns - n));
        }
      }
    }
  }

  JITGEN_DEVICE void finish(const TilePlace& tile, const Sums& acc, int columns) const {
    if (tile.column >= columns) return;  // the last blocks of a cluster that shares x may have no columns
    if constexpr (Shape::in_pairs && Shape::item == 1) {
      finish_in_registers(tile, acc, columns);
    } else if constexpr (Shape::in_pairs) {
        const int warpgroup = threadIdx.x / 128, first = tile.column + warpgroup * blocks * 64;
      finish_in_pairs_of_tokens<blocks, tokens, Shape::chunk>(
          epilogue, [&](int block, int i) { return acc[block][i] * grown; }, tile.row, rows, tile.below, first, columns,
          memory, base, Shape::staging_at + warpgroup * (Shape::chunk * Shape::pitch * 4), 1 + warpgroup);
    } else {
      finish_staged(tile, acc, columns);
    }
  }
  JITGEN_DEVICE void finish_staged(const TilePlace& tile, const Sums& acc, int columns) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, area = chunk * pitch;
    const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
    float* const staging = reinterpret_cast<float*>(memory + Shape::staging_at) + warpgroup * contractions * area;
#pragma unroll 1
    for (int turn = 0; turn < Shape::contraction_blocks * (tokens / chunk); ++turn) {
      const int row = tile.row + turn % (tokens / chunk) * chunk;
      if (row >= rows) continue;
      group_barrier<128>(1 + warpgroup, "staging of a warpgroup");
      unrolled<0>(turn, staging, acc);
      group_barrier<128>(1 + warpgroup, "staging of a warpgroup");
      const int block = turn / (tokens / chunk);
      const int column = tile.column + (warpgroup * Shape::contraction_blocks + block) * 64 + thread % 8 * 8;
      float sums[chunk / 16][contractions][8];  // all are read before the first is stored: one latency for all of them
#pragma unroll
      for (int i = 0; i < chunk / 16; ++i) {
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          const float* const from = staging + c * area + (i * 16 + thread / 8) * pitch + thread % 8 * 8;
          gather(sums[i][c], from + thread % 8 / 4 * 4, from + (1 - thread % 8 / 4) * 4);
        }
      }
      if constexpr (Config::regions == 1) {
        RunPlace places[chunk / 16];
#pragma unroll
        for (int i = 0; i < chunk / 16; ++i) {
          places[i] = run_place<8>(row + i * 16 + thread / 8, rows, tile.below, column, tile.column, columns);
        }
        run_epilogues(epilogue, places, sums);
      } else {
#pragma unroll
        for (int i = 0; i < chunk / 16; ++i) run(tile, row + i * 16 + thread / 8, column, sums[i], columns);
      }
    }
  }
  // Registers can be indexed by constants only. So there is code for every turn, and only that of `wanted` is executed.
  template <int turn>
  static JITGEN_DEVICE void unrolled(int wanted, float* staging, const Sums& acc) {
    constexpr int turns = tokens / Shape::chunk;
    if constexpr (turn < Shape::contraction_blocks * turns) {
      if (wanted == turn) {
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          spread_tokens<turn % turns * Shape::chunk, Shape::chunk, Shape::pitch, true>(
              staging + c * Shape::chunk * Shape::pitch, acc[c * Shape::contraction_blocks + turn / turns], grown);
        }
      }
      unrolled<turn + 1>(wanted, staging, acc);
    }
  }

  // Where K is split: each block writes its sums to its own shared memory; block r adds its share of them, by rank.
  JITGEN_DEVICE void leave(const Sums& acc) const {
    constexpr int pitch = Shape::sum_pitch;
    // The stages are not read any more. (A barrier of its own: another warpgroup may still stage the tile before.)
    group_barrier<Shape::consumers>(1 + Config::warpgroups, "end of the stages");
    float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int column = Shape::tile_of(threadIdx.x / 128, b) % Shape::contraction_tiles * 16;
      spread_tokens<0, tokens, pitch, false>(sums + b / Shape::contraction_blocks * tokens * pitch + column, acc[b], grown);
    }
  }
  JITGEN_DEVICE void finish_split(const TilePlace& tile, int columns) const {
    add_share<contractions, tokens, Shape::columns, Shape::sum_pitch, Config::most_splits, Shape::consumers, float>(
        base, smaller(rows - tile.row, tokens), rank, splits, [&](int token, int column, const float (&sums)[contractions][8]) {
          run(tile, tile.row + token, tile.column + column, sums, columns);
        });
  }
};

}  // namespace jitgen
