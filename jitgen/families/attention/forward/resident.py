"""Describes the attention kernel of many rows and few keys, ``attention_resident.cuh``, in Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitgen.families.attention.rule.wgmma import CHUNK, ROWS, WgmmaTiles
from jitgen.kernel.launch import Persistence
from jitgen.schedule.declared import about

TILES = (64, 96, 128, 160)
"""Keys of a tile; upper ends of buckets of keys."""
MOST_ELEMENTS = 128
"""Elements of a key and of a value at most: sums are in registers."""


@dataclass(frozen=True)
class ResidentSchedule(WgmmaTiles):
    """Schedules many rows and few keys: all keys are one tile, and tiles of the query follow one another.

    Attributes:
        block_n: keys of the tile.
        block_d, block_e: D and E, rounded up to what wgmma takes.
        fewest: keys at least, as the columns of the tile that exist.
        slots: tiles of keys and values in shared memory.
        staged: columns of results that a warp stages in shared memory at once.
        blocks: of a multiprocessor at once.
    """

    sentence = (
        *("wgmma, all keys in one tile of {block_n}, {block_m} rows a warpgroup, {warpgroups} warpgroups",),
        *("{stages} stages of rows", "slots", "blocks", *WgmmaTiles.shared_words),
    )
    config = ("warpgroups", "blocks", "keys", "fewest", "depth", "width", "stages", "slots", "staged", "masked")
    block_n: int = field(metadata=about(member="keys"))
    block_d: int = field(metadata=about(member="depth"))
    block_e: int = field(metadata=about(member="width"))
    fewest: int
    slots: int = field(metadata=about("{} tiles of keys"))
    staged: int = 32
    blocks: int = field(default=1, metadata=about("{} blocks a multiprocessor"))

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
        staging = self.warpgroups * 4 * (16 * (self.staged + 8) + 32) * 4
        return tiles * 2 * CHUNK + staging + self.stages * 32 + self.slots * 8

    def persistence(self, sharing: int) -> Persistence:
        return Persistence("multiprocessors", self.blocks)
