"""Describes the attention kernel of few rows, ``attention_decode.cuh``, in Python: a decoder's step on mma.sync."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitgen.families.attention.forward.clusters import MOST_BLOCKS, ReadFit, fastest_cluster
from jitgen.families.attention.forward.layout import PACKED_ROWS, AttentionGeometry, Layout
from jitgen.families.attention.rule.layout import TileGeometry
from jitgen.families.attention.rule.schedule import TileSchedule
from jitgen.ir.body import Body
from jitgen.kernel.operands import WARP
from jitgen.schedule.chips import Chip
from jitgen.schedule.declared import about

ROWS = 8
"""The rows of a tile: the n of a product."""
WARP_KEYS = 16
"""The keys of a warp: the m of a product."""
DEPTH_RUN, WIDTH_RUN = 32, 64
"""Elements of keys and of values that the lanes of a warp read at once."""
LANE_ELEMENTS = 8
"""Neighbours that a lane reads: 16 bytes."""
MOST_ROWS, MOST_DEPTH = 16, 128
"""Rows that share keys, and elements of a key and of a value, whose operands are in registers."""
SHORT_KEYS = 128
"""So few keys are read again by every block of more rows than ``MOST_ROWS``, a few at a time, where no block holds them
(``resident``)."""
SHORT_ROWS = ((64, 128), (256, 64))
"""Elements of a key and of a value at most, and the most rows for which these are read again. On an H200, in us, beside
the other kernel: B5 H24/6 M17 N25 D64 3.8 (5.7), B3 H12/6 M40 N50 D128 3.9 (5.8), B3 H8/2 M9 N100 D256 5.4 (9.7)."""
FIT = ReadFit(rate=60e9, piece=1.5e-6, exchange=1e-6)
"""Fitted to timings on an H200 (``bench/attention_schedules.py``)."""


@dataclass(frozen=True)
class DecodeSchedule(TileSchedule):
    """Schedules few rows, whose keys are read into registers.

    Attributes:
        warps: of a block, with 16 keys of a tile each.
        row_tiles: rows of a block, in eights.
        block_d, block_e: D and E, rounded up.
        whole: whether they are these.
        blocks: of a multiprocessor, for which there are registers.
        ahead: tiles of a warp that are in registers at once.
    """

    sentence = ("mma.sync, {block_m} rows a block, {warps} warps, tiles of {block_n} keys", *TileSchedule.shared_words)
    config = ("warps", "row_tiles", "ahead", "depth", "width", "most_splits", "whole", "masked")
    warps: int
    row_tiles: int
    block_d: int = field(metadata=about(member="depth"))
    block_e: int = field(metadata=about(member="width"))
    whole: bool
    blocks: int
    ahead: int

    @property
    def copied(self) -> tuple[bool, bool, bool]:
        """Returns whether tensor maps copy the query, the keys and the values."""
        return False, False, False

    @property
    def block_m(self) -> int:
        """Returns the rows of a block."""
        return self.row_tiles * ROWS

    @property
    def block_n(self) -> int:
        """Returns the keys of a tile."""
        return self.warps * WARP_KEYS

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, as the header's ``DecodeShape::bytes``."""
        warp_floats = self.block_m * (self.block_e + 4) + 3 * self.block_m
        inbox = 0
        if self.cluster_splits > 1:
            runs = self.block_m * (self.block_e // 8)
            inbox = (runs + self.cluster_splits) * 8 + self.cluster_splits * self.block_m * 2
        return (self.warps * warp_floats + inbox) * 4

    def persistence(self, sharing: int) -> None:
        """Returns None: a block has one block of rows."""

    def cluster(self, geometry: TileGeometry, chip: Chip) -> int:
        return fastest_cluster(self, geometry, chip, FIT, self.blocks)


def candidates(body: Body, layout: Layout, geometry: AttentionGeometry, most_rows: int) -> list[DecodeSchedule]:
    """Returns the schedules for a kernel with this body; none if it is not for this mainloop. ``most_rows``: the most
    rows that share keys in the bucket of this call.

    Blocks of eight warps with two tiles each read as fast as an H200's memory: H32/8 D128, in us (cuDNN's): B16 N2048
    34.7 (34.8), B16 N8192 124 (124), B64 N4096 243 (243). Ranges of keys are so short that three smaller blocks on a
    multiprocessor are faster: B1 N8192 13.9 with 32 ranges, where eight warps take 14.3 to 15.0 with 16, and a cluster
    of eight blocks for each task 15.5.
    """
    kinds = [sorted(layout.operands[index] for index in contraction.weight) for contraction in body.contractions]
    # Of what a key is computed from, one is contiguous, and others are the same for all elements of a key.
    reads_runs = all(kind[0] == "contiguous" and set(kind[1:]) <= {"key"} for kind in kinds)
    large = max(geometry.depth, geometry.width)
    few = large <= MOST_DEPTH and most_rows <= MOST_ROWS
    short_rows = next((rows for most, rows in SHORT_ROWS if large <= most), 0)
    # Wide heads are read again for the rows of one head only if these are few: there are many such heads.
    is_short = not few and geometry.keys <= SHORT_KEYS and most_rows <= short_rows
    is_short = is_short and (large <= MOST_DEPTH or geometry.rows <= PACKED_ROWS)
    if not (few or is_short) or not reads_runs or layout.unit < LANE_ELEMENTS:
        return []
    deep, wide = (-(-max(n, 1) // run) * run for n, run in ((geometry.depth, DEPTH_RUN), (geometry.width, WIDTH_RUN)))
    splits = body.contractions[1].k_splits
    warps, blocks, ahead = (4, 3, 1) if splits > 1 else (8, 1, 2 if most_rows <= ROWS else 1)
    row_tiles = -(-most_rows // ROWS)
    if is_short:
        warps, row_tiles, ahead = 4, 1 if large > 64 or most_rows <= 32 else 2, 1
    return [
        DecodeSchedule(
            warps=warps,
            row_tiles=row_tiles,
            block_d=deep,
            block_e=wide,
            whole=(deep, wide) == (geometry.depth, geometry.width),
            blocks=blocks if most_rows <= ROWS else 1,
            ahead=ahead,
            splits=splits,
            cluster_splits=MOST_BLOCKS,
            wide=layout.wide,
        )
    ]
