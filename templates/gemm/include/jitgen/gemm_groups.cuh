// How a block of a grouped product finds its group: by offsets, the ends of the groups, or by the ids of rows. Offsets
// that descend or exceed the rows are cut to these, so nothing is read or written outside.
#pragma once

#include "jitgen/dependent_launch.cuh"

namespace jitgen {

struct GroupRange {
  int64_t begin;
  int64_t end;
};

// A tile of rows. `group` is -1 for rows of no group, `tile` counts the tiles of its group, and is -1 for no tile.
struct GroupTile {
  int group;
  int begin;  // of the group's rows
  int end;
  int tile;
};

JITGEN_DEVICE int64_t cut_to(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

// Where group number `group` begins and ends within `total`; one behind the last has the rest.
template <class Integer>
JITGEN_DEVICE GroupRange range_of_group(const Integer* ends, int64_t stride, int64_t groups, int64_t total, int64_t group) {
  const int64_t begin = group == 0 ? 0 : cut_to(int64_t(ends[(group - 1) * stride]), 0, total);
  return {begin, group == groups ? total : cut_to(int64_t(ends[group * stride]), begin, total)};
}

// The tiles that a launch has for `groups` groups: those of whole blocks, and one more for each group and for the rows of
// none.
template <int block>
JITGEN_DEVICE int most_tiles(int groups, int rows) {
  return rows / block + (groups < rows ? groups + 1 : rows);
}

// The tiles of all groups, of `block` rows each, and of the rows of none. By whole warps.
template <int block, class Integer>
JITGEN_DEVICE int tiles_of_groups(const Integer* ends, int64_t stride, int groups, int rows) {
  uint32_t tiles = 0;
#pragma unroll 4
  for (int group = threadIdx.x % 32; group <= groups; group += 32) {
    const GroupRange range = range_of_group(ends, stride, groups, rows, group);
    tiles += uint32_t(range.end - range.begin + block - 1) / block;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, step);
  return int(tiles);
}

// The group of tile number `tile`, where each group has tiles of `block` rows of its own. Each warp looks for it among
// 128 groups at a time, of which a lane has neighbours: no block has anything to do before it knows.
template <int block, class Integer>
JITGEN_DEVICE GroupTile group_of_tile(const Integer* ends, int64_t stride, int groups, int rows, int tile) {
  constexpr int own = 4;  // groups of a lane
  const int lane = threadIdx.x % 32;
  uint32_t ahead = 0;  // the end of the group before these
  for (int first = 0; first <= groups; first += 32 * own) {
    uint32_t bounds[own + 1], tiles[own], sum = 0;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int group = first + lane * own + i;
      bounds[i + 1] = group < groups ? uint32_t(cut_to(int64_t(ends[group * stride]), 0, rows)) : uint32_t(rows);
    }
    bounds[0] = __shfl_up_sync(0xffffffffu, bounds[own], 1, 32);
    if (lane == 0) bounds[0] = ahead;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const uint32_t begin = bounds[i], end = bounds[i + 1];
      tiles[i] = end < begin ? 0 : (end - begin + block - 1) / block;
      sum += tiles[i];
    }
    uint32_t upto = sum;  // tiles of the groups from the first of these on
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(0xffffffffu, upto, step, 32);
      if (lane >= step) upto += before;
    }
    const unsigned behind = __ballot_sync(0xffffffffu, upto > uint32_t(tile));
    if (behind != 0) {
      const int at = __ffs(int(behind)) - 1;
      int number = 0, left = tile - int(upto - sum);  // of the lane's groups, and the tile within that group
      uint32_t begin = bounds[0], end = bounds[1];
#pragma unroll
      for (int i = 1; i < own; ++i) {
        if (number == i - 1 && left >= int(tiles[i - 1])) {
          number = i;
          left -= int(tiles[i - 1]);
          begin = bounds[i];
          end = bounds[i + 1];
        }
      }
      const int group = first + at * own + __shfl_sync(0xffffffffu, number, at);
      const int from = int(__shfl_sync(0xffffffffu, begin, at)), to = int(__shfl_sync(0xffffffffu, end, at));
      return {group < groups ? group : -1, from, to, __shfl_sync(0xffffffffu, left, at)};
    }
    ahead = __shfl_sync(0xffffffffu, bounds[own], 31);
    tile -= int(__shfl_sync(0xffffffffu, upto, 31));
  }
  return {-1, 0, 0, -1};
}

// Row number `row` alone, of the group that its id says; a negative one counts from the end. The id is read past the
// L1 cache, which may have that of an earlier kernel where this one has not waited.
template <class Integer>
JITGEN_DEVICE GroupTile group_of_id(const Integer* ids, int64_t stride, int groups, int row) {
  const int64_t id = int64_t(static_cast<const volatile Integer*>(ids)[row * stride]), group = id < 0 ? id + groups : id;
  return {group >= 0 && group < groups ? int(group) : -1, row, row + 1, 0};
}

}  // namespace jitgen
