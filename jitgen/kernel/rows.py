"""Shares what kernels that go along rows have in common: outer dimensions, which count rows, and one along the row.

The *layout* decides what source is generated; the *geometry* is what a launch passes as plain integers. Their
parameters are a pointer for each operand in memory, in order; the integers ``length``, ``n0`` ... (sizes of the outer
dimensions) and for each operand ``o<operand>`` (the first value of an iota), ``s<operand>_<dim>`` (its stride in an
outer dimension) and ``r<operand>`` (its stride along the row, where the layout does not fix it); the run-time scalars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.views import NotViewable
from jitgen.kernel.geometry import Geometry, touched_of
from jitgen.kernel.launch import LaunchShape, Work, blocks_of, work
from jitgen.kernel.layout import reaches_wide, stride_kind, unit_of, views_of
from jitgen.kernel.operands import INDEX_LIMIT, Call, collapse, item_size
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared


@dataclass(frozen=True)
class RowLayout:
    """Holds the facts about strides that decide the source; it does not depend on a device.

    Attributes:
        outer: how many dimensions count rows, at least 1, the innermost last, after neighbours were merged.
        along: what each operand is along the row: ``"contiguous"`` (stride 1), ``"strided"``, ``"broadcast"`` (stride
            0: one element for the whole row), ``"row"`` (the body reads or writes it once a row) or ``"block"`` (it
            writes one for each block of the row).
        across: what each operand is from a row to the next: ``"contiguous"``, ``"strided"`` or ``"broadcast"``; empty
            strings where the family does not ask.
        columns: whether neighbouring elements belong to neighbouring rows, as those of a matrix's columns do: the
            innermost outer dimension is the contiguous one.
        unit: the largest power of two of elements, at most 16, that one access can move of every contiguous operand:
            along the row, or with ``columns`` from row to row.
        wide: whether an index can reach 2**31.
        row_invariant: for each operand, whether all rows, of which there are several, read the same elements of it;
            empty where the family does not ask.
    """

    outer: int
    along: tuple[str, ...]
    across: tuple[str, ...]
    columns: bool
    unit: int
    wide: bool
    row_invariant: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowGeometry(Geometry):
    """Holds a call's sizes, and the strides of operands in each outer dimension and along the row.

    Attributes:
        sizes: sizes of the outer dimensions, outermost first.
        length: elements of a row.
        leader: the operand in whose order in memory rows are numbered: the first that moves along the row.
    """

    sizes: tuple[int, ...]
    length: int
    leader: int

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def elements(self) -> int:
        return self.rows * self.length

    @property
    def goes_across(self) -> bool:
        """Returns whether the leader's neighbours in memory belong to the next row."""
        along, across = abs(self.strides[self.leader][-1]), abs(self.strides[self.leader][-2])
        return self.length > 1 and along > across > 0


def row_geometry(body: Body, call: Call, one_stride: bool = False) -> RowGeometry:
    """Computes the geometry of ``body``; NotViewable if an operand needs a copy first.

    Args:
        one_stride: whether the dimensions of a row become one, in which an operand that does not move has stride 0
            or, in a row of one element, any.
    """
    sizes = symbols.evaluated(body.shape, call.environment)
    rank = len(sizes) - body.row_rank
    views = views_of(body, call)
    outer = [view.strides[:rank] for view in views]
    inner = [
        (0,) * body.row_rank if operand.row else view.strides[rank:]
        for operand, view in zip(body.operands, views, strict=True)
    ]
    leader = next((i for i, steps in enumerate(inner) if any(steps) and not body.operands[i].row), 0)
    outer_sizes, outer_strides = collapse(sizes[:rank], outer, leader)
    row_sizes, row_strides = sizes[rank:], tuple(inner)
    if one_stride:
        row_sizes, row_strides = collapse(row_sizes, inner, leader)
        if 0 in row_sizes:  # no element is read, whatever the strides say
            row_sizes, row_strides = (0,), tuple((int(not operand.row),) for operand in body.operands)
    if len(row_sizes) != 1:
        raise NotViewable("a row whose operands have no common stride")
    strides = tuple((*steps, *step) for steps, step in zip(outer_strides, row_strides, strict=True))
    length = math.prod(sizes[rank:])
    extents = ((*outer_sizes, _extent(operand, length, call)) for operand in body.operands)
    return RowGeometry(
        strides=strides,
        offsets=tuple(view.offset for view in views),
        touched=touched_of(body, map(zip, extents, strides)),
        sizes=outer_sizes,
        length=length,
        leader=leader,
    )


def _extent(operand: Operand, length: int, call: Call) -> int:
    """Returns how many elements of a row of ``length`` elements ``operand`` has."""
    if operand.within is not None:
        first, end = (symbols.evaluate(size, call.environment) for size in operand.within)
        return end - first
    if operand.block:
        return length // operand.block
    return 1 if operand.row else length


def row_layout(
    body: Body, geometry: RowGeometry, call: Call, columns: bool = False, asks_across: bool = False, units: bool = True
) -> RowLayout:
    """Computes the layout of ``body``.

    Args:
        columns: whether the family goes from row to row where neighbours belong to neighbouring rows, as they do here.
        asks_across: whether sources depend on what operands are from row to row, with ``columns`` or not.
        units: whether sources depend on how many elements one access moves.
    """
    along = tuple(
        "row" if operand.row else "block" if operand.block else stride_kind(steps[-1])
        for operand, steps in zip(body.operands, geometry.strides, strict=True)
    )
    asks_across = asks_across or columns
    across = tuple(stride_kind(steps[-2]) if asks_across else "" for steps in geometry.strides)
    return RowLayout(
        outer=len(geometry.sizes),
        along=along,
        across=across,
        columns=columns,
        unit=_unit(body, geometry, -2 if columns else -1, across if columns else along, call) if units else 1,
        wide=is_wide(geometry, geometry.length),
    )


def layout(kernel: Kernel, call: Call) -> tuple[tuple[RowLayout, ...], tuple[RowGeometry, ...]]:
    """Computes layout and geometry of a kernel whose rows are one dimension; NotViewable if a movement needs a copy
    first."""
    (body,) = kernel.bodies
    geometry = row_geometry(body, call)
    columns = geometry.sizes[-1] > 1 and geometry.goes_across
    return (row_layout(body, geometry, call, columns, asks_across=True),), (geometry,)


def is_wide(geometry: RowGeometry, length: int) -> bool:
    """Returns whether an index can reach 2**31 in rows of ``length`` elements."""
    extents = (*geometry.sizes, length)
    pairs = (zip(extents, strides, strict=True) for strides in geometry.strides)
    return geometry.elements >= INDEX_LIMIT or reaches_wide(pairs)


def _unit(body: Body, geometry: RowGeometry, dim: int, kinds: Sequence[str], call: Call) -> int:
    """Computes ``RowLayout.unit``; ``dim`` is -1 along the row and -2 from row to row. 1 on a CPU. A dimension of one
    index has no step."""
    if not call.is_gpu:
        return 1
    extents = (*geometry.sizes, geometry.length)
    walked = [index for index, size in enumerate(extents) if index != len(extents) + dim and size != 1]
    accesses = []
    for operand, kind, strides, offset in zip(body.operands, kinds, geometry.strides, geometry.offsets, strict=True):
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            others = (strides[index] * size for index in walked)
            steps = [offset * size, *others, call.buffers[operand.buffer].alignment]
            accesses.append((size, steps))
    return unit_of((extents[dim],), accesses)


def row_parameters(
    kernel: Kernel, layouts: Sequence[RowLayout], device: Device, lengths: Sequence[str] = ("length",)
) -> KernelParameters:
    """Declares the parameters of a row kernel; ``lengths`` are numbers of its geometry that come first."""
    (body,), (layout,) = kernel.bodies, layouts
    axes = [*(Integer(name, name) for name in lengths)]
    axes += [Integer(f"n{dim}", "sizes", dim=dim) for dim in range(layout.outer)]

    def step(number: int, kind: str) -> str:
        return "1" if kind == "contiguous" else f"r{number}" if kind in ("strided", "block") else "0"

    operands = [
        declared(operand, i, [*[""] * layout.outer, step(i, kind)])
        for i, (operand, kind) in enumerate(zip(body.operands, layout.along, strict=True))
    ]
    return KernelParameters((RegionParameters(tuple(axes), tuple(operands)),), layout.wide)


def row_work(kernel: Kernel, geometries: Sequence[RowGeometry], schedule: Any) -> Work:
    """Counts what one launch amounts to. Empty rows are no work, unless they are reduced: a sum of nothing is 0."""
    (geometry,), (body,) = geometries, kernel.bodies
    counted = work(kernel, geometries, schedule)
    reduces_nothing = not geometry.length and any(instruction.op == "reduce" for instruction in body.instructions)
    return replace(counted, elements=geometry.rows) if reduces_nothing else counted


def row_launch(
    kernel: Kernel, layouts: Sequence[RowLayout], geometries: Sequence[RowGeometry], schedule: Any, device: Device
) -> LaunchShape:
    """Returns blocks for as many rows as each has at once, of each chunk; on a CPU, pieces of work."""
    (geometry,), (body,) = geometries, kernel.bodies
    return blocks_of(-(-geometry.rows // schedule.rows) * body.chunks, schedule.threads, device)
