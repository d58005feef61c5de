"""The attention kernel of sm_90a, ``attention_wgmma.cuh``, in Python: schedules, shared memory, tensor maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward import decode
from jitgen.families.attention.forward.clusters import MOST_BLOCKS, ReadFit, fastest_cluster
from jitgen.families.attention.forward.layout import AttentionGeometry, Layout
from jitgen.families.attention.forward.scales import scaled
from jitgen.families.attention.rule.bounds import masks_of
from jitgen.families.attention.rule.wgmma import CHUNK, ROWS, SHARED_BYTES, WARPGROUP, is_mappable, tensor_map
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import MappedTensor
from jitgen.schedule.chips import Chip
from jitgen.schedule.declared import DeclaredSchedule, about, derived

WIDTHS = (16, 32, 64, 96, 128, 192, 256)
"""The n's of wgmma that ``wgmma_atoms.cuh`` has."""
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the buckets of rows of which one warpgroup may have all."""
CLUSTER_WIDTHS = (16, 32, 64, 128, 256)
"""Columns of results, as wgmma takes them, that a warp can stage as a whole: a lane has the same ones of each row."""
FIT = ReadFit(rate=70e9, piece=1e-6, exchange=1.5e-6)
"""The rate is about two thirds of the 64 bytes a cycle that a multiprocessor's port to the second-level cache has."""


@dataclass(frozen=True)
class WgmmaSchedule(DeclaredSchedule):
    """On Hopper's tensor cores.

    Attributes:
        warpgroups: that compute, with 64 rows each; one more copies.
        block_n: keys of a tile.
        block_d, block_e: D and E, rounded up to what wgmma takes.
        stages: tiles of keys, and of values, in shared memory.
        copied: whether the query, the keys and the values are copied by tensor maps, else element by element.
        overlap: whether the products of a tile's keys are issued before those of the preceding tile's values.
        take_turns: whether warpgroups issue products in turns.
        splits: ranges of the keys, of kernels of their own programs that another one joins.
        cluster_splits: blocks of a cluster, at most, that share the keys of a block of rows.
        staged: columns of results that a warp stages in shared memory at once.
        wide: 64-bit indices.
    """

    sentence = (
        *("wgmma, {block_m} rows a block, {warpgroups} warpgroups", "{stages} stages of {block_n} keys"),
        *("by_element", "splits", "cluster_splits", "wide"),
    )
    config = (
        *("warpgroups", "keys", "depth", "width", "stages", "staged", "most_splits"),
        *("query_copied", "key_copied", "value_copied", "masked", "overlap", "take_turns"),
    )
    warpgroups: int
    block_n: int = field(metadata=about(member="keys"))
    block_d: int = field(metadata=about(member="depth"))
    block_e: int = field(metadata=about(member="width"))
    stages: int
    copied: tuple[bool, bool, bool]
    splits: int = field(default=1, metadata=about("keys in {} ranges"))
    cluster_splits: int = field(
        default=1, metadata=about("shared by clusters of up to {} blocks", member="most_splits")
    )
    overlap: bool = True
    take_turns: bool = True
    staged: int = 32
    wide: bool = field(default=False, metadata=about("64-bit indices"))

    @derived("{} copied element by element")
    def by_element(self) -> str:
        """What no tensor map copies."""
        names = zip(("query", "keys", "values"), self.copied, strict=True)
        return " and ".join(name for name, is_copied in names if not is_copied)

    @property
    def block_m(self) -> int:
        """Rows of a block."""
        return self.warpgroups * ROWS

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the header's ``Shape::bytes``."""
        deep, wide = -(-self.block_d // CHUNK), -(-self.block_e // CHUNK)
        tiles = self.block_m * deep + self.stages * self.block_n * (deep + wide)
        staging = self.warpgroups * 4 * (16 * (self.staged + 8) + 32) * 4
        barriers, tickets = (2 + 4 * self.stages) * 8, 16 + -(-self.stages // 2) * 16
        return tiles * 2 * CHUNK + staging + barriers + tickets


def candidates(body: Body, layout: Layout, geometry: AttentionGeometry, has_tensor_maps: bool = True) -> list[Any]:
    """The schedules for a kernel with this body, by the shape of its heads and the rows of a call."""
    few = decode.candidates(body, layout, geometry, most_rows(geometry))
    if few:
        return list(few)
    deep = -(-max(geometry.depth, 1) // 16) * 16
    wide = next(width for width in WIDTHS if geometry.width <= width)
    large = max(deep, wide)
    rule, whole = body.contractions[1].x, geometry.depth % CHUNK == geometry.width % CHUNK == 0
    shares = few_rows(geometry) and wide in CLUSTER_WIDTHS and whole
    if few_rows(geometry):
        warpgroups, keys, most_stages = 1, 128 if large <= 128 else 64 if large <= 192 or not shares else 32, 4
    else:
        plain = whole and not masks_of(rule) and scaled(rule).linear and body.contractions[0].dtype == "bfloat16"
        warpgroups, keys, most_stages = _tiles(large, geometry.rows, plain, scaled(rule).linear)
    found = WgmmaSchedule(
        warpgroups,
        keys,
        deep,
        wide,
        stages=2,
        copied=copied(body, layout, geometry) if has_tensor_maps else (False, False, False),
        splits=body.contractions[1].k_splits,
        cluster_splits=MOST_BLOCKS if shares else 1,
        staged=wide if shares else min(wide, 32),
        wide=layout.wide,
    )
    staged = (replace(found, stages=count) for count in range(2, most_stages + 1))
    return [max((each for each in staged if each.shared_bytes <= SHARED_BYTES), key=lambda each: each.stages)]


def few_rows(geometry: AttentionGeometry) -> bool:
    """Whether one warpgroup has all rows that share keys. The answer is the same for all rows of one bucket."""
    return most_rows(geometry) <= ROWS


def most_rows(geometry: AttentionGeometry) -> int:
    """Rows that share keys, at most, in the bucket of this call; more than ``ROWS`` where it has many."""
    return bucket_end(geometry.rows) * math.prod(geometry.groups)


def bucket_end(rows: int) -> int:
    """The most rows of the bucket of ``rows``; more than ``ROWS`` of those that have none here."""
    return next((end for end in FEW_ROWS if rows <= end), ROWS + 1)


def _tiles(large: int, rows: int, plain: bool, linear: bool) -> tuple[int, int, int]:
    """Warpgroups, keys of a tile, and stages at most, for heads of ``large`` elements. ``plain``: whether scores are
    bfloat16 products by a number, of heads of whole chunks. ``linear``: whether scores are products and masks.

    Three warpgroups have 160 registers a thread: with a rule beside the scores of 128 keys some of these are spilled.

    On an H200 (bf16, 4096 rows, of the speed of cuDNN): heads of 64 elements 1.01 with three warpgroups and 0.88 with
    two; of 128 elements 0.97 with tiles of 160 keys, 0.96 with 128 and 0.92 with 176. With a causal mask tiles of 128
    keys are faster than of 160, by 1 %.
    """
    if large <= 64:
        return (3, 128 if linear else 112, 2) if rows > 2 * ROWS else (2, 128, 2)
    if large <= 128:
        return 2, 160 if plain else 128, 2
    return 2, 96 if large <= 192 else 64, 2


def cluster(schedule: WgmmaSchedule, geometry: AttentionGeometry, chip: Chip) -> int:
    """How many blocks of a cluster share keys in one launch on ``chip``."""
    return fastest_cluster(schedule, geometry, chip, FIT)


# ---------------------------------------------------------------------------------------------------------- tensor maps


def copied(body: Body, layout: Layout, geometry: AttentionGeometry) -> tuple[bool, bool, bool]:
    """Whether tensor maps describe the query, the keys and the values. A query that is computed, or whose rows are
    packed, is not copied."""
    queries, probabilities = body.contractions
    query = queries.x[0].attr
    plain = [i.op for i in queries.x] == ["load"] and body.operands[query].dtype == queries.dtype

    def mappable(index: int, rows: int, along: int) -> bool:
        operand, strides = body.operands[index], geometry.strides[index]
        kind, batch = layout.operands[index], strides[: layout.batch]
        return is_mappable(operand, kind, layout.unit, batch, rows, strides[len(strides) - 2 + along])

    return (
        plain and not layout.groups and mappable(query, geometry.rows, 0),
        not queries.w and mappable(queries.weight[0], geometry.keys, 0),
        not probabilities.w and mappable(probabilities.weight[0], geometry.keys, 1),
    )


def tensor_maps(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[AttentionGeometry], schedule: Any, device: Device
) -> Iterator[MappedTensor]:
    """The kernel's tensor maps in the order of its parameters: query, keys and values, as far as they are copied."""
    (body,), (geometry,) = kernel.bodies, geometries
    if device.dialect != "cuda" or not geometry.tasks * geometry.packed_rows * geometry.width:
        return
    queries, probabilities = body.contractions
    sources: tuple[tuple[int, int, int, int], ...] = (
        (queries.x[0].attr, geometry.rows, geometry.depth, schedule.block_m),
        (queries.weight[0], geometry.keys, geometry.depth, schedule.block_n),
        (probabilities.weight[0], geometry.keys, geometry.width, schedule.block_n),
    )
    for (index, rows, columns, box), is_copied, along in zip(sources, schedule.copied, (0, 0, 1), strict=True):
        if is_copied:
            strides = geometry.strides[index]
            batch = list(zip(geometry.batch, strides, strict=False))
            row = strides[len(strides) - 2 + along]
            yield tensor_map(body.operands[index], geometry.offsets[index], batch, (rows, columns), row, box)
