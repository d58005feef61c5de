// Decides which pieces of work a block takes, and which tiles of keys a piece walks.
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

JITGEN_DEVICE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
JITGEN_DEVICE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// The least and the greatest of an integer of each lane.
struct Ends {
  int64_t low, high;
};
JITGEN_DEVICE Ends ends_of_warp(Ends ends) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    ends.low = lesser(ends.low, __shfl_xor_sync(0xffffffffu, ends.low, step));
    ends.high = greater(ends.high, __shfl_xor_sync(0xffffffffu, ends.high, step));
  }
  return ends;
}

// The pieces of one block, in order: a piece is a block of rows of a task, and one range of its keys. The last rows of a
// sequence see most keys under most masks, so they come first, those of all tasks of a section, and blocks take pieces in
// alternating directions: who has a longer one in a round has a shorter one in the next. (With masks a section is all
// tasks. By simulation of causal masks blocks then differ by 1 % where there are several rounds, and by up to 6 % with
// small sections.) Without masks a section is one task, so that blocks share its keys and values in the cache.
struct Piece {
  int task, row_block, range;
};
struct PieceWalk {
  const int tasks, row_blocks, ranges, section;
  const int block, blocks;  // this block and all, or clusters of them that share pieces
  int round = 0;

  JITGEN_DEVICE int count() const { return tasks * row_blocks * ranges; }
  JITGEN_DEVICE int number() const { return round * blocks + (round % 2 ? blocks - 1 - block : block); }
  // Whether there is a piece in this round or in a later one.
  JITGEN_DEVICE bool more() const { return round * blocks < count(); }
  JITGEN_DEVICE bool live() const { return number() < count(); }
  JITGEN_DEVICE Piece piece() const {
    const int of_section = section * row_blocks * ranges;
    const int first = number() / of_section * section, left = number() % of_section;
    const int width = smaller(section, tasks - first);
    const int block = left / width;
    return {first + left % width, row_blocks - 1 - block / ranges, block % ranges};
  }
};

// What a warpgroup of consumers learns of a tile of keys: its number, whether the warpgroup's rows see any of it, whether no
// mask hides any of its scores, whether it is the last one that they see, as far as the producer knows, and whether it is
// the last one of its piece, for all. Packed: four bits for each of up to three warpgroups, and one for the end of the piece.
struct TileTicket {
  int tile;
  bool seen, open, last, ends;
  JITGEN_DEVICE TileTicket(uint64_t packed, int warpgroup)
      : tile(int(packed >> 16)),
        seen(packed >> 4 * warpgroup & 1),
        open(packed >> 4 * warpgroup & 2),
        last(packed >> 4 * warpgroup & 4 || packed >> 15 & 1),
        ends(packed >> 15 & 1) {}
  static JITGEN_DEVICE uint64_t of_warpgroup(bool seen, bool open, bool last, int warpgroup) {
    return uint64_t(int(seen) | int(open) << 1 | int(last) << 2) << 4 * warpgroup;
  }
  static JITGEN_DEVICE uint64_t of_tile(int tile) { return uint64_t(tile) << 16; }
  static constexpr uint64_t of_end = 1u << 15;
};

// Tiles `begin` to `end` of a piece, from the last to the first, without those that a mask hides as a whole. With masks,
// the lanes of a warp look at 32 tiles at once, for the rows of each warpgroup: all of them call `next`.
template <int warpgroups>
struct MaskedTiles {
  int group, begin, end;
  uint32_t seen[warpgroups] = {}, opened[warpgroups] = {};
  int tile = 0;
  uint64_t ticket = 0;
  bool open = false;  // for the first warpgroup

  JITGEN_DEVICE MaskedTiles(int begin, int end) : group((end + 31) / 32), begin(begin), end(end) {}

  // visibility(tile, exists, warpgroup), called by all lanes: bit 0 whether some score is seen, bit 1 whether all are, of a tile
  // that exists.
  template <class Visibility>
  JITGEN_DEVICE bool next(const Visibility& visibility) {
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < warpgroups; ++w) any |= seen[w];
    while (any == 0) {
      if (group * 32 <= begin) return false;
      --group;
      const int mine = group * 32 + int(threadIdx.x % 32);
#pragma unroll
      for (int w = 0; w < warpgroups; ++w) {
        const uint32_t bits = visibility(mine, mine >= begin && mine < end, w);
        seen[w] = __ballot_sync(0xffffffffu, bits & 1u);
        opened[w] = __ballot_sync(0xffffffffu, bits & 2u);
        any |= seen[w];
      }
    }
    const int bit = 31 - __clz(any);
    tile = group * 32 + bit;
    open = opened[0] >> bit & 1u;
    ticket = TileTicket::of_tile(tile);
#pragma unroll
    for (int w = 0; w < warpgroups; ++w) {
      const bool sees = seen[w] >> bit & 1u;
      seen[w] &= ~(1u << bit);
      ticket |= TileTicket::of_warpgroup(sees, opened[w] >> bit & 1u, seen[w] == 0 && group * 32 <= begin, w);
    }
    return true;
  }
};
// Every tile, in the same order.
template <int warpgroups>
struct AllTiles {
  int begin, tile;
  uint64_t ticket = 0;
  bool open = false;

  JITGEN_DEVICE AllTiles(int begin, int end) : begin(begin), tile(end) {}
  template <class Visibility>
  JITGEN_DEVICE bool next(const Visibility& visibility) {
    if (tile <= begin) return false;
    --tile;
    open = visibility(tile, true, 0) & 2u;
    ticket = TileTicket::of_tile(tile);
#pragma unroll
    for (int w = 0; w < warpgroups; ++w) ticket |= TileTicket::of_warpgroup(true, open, tile == begin, w);
    return true;
  }
};

// Tiles `begin` to `end`.
struct TileRange {
  int begin, end;
};
// Share `number` of `shares` equal ones of the tiles from the first to the last that masks leave, of `all`. Called by whole
// warps.
template <bool masked, class Visibility>
JITGEN_DEVICE TileRange share_of(const TileRange& all, int number, int shares, const Visibility& visibility) {
  int first = all.begin, count = all.end - all.begin;
  if (masked && shares > 1) {
    Ends seen = {all.end, 0};
    for (int tile = all.begin + int(threadIdx.x % 32); tile < all.end; tile += 32) {
      if (visibility(tile, true, 0) & 1u) seen = {lesser(seen.low, tile), tile + 1};
    }
    seen = ends_of_warp(seen);
    first = int(seen.low), count = seen.high > seen.low ? int(seen.high - seen.low) : 0;
  }
  return {first + int(int64_t(count) * number / shares), first + int(int64_t(count) * (number + 1) / shares)};
}

}  // namespace jitgen
