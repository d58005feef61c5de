"""Describes the attention kernel of sm_90a, ``attention_wgmma.cuh``, in Python: schedules, shared memory, tensor
maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward import decode, resident
from jitgen.families.attention.forward.clusters import MOST_BLOCKS, ReadFit, fastest_cluster
from jitgen.families.attention.forward.layout import PACKED_ROWS, AttentionGeometry, Layout
from jitgen.families.attention.forward.scales import scaled
from jitgen.families.attention.rule import wgmma
from jitgen.families.attention.rule.bounds import masks_of
from jitgen.families.attention.rule.layout import TileGeometry
from jitgen.families.attention.rule.wgmma import CHUNK, ROWS, Mapped, WgmmaTiles, with_most_stages
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Persistence
from jitgen.kernel.operands import MappedTensor
from jitgen.schedule.chips import Chip
from jitgen.schedule.declared import about, derived

WIDTHS = (16, 32, 64, 96, 128, 192, 256)
"""The n's of wgmma that ``wgmma_atoms.cuh`` has."""
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the buckets of rows of which one warpgroup may have all."""
OTHER_TILES = (
    *((64, 3, 112), (64, 3, 96), (64, 3, 64), (64, 2, 192)),
    *((128, 3, 80), (128, 3, 64), (128, 2, 160), (128, 2, 128), (128, 2, 112), (128, 2, 96)),
    *((192, 2, 80), (256, 2, 64)),
)
"""The most elements of a head, warpgroups and keys of a tile of further candidates: of what registers and shared memory
hold, as NVRTC 13.0 compiles plain attention without spills."""
SHORT_TILES = (64, 96)
"""Keys up to which one tile has all; further ends of buckets of keys."""
MEDIUM_KEYS, MEDIUM_ROWS = 512, 1024
"""Upper ends of buckets of keys and of rows, within which a multiprocessor has two blocks of one warpgroup: one
computes under the first reads of the other and under its results, and few rows are computed in vain. On an
H200, in us, beside blocks of two or three warpgroups: M500 N300 D64 12.1 (17.7), causal M400 D64 9.7 (13.2), M300 N200
D96 8.6 (13.5), causal M300 D192 15.0 (17.8), M500 N2000 D64 46.7 (61.6); but M900 N1000 D80 86.2 (69.0)."""
MANY_ROWS = 2**30
"""Stands for rows of a head beyond those buckets."""
MOST_STAGES = 3
"""Tiles of keys in shared memory, of those candidates."""
FIT = ReadFit(rate=70e9, piece=1e-6, exchange=2e-6, refill=3e-6)
"""The rate is about two thirds of the 64 bytes a cycle that a multiprocessor's port to the second-level cache has."""


@dataclass(frozen=True)
class WgmmaSchedule(WgmmaTiles):
    """Schedules Hopper's tensor cores; stages have a tile of keys and one of values.

    Attributes:
        block_n: keys of a tile.
        block_d, block_e: D and E, rounded up to what wgmma takes.
        copied: whether the query, the keys and the values are copied by tensor maps, else element by element.
        overlap: whether the products of a tile's keys are issued before those of the preceding tile's values.
        take_turns: whether warpgroups issue products in turns.
        staged: columns of results that a warp stages in shared memory at once.
        blocks: of a multiprocessor at once.
        masked: whether a mask may hide a tile.
    """

    sentence = (
        *("wgmma, {block_m} rows a block, {warpgroups} warpgroups", "{stages} stages of {block_n} keys"),
        *("blocks", "by_element", *WgmmaTiles.shared_words),
    )
    config = (
        *("warpgroups", "blocks", "keys", "depth", "width", "stages", "staged", "most_splits"),
        *("query_copied", "key_copied", "value_copied", "masked", "overlap", "take_turns"),
    )
    block_n: int = field(metadata=about(member="keys"))
    block_d: int = field(metadata=about(member="depth"))
    block_e: int = field(metadata=about(member="width"))
    copied: tuple[bool, bool, bool]
    overlap: bool = True
    take_turns: bool = True
    staged: int = 32
    blocks: int = field(default=1, metadata=about("{} blocks a multiprocessor"))
    masked: bool = False

    @derived("{} copied element by element")
    def by_element(self) -> str:
        """Returns what no tensor map copies."""
        names = zip(("query", "keys", "values"), self.copied, strict=True)
        return " and ".join(name for name, is_copied in names if not is_copied)

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, as the header's ``Shape::bytes``."""
        deep, wide = -(-self.block_d // CHUNK), -(-self.block_e // CHUNK)
        tiles = self.block_m * deep + self.stages * self.block_n * (deep + wide)
        staging, sums = (self.warpgroups * 4 * (16 * (columns + 8) + 32) * 4 for columns in (self.staged, self.block_e))
        barriers, tickets = (2 + 4 * self.stages) * 8, 16 + -(-self.stages // 2) * 16
        exchanged = sums if self.cluster_splits > 1 else 0
        return max(tiles * 2 * CHUNK + staging, exchanged) + barriers + tickets

    def cluster(self, geometry: TileGeometry, chip: Chip) -> int:
        return fastest_cluster(self, geometry, chip, FIT, self.blocks, self.tile_seconds(chip), self.masked)

    def persistence(self, sharing: int) -> Persistence:
        return Persistence("clusters" if sharing > 1 else "multiprocessors", self.blocks)

    def tile_seconds(self, chip: Chip) -> float:
        """Returns what a block computes with a tile of keys: products, at nine tenths of the matrix units' rate, and 16
        exponentials a cycle."""
        operations = 2 * (self.block_d + self.block_e) / (0.9 * chip.matrix / chip.multiprocessors)
        return self.block_m * self.block_n * (operations + 1 / (16e6 * chip.microsecond_cycles))


def candidates(body: Body, layout: Layout, geometry: AttentionGeometry, has_tensor_maps: bool = True) -> list[Any]:
    """Returns the schedules for a kernel with this body, by the shape of its heads, and by rows and keys of a call: the
    rule's, and where rows are many the tiles of ``OTHER_TILES``. Rows with so few keys that a block holds all of them
    take the time of reading queries and writing results, for which ``resident`` is made. It was faster than all others
    for 47 of 48 shapes of 33 to 9,001 rows and 1 to 250 keys on an H200; the other one is 8 heads of 64 rows and keys.
    """
    deep = -(-max(geometry.depth, 1) // 16) * 16
    wide = next(width for width in WIDTHS if geometry.width <= width)
    are_copied = copied(body, layout, geometry) if has_tensor_maps else (False, False, False)
    short: list[Any] = []
    if all(are_copied) and geometry.rows > PACKED_ROWS:
        in_pairs = resident.in_pairs(body, layout)
        short += resident.candidates(geometry.keys, deep, wide, in_pairs=in_pairs, is_wide=layout.wide)
    few = decode.candidates(body, layout, geometry, most_rows(geometry))
    if few:
        return [*short, *few]
    large = max(deep, wide)
    rule, whole = body.contractions[1].x, geometry.depth % CHUNK == geometry.width % CHUNK == 0
    if few_rows(geometry):
        warpgroups, keys, stages, blocks = 1, 128 if large <= 128 else 64, range(2, 5), 1
    elif geometry.keys <= MEDIUM_KEYS and large <= 192:
        warpgroups, keys, stages, blocks = 1, _tile_of_few(large, geometry.keys), range(1, 3), 2
    elif geometry.keys <= decode.SHORT_KEYS:
        warpgroups, keys, stages, blocks = 2, 32, range(1, 4), 1
    elif large <= 64 and 4 * ROWS < geometry.rows <= MEDIUM_ROWS:
        warpgroups, keys, stages, blocks = 1, 128 if scaled(rule).linear else 112, range(2, 3), 2
    else:
        stages, blocks = range(2, 3), 1
        plain = whole and not masks_of(rule) and scaled(rule).linear and body.contractions[0].dtype == "bfloat16"
        warpgroups, keys = _tiles(large, geometry.rows, plain, scaled(rule).linear)
    schedule_ = WgmmaSchedule(
        keys,
        deep,
        wide,
        warpgroups=warpgroups,
        stages=stages[0],
        copied=are_copied,
        splits=body.contractions[1].k_splits,
        cluster_splits=MOST_BLOCKS,
        staged=min(wide, 32),
        blocks=blocks,
        masked=bool(masks_of(rule)),
        wide=layout.wide,
    )
    chosen = with_most_stages(schedule_, stages, blocks)
    if few_rows(geometry):
        return [*short, chosen]
    others = [
        with_most_stages(replace(schedule_, warpgroups=count, block_n=tile, blocks=1), range(2, MOST_STAGES + 1))
        for most, count, tile in OTHER_TILES
        if large <= most
    ]
    return list(dict.fromkeys((*short, chosen, *others)))


def few_rows(geometry: AttentionGeometry) -> bool:
    """Returns whether one warpgroup has all rows that share keys. The answer is the same for all rows of one bucket."""
    return most_rows(geometry) <= ROWS


def most_rows(geometry: AttentionGeometry) -> int:
    """Returns the most rows that share keys in the bucket of this call; ``MANY_ROWS`` or more if it has many."""
    return bucket_end(geometry.rows) * math.prod(geometry.groups)


def bucket_end(rows: int) -> int:
    """Returns the most rows of the bucket of ``rows``; ``MANY_ROWS`` for those without a bucket here."""
    return next((end for end in FEW_ROWS if rows <= end), MANY_ROWS)


def _tile_of_few(large: int, keys: int) -> int:
    """Returns the keys of a tile where there are at most ``MEDIUM_KEYS``, of heads of ``large`` elements."""
    tiles = (*SHORT_TILES, decode.SHORT_KEYS) if large <= 64 else SHORT_TILES
    return next((tile for tile in tiles if keys <= tile), 64)


def _tiles(large: int, rows: int, plain: bool, linear: bool) -> tuple[int, int]:
    """Returns the warpgroups and keys of a tile for heads of ``large`` elements. ``plain``: whether scores are bfloat16
    products by a number, of heads of whole chunks. ``linear``: whether scores are products and masks.

    Three warpgroups have 160 registers a thread: with a rule beside the scores of 128 keys some of these are spilled.

    On an H200 (bf16, 4096 rows, of the speed of cuDNN): heads of 64 elements 1.01 with three warpgroups and 0.88 with
    two; of 128 elements 0.97 with tiles of 160 keys, 0.96 with 128 and 0.92 with 176. With a causal mask tiles of 128
    keys are faster than of 160, by 1 %.
    """
    if large <= 64:
        return (3, 128 if linear else 112) if rows > 4 * ROWS else (2, 128)
    if large <= 128:
        return 2, 160 if plain else 128
    return 2, 96 if large <= 192 else 64


# ---------------------------------------------------------------------------------------------------------- tensor maps


def _sources(body: Body, geometry: AttentionGeometry) -> tuple[Mapped, Mapped, Mapped]:
    """Returns the query, the keys and the values."""
    queries, probabilities = body.contractions
    return (
        Mapped(queries.x[0].attr, geometry.rows),
        Mapped(queries.weight[0], geometry.keys),
        Mapped(probabilities.weight[0], geometry.keys, along=1),
    )


def copied(body: Body, layout: Layout, geometry: AttentionGeometry) -> tuple[bool, bool, bool]:
    """Returns whether tensor maps describe the query, the keys and the values. A query that is computed, or whose rows
    are packed, is not copied."""
    queries, probabilities = body.contractions
    plain = [i.op for i in queries.x] == ["load"] and body.operands[queries.x[0].attr].dtype == queries.dtype
    query, key, value = (source.is_copied(body, layout, geometry) for source in _sources(body, geometry))
    return plain and not layout.groups and query, not queries.w and key, not probabilities.w and value


def tensor_maps(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[AttentionGeometry], schedule: Any, device: Device
) -> Iterator[MappedTensor]:
    """Yields the kernel's tensor maps in the order of its parameters: query, keys and values, as far as they are
    copied."""
    (body,), (geometry,) = kernel.bodies, geometries
    if device.dialect != "cuda" or not geometry.elements:
        return iter(())
    columns = (geometry.depth, geometry.depth, geometry.width)
    boxes = (schedule.block_m, schedule.block_n, schedule.block_n)
    sources = zip(_sources(body, geometry), columns, boxes, strict=True)
    return wgmma.tensor_maps(body, geometry, itertools.compress(sources, schedule.copied))
