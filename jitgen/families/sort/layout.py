"""Where a sort kernel's operands lie: strides over collapsed outer dimensions, and along the row.

The *layout* decides what source is generated; the *geometry* is what a launch passes as plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.families.sort.chunks import order_of
from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import stride_kind
from jitgen.kernel.operands import Call, collapse
from jitgen.kernel.rows import RowGeometry, row_views, row_wide


@dataclass(frozen=True)
class Layout:
    """What of the strides decides the source.

    Attributes:
        outer: collapsed dimensions that count rows (1 of size 1 for a single row), the innermost last.
        along: for each operand, what it is along the row: ``"contiguous"`` (stride 1), ``"strided"`` or ``"broadcast"``
            (stride 0, which includes operands with one element for a row).
        wide: whether an index can reach 2**31.
    """

    outer: int
    along: tuple[str, ...]
    wide: bool


@dataclass(frozen=True)
class Geometry(RowGeometry):
    """A call's sizes and strides. Where chunks are merged, ``length`` is that of the row that they were cut from.

    Attributes:
        start, count: the ranks that are stored: from ``start`` on, ``count`` of them.
        ranks: where chunks are merged, ranks of each chunk.
    """

    start: int
    count: int
    ranks: int


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable when a movement needs a copy first."""
    (body,) = kernel.bodies
    order = order_of(body)
    sizes = tuple(symbols.evaluate(size, call.environment) for size in body.shape)
    every, offsets = row_views(body, call)
    # Rows are numbered in the order in which the first operand has them in memory.
    outer_sizes, outer = collapse(sizes[:-1], [strides[:-1] for strides in every], 0)
    strides = tuple((*walked, whole[-1]) for walked, whole in zip(outer, every, strict=True))
    start, count = (symbols.evaluate(number, call.environment) for number in (order.start, order.count))
    length = symbols.evaluate(order.length, call.environment) if order.chunk else sizes[-1]
    ranks = sizes[-1] // -(-length // order.chunk) if order.chunk else 0
    geometry = Geometry(outer_sizes, length, strides, offsets, start, count, ranks)
    found = Layout(
        outer=len(outer_sizes),
        along=tuple(stride_kind(step[-1]) for step in strides),
        wide=row_wide(geometry, max(length, sizes[-1])),
    )
    return (found,), (geometry,)
