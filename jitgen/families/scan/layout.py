"""Where a scan kernel's operands lie: strides over collapsed outer dimensions, and along the row.

The *layout* decides what source is generated; the *geometry* is what a launch passes as plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import stride_kind
from jitgen.kernel.operands import Call, collapse
from jitgen.kernel.rows import RowGeometry, row_unit, row_views, row_wide


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
    every, offsets = row_views(body, call)
    leader = next((i for i, strides in enumerate(every) if strides[-1] and not body.operands[i].row), 0)
    # Rows are numbered in the order in which the leading operand has them in memory.
    outer_sizes, outer = collapse(sizes[:-1], [strides[:-1] for strides in every], leader)
    strides = tuple((*walked, whole[-1]) for walked, whole in zip(outer, every, strict=True))
    geometry = RowGeometry(outer_sizes, sizes[-1], strides, offsets)
    along = tuple(
        "row" if operand.row else stride_kind(step[-1]) for operand, step in zip(body.operands, strides, strict=True)
    )
    first, second = abs(strides[leader][-1]), abs(strides[leader][-2])
    columns = sizes[-1] > 1 and outer_sizes[-1] > 1 and first > second > 0
    across = tuple(stride_kind(step[-2]) for step in strides)
    found = Layout(
        outer=len(outer_sizes),
        along=along,
        across=across,
        columns=columns,
        unit=row_unit(body, geometry, -2 if columns else -1, across if columns else along, call),
        wide=row_wide(geometry, sizes[-1]),
    )
    return (found,), (geometry,)
