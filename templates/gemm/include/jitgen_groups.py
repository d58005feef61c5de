"""How a program of a grouped product finds its group: by offsets, the ends of the groups, or by the ids of rows.

Offsets that descend or exceed the rows are cut to these, so nothing is read or written outside.
"""

import triton
import triton.language as tl


@triton.jit
def range_of_group(ends, stride, group, total):
    """Where group ``group`` begins and ends within ``total``, by the ends of the groups; cut to what there is."""
    before = tl.load(ends + (group - 1) * stride, mask=group > 0, other=0)
    begin = tl.minimum(tl.maximum(before, 0), total)
    end = tl.minimum(tl.maximum(tl.load(ends + group * stride), begin), total)
    return begin.to(total.dtype), end.to(total.dtype)


@triton.jit
def group_of_tile(ends, stride, groups, rows, tile, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The group of a tile of BLOCK rows, where each group has tiles of its own: its number, the first row of the tile,
    and the end of the group. -1 for rows behind the last group, and where there is no such tile, which has no rows."""
    number = tl.arange(0, SLOTS)
    before = tl.load(ends + (number - 1) * stride, mask=(number > 0) & (number <= groups), other=0)
    last = tl.load(ends + number * stride, mask=number < groups, other=0)
    begin = tl.minimum(tl.maximum(before, 0), rows).to(tl.int32)
    end = tl.where(number == groups, rows, tl.minimum(tl.maximum(last, begin), rows)).to(tl.int32)
    tiles = tl.where(number <= groups, (end - begin + (BLOCK - 1)) // BLOCK, 0)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(number < group, tiles, 0), 0)
    row = tl.sum(tl.where(number == group, begin, 0), 0) + (tile - first) * BLOCK
    end = tl.sum(tl.where(number == group, end, 0), 0)
    return tl.where(group < groups, group, -1), row, end


@triton.jit
def group_of_id(ids, stride, groups, rows, tile):
    """The group of row ``tile``, that row, and the end of its group, which is the next row; -1 where the id is none."""
    group = tl.load(ids + tile * stride).to(tl.int32)
    group = tl.where(group < 0, group + groups, group)
    return tl.where((group >= 0) & (group < groups), group, -1), tile, tile + 1
