"""Describes the attention kernel of many rows and few keys, ``attention_resident.cuh``, in Python.

On an H200 it moves 1.7 to 3.5 TB/s where queries and results are 20 MB and more and keys 160 and fewer, and
``Tensor.copy_`` up to 4.2 (``docs/measured/h200-few-keys.json``).
What was tried and left, of its time: queries read with the hint evict_first 0.98 to 1.07; results stored as streams
0.95 to 1.01; a block's pieces in runs of twelve, with runs of other blocks between them, 0.96 to 1.32; one tile of the
query for each warpgroup 0.91 to 1.11; and, before results were computed in pairs, two blocks of one warpgroup 0.92 to
1.24, and with heads of 64 elements three of one or two of two 0.86 to 1.19.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.rule.cuda import RUN
from jitgen.families.attention.rule.wgmma import CHUNK, ROWS, SHARED_BYTES, WgmmaTiles
from jitgen.ir.body import Body
from jitgen.kernel.launch import Persistence
from jitgen.kernel.operands import item_size
from jitgen.schedule.declared import about

TILES = (32, 64, 80, 96, 128, 160, 192, 256)
"""Keys of a tile, which are upper ends of buckets of keys. A score that is computed in vain costs as much as any: tiles
of 80 keys for 77, the length of CLIP's texts, take 0.92 to 0.95 of the time of 96, tiles of 32 for 32 0.86 of 64
(H200)."""
WARPGROUPS = ((3, 192), (2, 256))
"""Warpgroups of a block, and the widest tile or value whose sums their threads have in registers. With three of them
queries and results of an H200 move 1.1 times as fast as with two."""
TILES_AHEAD = 2
"""Tiles of the query of each warpgroup: the next one arrives while one is computed with. More gained nothing."""


@dataclass(frozen=True)
class ResidentSchedule(WgmmaTiles):
    """Schedules many rows and few keys: all keys are one tile, and tiles of the query follow one another.

    Attributes:
        block_n: keys of the tile.
        block_d, block_e: D and E, rounded up to what wgmma takes.
        fewest: keys at least, so that so many columns of the tile exist.
        slots: tiles of keys and values in shared memory.
        staged: columns of results that a warp stages in shared memory at once.
        in_pairs: whether results are computed where sums are, two neighbours at a time.
    """

    sentence = (
        *("wgmma, all keys in one tile of {block_n}, {block_m} rows a warpgroup, {warpgroups} warpgroups",),
        *("{stages} stages of rows", "slots", *WgmmaTiles.shared_words),
    )
    config = ("warpgroups", "keys", "fewest", "depth", "width", "stages", "slots", "staged", "in_pairs", "masked")
    block_n: int = field(metadata=about(member="keys"))
    block_d: int = field(metadata=about(member="depth"))
    block_e: int = field(metadata=about(member="width"))
    fewest: int
    slots: int = field(metadata=about("{} tiles of keys"))
    staged: int
    in_pairs: bool

    @property
    def copied(self) -> tuple[bool, bool, bool]:
        """Returns whether tensor maps copy the query, the keys and the values."""
        return True, True, True

    @property
    def block_m(self) -> int:
        """Returns the rows of a piece of work, which one warpgroup has."""
        return ROWS

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, as the header's ``ResidentShape::bytes``."""
        deep, wide = -(-self.block_d // CHUNK), -(-self.block_e // CHUNK)
        tiles = self.stages * ROWS * deep + self.slots * self.block_n * (deep + wide)
        of_warp = 16 * 2 * CHUNK if self.in_pairs else (16 * (self.staged + 8) + 32) * 4
        return tiles * 2 * CHUNK + self.warpgroups * 4 * of_warp + self.stages * 32 + self.slots * 8

    def persistence(self, sharing: int) -> Persistence:
        return Persistence("multiprocessors")


def in_pairs(body: Body, layout: Layout) -> bool:
    """Returns whether the one result of ``body`` has 16 bits and is computed of sums and of values of its row alone, so
    that the two neighbours that a thread has are a word of it."""
    elements = [i for i in body.instructions if i.op in ("load", "iota", "gather", "store") and not i.row]
    results = [i.attr for i in elements if i.op == "store"]
    return len(elements) == 1 and all(
        item_size(body.operands[index].dtype) == 2 and layout.operands[index] == "contiguous" and layout.unit >= RUN
        for index in results
    )


def candidates(keys: int, deep: int, wide: int, *, in_pairs: bool, is_wide: bool) -> list[ResidentSchedule]:
    """Returns the schedules that have all ``keys`` in one tile, as far as these fit a multiprocessor; the first is the
    rule's. There are none without keys, and with too many.

    Args:
        deep, wide: D and E, rounded up to what wgmma takes.
        in_pairs: see ``ResidentSchedule``.
        is_wide: 64-bit indices.
    """
    tile = next((tile for tile in TILES if 0 < keys <= tile), 0)
    schedules = (
        ResidentSchedule(
            tile,
            deep,
            wide,
            max((other + 1 for other in TILES if other < tile), default=1),
            slots,
            min(wide, 32),
            in_pairs,
            warpgroups=count,
            stages=TILES_AHEAD * count,
            wide=is_wide,
        )
        for count, most in WARPGROUPS
        for slots in (2, 1)
        if 0 < max(tile, wide) <= most and tile
    )
    return [schedule for schedule in schedules if schedule.shared_bytes <= SHARED_BYTES]
