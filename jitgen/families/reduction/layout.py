"""Where a row kernel's operands lie: strides over collapsed outer dimensions, and along the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.families.layout import (
    ACCESS_BYTES,
    INDEX_LIMIT,
    MAX_UNIT,
    Memory,
    base_of,
    collapse,
    item_size,
    locate,
)
from jitgen.ir import symbols
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel

KINDS = {1: "contiguous", 0: "broadcast"}
"""What an operand with that stride is; with any other it is strided."""


@dataclass(frozen=True)
class RowLayout:
    """What of the strides decides the source. Device-neutral.

    Attributes:
        outer: collapsed dimensions that count rows (0 for a single row).
        operands: along the row: ``"contiguous"``, ``"broadcast"`` (one value for the row), ``"strided"``; and ``"row"``
            for an operand the body reads or writes once a row.
        unit: the largest power of two of elements, at most 16, that every contiguous operand can move at once.
        columns: neighbouring elements belong to neighbouring rows: the innermost outer dimension is the contiguous one.
        beside: for each operand, where ``columns``, what it is from a row to the next: ``"contiguous"``,
            ``"broadcast"`` or ``"strided"``.
        beside_unit: as ``unit``, of elements of neighbouring rows: for the operands that ``beside`` calls contiguous.
        shared: for each operand, whether all of several rows read the same elements of it.
        wide: whether an index can reach 2**31.
    """

    outer: int
    operands: tuple[str, ...]
    unit: int
    columns: bool
    beside: tuple[str, ...]
    beside_unit: int
    shared: tuple[bool, ...]
    wide: bool


@dataclass(frozen=True)
class RowGeometry:
    """A call's sizes and strides.

    Attributes:
        sizes: of the outer dimensions, outermost first.
        length: of a row.
        strides: for each operand, in elements: one for each outer dimension, then the row's.
        offsets: for each operand, in elements.
    """

    sizes: tuple[int, ...]
    length: int
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def elements(self) -> int:
        return self.rows * self.length


def resolve(
    kernel: Kernel, environment: Mapping[str, Any], buffers: Sequence[Memory], accesses: bool = True
) -> tuple[tuple[RowLayout, ...], tuple[RowGeometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable when a movement needs a copy first."""
    (body,) = kernel.bodies
    sizes = tuple(symbols.evaluate(size, environment) for size in body.shape)
    split = len(sizes) - body.row_rank
    kept = (*sizes[:split], *(1,) * body.row_rank)
    views = []
    for operand in body.operands:
        view = locate(operand.movements, base_of(operand, environment, buffers), environment)
        walked = view.strides
        if operand.row:
            walked = tuple(0 if size == 1 else s for size, s in zip(kept, walked, strict=True))
        views.append((walked, view.offset))
    every = [walked for walked, _ in views]
    leader = next(
        (i for i, (o, s) in enumerate(zip(body.operands, every, strict=True)) if not o.row and any(s[split:])), 0
    )
    outer_sizes, outer = collapse(sizes[:split], [s[:split] for s in every], leader)
    row_sizes, row = collapse(sizes[split:], [s[split:] for s in every], leader)
    if 0 in row_sizes:  # nothing is walked, whatever the strides say
        row_sizes, row = (0,), tuple((int(not operand.row),) for operand in body.operands)
    if len(row_sizes) != 1:
        raise AssertionError("a row of uneven strides reached the layout; a pass should have made a copy")
    length = 1
    for size in sizes[split:]:
        length *= size
    strides = tuple((*a, *b) for a, b in zip(outer, row, strict=True))
    geometry = RowGeometry(outer_sizes, length, strides, tuple(offset for _, offset in views))
    kinds = tuple(
        "row" if operand.row else KINDS.get(stride[-1], "strided")
        for operand, stride in zip(body.operands, strides, strict=True)
    )
    if length == 1:
        kinds = tuple("contiguous" if kind == "broadcast" else kind for kind in kinds)
    extents = [
        sum((size - 1) * abs(step) for size, step in zip((*outer_sizes, length), stride, strict=True))
        for stride in strides
    ]
    wide = geometry.elements >= INDEX_LIMIT or any(extent >= INDEX_LIMIT for extent in extents)
    leading = strides[leader]
    columns = length > 1 and len(leading) > 1 and abs(leading[-1]) > abs(leading[-2]) > 0
    beside = tuple(KINDS.get(stride[-2], "strided") if columns else "" for stride in strides)
    contiguous, neighbours = [kind == "contiguous" for kind in kinds], [kind == "contiguous" for kind in beside]
    layout = RowLayout(
        outer=len(outer_sizes),
        operands=kinds,
        unit=_unit(body, geometry, -1, contiguous, buffers) if accesses else 1,
        columns=columns,
        beside=beside,
        beside_unit=_unit(body, geometry, -2, neighbours, buffers) if accesses and columns else 1,
        shared=tuple(bool(walked) and not any(walked) for walked in outer),
        wide=wide,
    )
    return (layout,), (geometry,)


def _unit(body: Body, geometry: RowGeometry, dim: int, moved: Sequence[bool], buffers: Sequence[Memory]) -> int:
    """The largest power of two of elements every operand of ``moved`` can move at once along ``dim``, -1 the row's."""
    unit = MAX_UNIT
    while (*geometry.sizes, geometry.length)[dim] % unit:
        unit //= 2
    for operand, moves, strides, offset in zip(body.operands, moved, geometry.strides, geometry.offsets, strict=True):
        if moves and operand.buffer is not None:
            size = item_size(operand.dtype)
            others = (s for place, s in enumerate(strides) if place != len(strides) + dim)
            steps = [offset * size, *(s * size for s in others), buffers[operand.buffer].alignment]
            while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
                unit //= 2
    return unit
