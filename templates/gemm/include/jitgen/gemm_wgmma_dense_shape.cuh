// What the dense mainloop on wgmma (gemm_wgmma_dense.cuh) is compiled for: a Config, the shape of a block that follows from
// it, the regions and scales that a launch passes, and where an epilogue stages columns in shared memory.
//
//   struct Config : jitgen::DenseDefaults {
//     using Element = jitgen::bfloat16;       // of x and the weights: bfloat16, float16 or a Bytes (wgmma_bytes.cuh)
//     static constexpr int down = 2;          // consumer warpgroups along M
//     static constexpr int across = 1;        // consumer warpgroups along N
//     static constexpr int columns = 256;     // of a tile, per contraction; columns / across is one wgmma's n: 32, 64,
//                                             // 96, 128, 192, 256; times contractions at most 256
//     static constexpr int contractions = 1;  // weights that share x and have equal N
//     static constexpr int regions = 1;       // weights of different N, each with its own outputs
//     static constexpr int stages = 4;        // stages of the ring, of 128 bytes along k each
//     static constexpr int multicast = 2;     // blocks of a cluster that share a weight's tile, or x's: 1, 2, 4
//     static constexpr bool shares_x = false; // whether they share x's tile, and compute tiles side by side
//     static constexpr int most_splits = 1;   // the most blocks of a cluster that split K: 1 to 8; with multicast equal
//                                             // to it. A launch without multicast may have fewer
//     static constexpr bool transposed = false;  // whether weights are [K, N], with stride 1 along n; of 16 bits alone
//     static constexpr bool trimmed = false;  // whether x's box has no more rows than x. Rows outside a matrix, which
//                                             // become zeros, take the copy engine longer
//     static constexpr bool pingpong = false; // whether two consumer warpgroups compute tiles in turn, each of `down`
//                                             // blocks of 64 rows, with across = 1 and most_splits = 1
//     static constexpr int ranges = 1;        // ranges of K whose sums the epilogue gets separately, those of range r as
//                                             // rows r * M ..; above 1 with most_splits = 1, without pingpong, and
//                                             // not of a batch
//     static constexpr int raster = 8;        // clusters of row tiles walked before the next column tile
//     static constexpr int resident = 1;      // blocks that a multiprocessor holds at once
//     static constexpr int staged = 64;       // columns of all contractions that an epilogue stages at once: 64, which
//                                             // of 16 bits are a whole line of memory, or 32
//     static constexpr int run = 8;           // neighbouring columns of one call of the epilogue: 8, or 4 where all
//                                             // results have four bytes, so that lanes store without gaps
//     // The others have the values of DenseDefaults where a Config says none:
//     static constexpr bool swapped = true;   // whether x and the weight change places: the rows of a tile are then those
//                                             // of the weight and its columns those of x, so that a tile has any of
//                                             // wgmma's n's of x's rows. Of one region and contraction, of no groups,
//                                             // and with most_splits = 1
//     static constexpr int blocks = 2;        // blocks of 64 rows of a warpgroup; 1 with pingpong
//     static constexpr int other_multicast = 2;  // blocks that share the tile of the other operand: with it a cluster is a
//                                             // rectangle of blocks, and no blocks split K
//     static constexpr bool x_transposed = true;  // whether x is [K, M], with stride 1 along m; of 16 bits alone, of no
//                                             // groups
//     static constexpr bool scaled = true;    // whether blocks of 128 k's have scales, as BlockScales says
//     static constexpr bool in_pairs = true;  // whether the one result has 16 bits and is computed as the sums lie in
//                                             // registers, two neighbouring columns at a time, or, swapped, two rows of
//                                             // a column (gemm_wgmma_results.cuh), with one contraction
//     static constexpr bool at_once = true;   // with it, of bytes, whether the epilogue reads anything: then all results of
//                                             // a thread are computed before the first is staged
//   };
#pragma once

#include "jitgen/lanes.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <int contractions>
struct DenseRegion {
  const TensorMap* weights[contractions];
  int columns;  // N
};

// Scales of blocks of `scale_block` k's, of which one stage has one: of x (rows, K / scale_block), of a weight
// (N / scale_block, K / scale_block), or of both. The sums of a stage, times its scales, are added up in float32.
constexpr int scale_block = 128;
// The scales of one weight: from one row of them to the next, along it, and from one group's to the next.
struct WeightScales {
  const float* first;
  int64_t row, step, group;
};
// `contractions` weights have scales of their own. With `grouped` they are those of `groups` matrices, one after another.
template <bool of_x, bool of_weight, bool grouped = false, int contractions = 1>
struct BlockScales {
  static constexpr bool any = of_x || of_weight;
  const float* x;
  int64_t x_row, x_step;
  WeightScales weights[contractions];
  int groups;

  static constexpr bool of_rows = of_x, of_blocks = of_weight;
  // The scales of a row, and those of a block of columns of a group's weight: null where all are 1. Those of rows of no
  // group, whose sums are 0, are any.
  JITGEN_DEVICE const float* of_row(int row) const { return of_x ? x + row * x_row : nullptr; }
  JITGEN_DEVICE const float* of_columns(int group, int contraction, int block) const {
    const WeightScales& own = weights[contraction];
    return of_weight ? own.first + (grouped && group < groups ? group * own.group : 0) + block * own.row : nullptr;
  }
};
using NoScales = BlockScales<false, false>;

// Whether an epilogue quantises what it computes in blocks of `scale_block` columns of a row. It then has three steps:
//   before<W>(m, n, acc, live, kept, extremes)  computes `held` numbers of each of W columns, and one that is combined
//                                               over their block by `Extremum`
//   of_block(m, block, extremum)                stores the scale of a block
//   codes<W>(kept, extremum)                    returns the codes of W columns, which store<W>(m, n, codes, live) stores
template <class Epilogue, class = void>
struct IsInBlocks {
  static constexpr bool value = false;
};
template <class Epilogue>
struct IsInBlocks<Epilogue, decltype(void(Epilogue::held))> {
  static constexpr bool value = true;
};

// Four lanes have two neighbouring bytes of each of four runs of eight bytes, those of run r in half r % 2 of word r / 2;
// lane q gets all of run q.
JITGEN_DEVICE void gather_runs_of_four_lanes(uint32_t (&words)[2]) {
  const int lane = threadIdx.x % 4;
  const bool upper = lane & 2, odd = lane & 1;
  const uint32_t kept = upper ? words[1] : words[0], got = from_lane(upper ? words[0] : words[1], 2);
  const uint32_t low = upper ? got : kept, high = upper ? kept : got;
  const uint32_t mine = __byte_perm(low, high, odd ? 0x7632 : 0x5410);
  const uint32_t others = from_lane(__byte_perm(low, high, odd ? 0x5410 : 0x7632), 1);
  const uint32_t even = odd ? others : mine, uneven = odd ? mine : others;
  words[0] = __byte_perm(even, uneven, 0x5410);
  words[1] = __byte_perm(even, uneven, 0x7632);
}

// Where an epilogue stages `chunk` columns of a warp's 16 rows: the first of the eight columns `run` of a row. Runs are
// permuted so that neither the accumulators' pairs nor 16-byte reads of neighbouring runs meet in a bank of shared memory.
template <int chunk>
JITGEN_DEVICE int staged_run(int row, int run) {
  constexpr int runs = chunk / 8;
  return row * runs + (run ^ (chunk >= 32 ? row : row / 2) % runs);
}
// The same of one column: `within` its run.
JITGEN_DEVICE int staged_column(int run, int within) { return run * 8 + (within ^ (run & 4)); }

// The members that a Config may leave out.
struct DenseDefaults {
  static constexpr bool swapped = false, x_transposed = false, scaled = false, in_pairs = false, at_once = false;
  static constexpr int blocks = 1, other_multicast = 1;
};

// The k's of a copy of a tile that lies along its `columns`, of 64 of these: all of a stage's, or so many that the copies
// divide among `shares` blocks, a power of two.
constexpr int transposed_depth(int columns, int shares) {
  for (; shares > 1 && columns % 128 == 0; columns /= 2) shares /= 2;
  return 64 / shares;
}

template <class Config>
struct DenseShape {
  static constexpr int depth = 128 / int(sizeof(typename Config::Element));  // k's of a stage
  static constexpr bool pingpong = Config::pingpong;
  static constexpr bool swapped = Config::swapped;
  // Of what the mainloop has for x and for the weight.
  static constexpr bool x_transposed = swapped ? Config::transposed : Config::x_transposed;
  static constexpr bool transposed = swapped ? Config::x_transposed : Config::transposed;
  static constexpr int group_blocks = Config::blocks;
  static constexpr int other_multicast = Config::other_multicast;
  static constexpr int warpgroups = pingpong ? 2 : Config::down * Config::across;
  static constexpr int blocks = pingpong ? Config::down : group_blocks;  // of 64 rows, of a warpgroup
  static constexpr int tile_warps = pingpong ? 4 : warpgroups * 4;  // that compute a tile
  static constexpr int consumers = warpgroups * 128;
  static constexpr int threads = consumers + 128;  // the last warpgroup copies
  static constexpr int group_rows = group_blocks * 64;  // of a warpgroup, where several compute a tile
  static constexpr int rows = Config::down * group_rows;
  static constexpr int width = Config::columns / Config::across;  // columns of a warpgroup
  // Columns whose products a warpgroup has beside its sums, where these are promoted: more would take registers.
  static constexpr int slice = width > 160 && width % 32 == 0 ? width / 2 : width, slices = width / slice;

  static constexpr int x_bytes = rows * 128;
  static constexpr int weight_bytes = Config::columns * 128;
  static constexpr int stage_bytes = x_bytes + weight_bytes * Config::contractions;

  // The epilogue stages a warp's [contractions][16 rows][chunk columns]; swapped, a warpgroup's [chunk columns][64 rows],
  // each column padded by four numbers (banks).
  static constexpr int chunk = Config::staged / Config::contractions;
  static constexpr int pitch = 68;
  static constexpr int staging_bytes =
      swapped ? warpgroups * chunk * pitch * 4 : consumers / 32 * Config::contractions * 16 * chunk * 4;

  static constexpr int staging_at = Config::stages * stage_bytes;
  static constexpr int barriers_at = staging_at + staging_bytes;

  // The scales of a stage: one of each row of the tile, and one of each slice of its columns, of all contractions.
  static constexpr bool scaled = Config::scaled;
  static constexpr int pieces = slices * Config::across * Config::contractions;
  static constexpr int stage_scales = scaled ? rows + (pieces + 3) / 4 * 4 : 0;
  static constexpr int scales_at = barriers_at + Config::stages * 16;
  static constexpr int bytes = scales_at + Config::stages * stage_scales * 4;
  static_assert(!scaled || (rows % 32 == 0 && pieces <= 32), "a warp copies the scales of a stage");
  static constexpr bool in_pairs = Config::in_pairs, at_once = Config::at_once;

  // Where K is split, the partial sums, [contractions][rows][columns], overwrite the stages.
  static constexpr int sum_pitch = Config::columns + 8;
  static_assert(Config::most_splits == 1 || Config::contractions * rows * sum_pitch * 4 <= staging_at,
                "partial sums fit where the stages were");
  static_assert(!swapped || (Config::contractions == 1 && Config::regions == 1 &&
                                     Config::run == 8 && Config::most_splits == 1),
                "one product is swapped, and its blocks do not split K");
  static_assert(Config::stages >= 2, "a stage is released when the products of the next one have begun");
  static_assert(width % chunk == 0 && width * Config::contractions <= 256, "columns of a thread");
  static constexpr int ranges = Config::ranges;
  static_assert(ranges == 1 || (Config::most_splits == 1 && !pingpong), "ranges of K");
  static_assert(blocks * width * Config::contractions <= 384, "accumulators of a thread");
  static_assert(!pingpong || (Config::across == 1 && Config::most_splits == 1), "a warpgroup computes all of a tile");
  // Of each operand's tile, the pieces that the blocks of a cluster copy for all of them.
  static constexpr int cluster = Config::multicast * other_multicast;
  static constexpr int x_shares = Config::shares_x != swapped ? Config::multicast : other_multicast;
  static constexpr int weight_shares = cluster / x_shares;
  static_assert(other_multicast == 1 || Config::most_splits == 1, "the blocks of a rectangle do not split K");
  static_assert(!pingpong || group_blocks == 1, "a warpgroup has `down` blocks then");
  static_assert(x_transposed || rows % (8 * x_shares) == 0, "shares of x's tile begin with a row of the swizzle");
  static_assert(Config::columns % (transposed ? 64 : 8) == 0, "shares of a weight's tile");
  // Multiples of 8, the rows of the swizzle.
  static constexpr int x_depth = transposed_depth(rows, x_shares), weight_depth = transposed_depth(Config::columns, weight_shares);
  // Columns of a piece of a weight's tile. The last piece overlaps the one before it where the pieces are more than the
  // tile: both write the same numbers there.
  static constexpr int weight_piece = (Config::columns / 8 + weight_shares - 1) / weight_shares * 8;
  static constexpr int copied_weight_bytes = transposed ? weight_bytes : weight_piece * weight_shares * 128;
  static_assert(!transposed || (width % 64 == 0 && depth == 64), "a transposed operand lies in runs of 64 columns");
  static_assert(!x_transposed || depth == 64, "operands are transposed of 16 bits");
};

}  // namespace jitgen
