// Derives threads, tiles and offsets in shared memory from a Config and a Weight of gemm_wgmma_quantized.cuh.
#pragma once

#include "jitgen/gemm_quant.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class Weight, int contractions>
struct QuantizedRegion {
  Weight weights[contractions];
  const TensorMap* codes[contractions];
  int columns;  // N
};

// Tokens that an epilogue stages at once: more of them wait less often, and fewer leave room for stages.
constexpr int staged_tokens(int tokens, int warpgroups, int contractions) {
  if (tokens % 32 != 0) return 16;
  return (tokens % 64 == 0 && warpgroups <= 2 ? 64 : 32) / contractions;
}

// The members that a Config may leave out.
struct QuantizedDefaults {
  static constexpr bool in_pairs = false;
  static constexpr int narrow = 0;
};

template <class Config, class Weight>
struct QuantizedShape {
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // the last warpgroup copies
  static constexpr int tiles = Config::warpgroups * Config::blocks * 4;  // tiles of 16 weight rows, of all contractions
  static constexpr int columns = tiles * 16 / Config::contractions;      // columns of the output

  static constexpr int contraction_blocks = Config::blocks / Config::contractions;
  static constexpr int contraction_tiles = tiles / Config::contractions;
  // The number of the first tile, within the thread block, of a warpgroup's block of 64 rows.
  static JITGEN_DEVICE int tile_of(int warpgroup, int block) {
    return block / contraction_blocks * contraction_tiles +
           (warpgroup * contraction_blocks + block % contraction_blocks) * 4;
  }

  // Sizes of one stage.
  static constexpr int span = Config::span;
  static constexpr int tile_bytes = 128 * Weight::bits * span;  // bytes of codes
  // Copies of the codes of a stage, of chunks one after another, and what a copy has of a tile: a box has at most 256 words
  // of a row.
  static constexpr int code_boxes = tile_bytes <= 1024 ? 1 : span, box_bytes = tile_bytes / code_boxes;
  static constexpr int item = sizeof(typename Weight::Element);  // bytes of an element of x
  static constexpr int boxes = span * item / 2;                  // copies of x, of 128 bytes along k
  static constexpr int x_bytes = Config::tokens * 128 * boxes;
  static constexpr int step_k = 32 / item;  // k's of one wgmma
  static constexpr int code_bytes = tiles * tile_bytes;
  static constexpr int chunk_bytes = code_boxes == 1 ? tile_bytes / span : code_bytes / span;  // to a tile's next chunk
  static constexpr bool group_scales = Weight::group != 0;
  // k's of a stage that certainly are of one group: all, 64, 32 or 16.
  static constexpr int part = Weight::group % (64 * span) == 0 ? 64 * span
                              : Weight::group % 64 == 0        ? 64
                              : Weight::group % 32 == 0        ? 32
                                                               : 16;
  static constexpr int parts = 64 * span / part;
  static constexpr int scale_bytes = group_scales ? tiles * parts * 16 * int(sizeof(typename Weight::Scale)) : 0;
  static constexpr int zero_bytes = Weight::zero_points ? tiles * parts * 16 * int(sizeof(typename Weight::Zero)) : 0;
  static constexpr int side_bytes = scale_bytes + zero_bytes;

  // Groups of a row in the layout, for a K of `depth`, which is padded to whole groups and then to whole chunks.
  static JITGEN_DEVICE int groups(int depth) {
    constexpr int group = Weight::group == 0 ? 64 : Weight::group;
    const int padded = (depth + group - 1) / group * group;
    return Weight::group == 0 ? 1 : Weight::groups((padded + 63) / 64);
  }

  // The epilogue stages a warpgroup's [contractions][chunk][64 columns]; each row is padded by 4 floats (banks).
  static constexpr int chunk = staged_tokens(Config::tokens, Config::warpgroups * Config::resident, Config::contractions);
  static constexpr int pitch = 68;
  static constexpr int staging_bytes = Config::warpgroups * Config::contractions * chunk * pitch * 4;

  static constexpr int codes_at = Config::stages * x_bytes;
  static constexpr int side_at = codes_at + Config::stages * code_bytes;
  static constexpr int staging_at = side_at + Config::stages * side_bytes;
  static constexpr int barriers_at = staging_at + staging_bytes;
  static constexpr int bytes = barriers_at + Config::stages * 16;

  // Where K is split, the partial sums, [contractions][tokens][columns], overwrite the stages.
  static constexpr int sum_pitch = columns + 4;
  static_assert(Config::most_splits == 1 || Config::contractions * Config::tokens * sum_pitch * 4 <= staging_at,
                "partial sums fit where the stages were");
  static constexpr bool in_pairs = Config::in_pairs;
  static constexpr int narrow = Config::narrow;
  static_assert(Config::stages >= 2, "a stage is released when the products of the next one have begun");
  static_assert(narrow % chunk == 0 && (narrow == 0 || (Config::most_splits == 1 && item == 2)), "tokens of a narrow tile");
  static constexpr int ranges = Config::ranges;
  static_assert(ranges == 1 || (Config::multicast == 1 && Config::most_splits == 1), "ranges of K");
  static_assert(Config::blocks % Config::contractions == 0 && tiles <= 32, "a lane copies a tile");
  static_assert(Config::most_splits == 1 || Config::multicast == 1, "a cluster has one purpose");
  static_assert(box_bytes <= 1024, "a tensor copy's box");
  static_assert(span * item % 2 == 0 && part >= step_k, "whole copies of x, and steps of one group");
  static_assert(Config::tokens % (8 * Config::multicast) == 0 && Config::tokens % chunk == 0, "tokens of a tile");
};

}  // namespace jitgen
