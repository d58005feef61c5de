"""Describes the kernel of sm_90a, ``attention_backward.cuh``, in Python: what it can compute, shared memory, tensor
maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.pairs import products_behind
from jitgen.families.attention.rule import wgmma
from jitgen.families.attention.rule.layout import TileGeometry, is_tile, results_of
from jitgen.families.attention.rule.wgmma import CHUNK, Mapped, WgmmaTiles
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import MappedTensor
from jitgen.schedule.declared import derived
from jitgen.spec import Target

WIDTHS = (16, 32, 64, 96, 128)
"""The n's of wgmma that ``wgmma_atoms.cuh`` has, up to what the sums of two results have registers for."""
STAGED = 32
"""Columns of results that a warp stages in shared memory at once."""
SLOTS = 4
"""Operands of a tile: the right ones of products, and of sums where they are others."""


@dataclass(frozen=True)
class Roles:
    """Says which of a body's contractions is what in ``attention_backward.cuh``.

    Attributes:
        products: tile products, by their numbers among the body's contractions; the first is of scores.
        results: R0, and R1 if there is one, likewise.
        early: whether R1 is a sum of what is computed of scores alone.
        slots: where the right operand of each result is.
    """

    products: tuple[int, ...]
    results: tuple[int, ...]
    early: bool
    slots: tuple[int, ...]


@dataclass(frozen=True)
class WgmmaSchedule(WgmmaTiles):
    """Schedules Hopper's tensor cores.

    Attributes:
        tile: streamed rows of a tile.
        depths: of products, rounded up to multiples of 16, that of scores first.
        columns: of results, rounded up to what wgmma takes.
        slots: where their right operands are.
        block_words, tile_words: numbers of 4 bytes of each row of the block, and of the tile.
        block_copied, tile_copied: which operands tensor maps describe; the others are copied element by element.
        overlap: whether the last product of a tile runs on under the first one of the next.
    """

    sentence = (
        *("wgmma, {block_m} rows a block, {warpgroups} warpgroups", "{stages} stages of {tile} streamed rows"),
        *("has_elements", *WgmmaTiles.shared_words),
    )
    config = (
        *("warpgroups", "tile", "stages", "products", "depth0", "depth1", "columns0", "columns1", "slot0", "slot1"),
        *("tile_words", "block_words", "block_copied", "tile_copied", "early", "masked", "first_are_long", "overlap"),
    )
    tile: int
    depths: tuple[int, ...]
    columns: tuple[int, ...]
    slots: tuple[int, ...]
    tile_words: int
    block_words: int
    block_copied: tuple[bool, ...]
    tile_copied: tuple[bool, ...]
    overlap: bool

    @derived("operands copied element by element")
    def has_elements(self) -> bool:
        """Returns whether no tensor map copies some of the operands."""
        return not all((*self.block_copied, *self.tile_copied))

    @property
    def slot_columns(self) -> tuple[int, ...]:
        """Returns the columns of each operand of a tile, as far as there is one."""
        widths = [*self.depths, 0][:2]
        return (
            *widths,
            *(c if s == n else 0 for n, c, s in zip((2, 3), (*self.columns, 0), (*self.slots, 0), strict=False)),
        )

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, as the header's ``Shape::bytes``."""
        block = sum(-(-depth // CHUNK) for depth in self.depths)
        tile = sum(-(-columns // CHUNK) for columns in self.slot_columns)
        words = -(-self.tile_words * self.tile * 4 // 1024) * 1024
        staging = self.warpgroups * 4 * 16 * (STAGED + 8) * 4
        barriers = (2 + 3 * self.stages) * 8 + 16 - (2 + 3 * self.stages) % 2 * 8
        rows = block * self.block_m + self.stages * tile * self.tile
        return rows * 2 * CHUNK + self.stages * words + staging + barriers + 16 * (1 + self.stages)


def obstacle(widths: Sequence[int], dtypes: Sequence[str], target: Target) -> str:
    """Explains why there is no kernel for a result of ``widths[0]`` columns over products of the other depths; empty if
    there is one."""
    if target.arch != "sm_90a":
        return f"the cuda dialect's backward of attention is for sm_90a, not for {target}; backend='triton' has one"
    if len(set(dtypes)) != 1 or not set(dtypes) <= {"bfloat16", "float16"}:
        return (
            "the cuda dialect's backward of attention takes 16-bit operands of one dtype; backend='triton' takes others"
        )
    if max(widths) > WIDTHS[-1]:
        return f"heads of more than {WIDTHS[-1]} elements, whose sums do not fit registers; backend='triton' takes them"
    if len(widths) > 3:
        return "a function of more than two products; backend='triton' takes it"
    return ""


def roles(body: Body, layout: Layout) -> Roles:
    """Assigns a role to each contraction of ``body``."""
    tiles = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    results = results_of(body)
    read = [products_behind(body.contractions[r].x, len(body.contractions[r].x) - 1) for r in results]
    alone = [number for number in range(len(results)) if len(read[number]) == 1] if len(results) > 1 else []
    order = [number for number in range(len(results)) if number not in alone[:1]] + alone[:1]
    early = bool(alone)
    if early:
        (scores,) = read[alone[0]]
    else:
        scores = tiles[max(layout.shared[order[0]], 0)]
    products = (scores, *(number for number in tiles if number != scores))
    slots = []
    for position, number in enumerate(order):
        shared = layout.shared[number]
        slots.append(products.index(tiles[shared]) if shared >= 0 else 2 + position)
    return Roles(products, tuple(results[number] for number in order), early, tuple(slots))


def left_operands(body: Body, role: Roles) -> list[int]:
    """Returns the left operand of each product."""
    return [body.contractions[number].x[0].attr for number in role.products]


def tile_operands(body: Body, role: Roles) -> tuple[int | None, ...]:
    """Returns the operand in each slot of a tile; None for an empty one."""
    operands: list[int | None] = [body.contractions[number].weight[0] for number in role.products]
    operands += [None] * (SLOTS - len(operands))
    for number, slot in zip(role.results, role.slots, strict=True):
        if slot >= 2:
            operands[slot] = body.contractions[number].weight[0]
    return tuple(operands)


# ---------------------------------------------------------------------------------------------------------- tensor maps


def tensor_maps(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[TileGeometry], schedule: Any, device: Device
) -> Iterator[MappedTensor]:
    """Yields the kernel's tensor maps in the order of ``mapped_names``."""
    (body,), (layout,), (geometry,) = kernel.bodies, layouts, geometries
    if device.dialect != "cuda" or not geometry.tasks * geometry.rows * max(geometry.widths):
        return iter(())
    role = roles(body, layout)
    tiles, results = sorted(role.products), results_of(body)
    depths = [geometry.depths[tiles.index(number)] for number in role.products]
    lengths = [*depths, 0][:2] + [geometry.widths[results.index(number)] for number in role.results] + [0]
    lefts = zip(left_operands(body, role), schedule.block_copied, depths, strict=True)
    sources = [(Mapped(index, geometry.rows), depth, schedule.block_m) for index, copied, depth in lefts if copied]
    for index, length, copied in zip(tile_operands(body, role), lengths, schedule.tile_copied, strict=False):
        if copied and index is not None:
            sources.append((Mapped(index, geometry.keys), length, schedule.tile))
    return wgmma.tensor_maps(body, geometry, sources)
