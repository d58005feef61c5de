"""Where a scan kernel's operands lie: strides over collapsed outer dimensions, and along the row.

The *layout* decides what source is generated; the *geometry* is what a launch passes as plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.ir.views import Memory
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, Call, base_of, collapse, item_size, locate
from jitgen.kernel.rows import RowGeometry

_KINDS = {1: "contiguous", 0: "broadcast"}
"""What an operand with that stride is; with any other it is strided."""


@dataclass(frozen=True)
class Layout:
    """What of the strides decides the source. Device-neutral.

    Attributes:
        outer: collapsed dimensions that count rows (0 for a single row), the innermost last.
        along: for each operand, what it is along the row: ``"contiguous"`` (stride 1), ``"strided"``, ``"broadcast"``
            (stride 0: one element for the whole row) or ``"row"`` (an operand with one element for a row).
        across: for each operand, what it is from a row to the next one: ``"contiguous"``, ``"strided"`` or
            ``"broadcast"``; empty where there is a single row.
        columns: whether neighbouring elements belong to neighbouring rows rather than to one row.
        unit: the largest power of two of elements, at most 16, that every contiguous operand can move at once: along
            the row, or with ``columns`` from row to row. Addresses, sizes and strides are multiples of it, up to 16
            bytes.
        wide: whether an index can reach 2**31.
    """

    outer: int
    along: tuple[str, ...]
    across: tuple[str, ...]
    columns: bool
    unit: int
    wide: bool


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[RowGeometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable when a movement needs a copy first."""
    (body,) = kernel.bodies
    sizes = tuple(symbols.evaluate(size, call.environment) for size in body.shape)
    every: list[tuple[int, ...]] = []
    offsets: list[int] = []
    for operand in body.operands:
        view = locate(operand.movements, base_of(operand, call.environment, call.buffers), call.environment)
        every.append((*view.strides[:-1], 0) if operand.row else view.strides)
        offsets.append(view.offset)
    leader = next((i for i, strides in enumerate(every) if strides[-1] and not body.operands[i].row), 0)
    # Rows are numbered in the order in which the leading operand has them in memory.
    outer_sizes, outer = collapse(sizes[:-1], [strides[:-1] for strides in every], leader)
    strides = tuple((*walked, whole[-1]) for walked, whole in zip(outer, every, strict=True))
    geometry = RowGeometry(outer_sizes, sizes[-1], strides, tuple(offsets))
    along = tuple(
        "row" if operand.row else _KINDS.get(step[-1], "strided")
        for operand, step in zip(body.operands, strides, strict=True)
    )
    first, second = abs(strides[leader][-1]), abs(strides[leader][-2])
    columns = sizes[-1] > 1 and outer_sizes[-1] > 1 and first > second > 0
    across = tuple(_KINDS.get(step[-2], "strided") for step in strides)
    extents = (*outer_sizes, sizes[-1])
    reach = [sum((size - 1) * abs(s) for size, s in zip(extents, step, strict=True)) for step in strides]
    found = Layout(
        outer=len(outer_sizes),
        along=along,
        across=across,
        columns=columns,
        unit=_unit(body, geometry, across if columns else along, columns, call.buffers) if call.is_gpu else 1,
        wide=geometry.elements >= INDEX_LIMIT or any(extent >= INDEX_LIMIT for extent in reach),
    )
    return (found,), (geometry,)


def _unit(body: Body, geometry: RowGeometry, kinds: Sequence[str], columns: bool, buffers: Sequence[Memory]) -> int:
    """The largest power of two of elements that every contiguous operand can move at once."""
    moved = len(geometry.sizes) - columns
    unit = MAX_UNIT
    while (*geometry.sizes, geometry.length)[moved] % unit:
        unit //= 2
    for operand, kind, strides, offset in zip(body.operands, kinds, geometry.strides, geometry.offsets, strict=True):
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            others = (step for dim, step in enumerate(strides) if dim != moved)
            steps = [offset * size, *(step * size for step in others), buffers[operand.buffer].alignment]
            while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
                unit //= 2
    return unit
