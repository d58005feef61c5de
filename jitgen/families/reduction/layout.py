"""Where the operands of a row kernel lie: their strides along the row and over the outer dimensions, which count rows.

``layout`` divides a call's strides into a ``RowLayout``, which decides the source, and a ``RowGeometry``, whose numbers
a launch passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.ir.views import NotViewable
from jitgen.kernel.layout import stride_kind, views_of
from jitgen.kernel.operands import Call, collapse
from jitgen.kernel.rows import RowGeometry, row_unit, row_wide


@dataclass(frozen=True)
class RowLayout:
    """What of the strides decides the source; it does not depend on a device.

    Attributes:
        outer: how many dimensions count rows, after neighbours were merged.
        operands: what each operand is along the row: ``"contiguous"``, ``"broadcast"`` (one value for the whole row) or
            ``"strided"``; ``"row"`` where the body reads or writes it once a row.
        unit: the largest power of two of elements, at most 16, that one access can move of every operand that is
            contiguous along the row.
        columns: whether neighbouring elements belong to neighbouring rows, as those of a matrix's columns do: the
            innermost outer dimension is the contiguous one.
        across_rows: where ``columns``, what each operand is from a row to the next: ``"contiguous"``, ``"broadcast"``
            or ``"strided"``; else empty strings.
        across_rows_unit: as ``unit``, of the operands that are contiguous across rows.
        row_invariant: for each operand, whether all rows, of which there are several, read the same elements of it.
        wide: whether an index can reach 2**31.
    """

    outer: int
    operands: tuple[str, ...]
    unit: int
    columns: bool
    across_rows: tuple[str, ...]
    across_rows_unit: int
    row_invariant: tuple[bool, ...]
    wide: bool


def layout(kernel: Kernel, call: Call) -> tuple[tuple[RowLayout, ...], tuple[RowGeometry, ...]]:
    """Layout and geometry of the kernel's one body; raises NotViewable where an operand needs a copy first."""
    (body,) = kernel.bodies
    sizes = tuple(symbols.evaluate(size, call.environment) for size in body.shape)
    outer_rank = len(sizes) - body.row_rank
    row_value_shape = (*sizes[:outer_rank], *(1,) * body.row_rank)
    views = []
    for operand, view in zip(body.operands, views_of(body, call), strict=True):
        view_strides = view.strides
        if operand.row:
            view_strides = tuple(0 if size == 1 else s for size, s in zip(row_value_shape, view_strides, strict=True))
        views.append((view_strides, view.offset))
    every = [view_strides for view_strides, _ in views]
    leader = next(
        (i for i, (o, s) in enumerate(zip(body.operands, every, strict=True)) if not o.row and any(s[outer_rank:])), 0
    )
    outer_sizes, outer = collapse(sizes[:outer_rank], [s[:outer_rank] for s in every], leader)
    row_sizes, row = collapse(sizes[outer_rank:], [s[outer_rank:] for s in every], leader)
    if 0 in row_sizes:  # no element is read, whatever the strides say
        row_sizes, row = (0,), tuple((int(not operand.row),) for operand in body.operands)
    if len(row_sizes) != 1:
        raise NotViewable("a row whose operands have no common stride")
    length = 1
    for size in sizes[outer_rank:]:
        length *= size
    strides = tuple((*a, *b) for a, b in zip(outer, row, strict=True))
    geometry = RowGeometry(outer_sizes, length, strides, tuple(offset for _, offset in views))
    kinds = tuple(
        "row" if operand.row else stride_kind(stride[-1])
        for operand, stride in zip(body.operands, strides, strict=True)
    )
    if length == 1:
        kinds = tuple("contiguous" if kind == "broadcast" else kind for kind in kinds)
    leading = strides[leader]
    columns = length > 1 and len(leading) > 1 and abs(leading[-1]) > abs(leading[-2]) > 0
    across_rows = tuple(stride_kind(stride[-2]) if columns else "" for stride in strides)
    found = RowLayout(
        outer=len(outer_sizes),
        operands=kinds,
        unit=row_unit(body, geometry, -1, kinds, call),
        columns=columns,
        across_rows=across_rows,
        across_rows_unit=row_unit(body, geometry, -2, across_rows, call) if columns else 1,
        row_invariant=tuple(bool(steps) and not any(steps) for steps in outer),
        wide=row_wide(geometry, length),
    )
    return (found,), (geometry,)
