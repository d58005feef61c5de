"""Lays out a sort kernel's operands, and says what a launch passes and what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.ir.sorts import Order
from jitgen.kernel import launch
from jitgen.kernel.geometry import touched_of
from jitgen.kernel.launch import Work
from jitgen.kernel.operands import Call
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.rows import RowGeometry, RowLayout, is_wide, row_geometry, row_layout, row_parameters

MOST_ELEMENTS = {"cuda": 4096, "triton": 1024}
"""Elements of a row that a block sorts at most. CUDA keeps values of up to 8 bytes and indices of 4 in the 48 KiB of
shared memory that need no attribute; Triton's compile time grows with the square of the number's logarithm."""


@dataclass(frozen=True, kw_only=True)
class Geometry(RowGeometry):
    """Holds a call's sizes and strides. Where chunks are merged, ``length`` is that of the row that they were cut from.

    Attributes:
        start, count: the ranks that are stored: from ``start`` on, ``count`` of them.
        ranks: where chunks are merged, ranks of each chunk.
        chunks: of a row.
        bound: of numbers that are counted; else 0.
    """

    start: int
    count: int
    ranks: int
    chunks: int
    bound: int


def order_of(body: Body) -> Order:
    """Returns the order of the sort, or of the merge, that ``body`` is."""
    return next(i.attr[1] for i in body.instructions if i.op in ("sort", "merge"))


def is_merge(body: Body) -> bool:
    """Returns whether ``body`` merges sorted chunks."""
    return any(instruction.op == "merge" for instruction in body.instructions)


def is_counted(body: Body) -> bool:
    """Returns whether ``body`` counts numbers below a bound."""
    return order_of(body).bound != 0


def layout(kernel: Kernel, call: Call) -> tuple[tuple[RowLayout, ...], tuple[Geometry, ...]]:
    """Computes layout and geometry of the kernel's one body; NotViewable if a movement needs a copy first."""
    (body,) = kernel.bodies
    order, rows = order_of(body), row_geometry(body, call)
    start, count = (symbols.evaluate(number, call.environment) for number in (order.start, order.count))
    length = symbols.evaluate(order.length, call.environment) if order.chunk else rows.length
    chunks = -(-length // order.chunk) if order.chunk else 1
    ranks = rows.length // chunks if order.chunk else 0
    bound = symbols.evaluate(order.bound, call.environment)
    numbers = vars(rows) | {"length": length, "start": start, "count": count, "ranks": ranks, "chunks": chunks}
    numbers |= {"bound": bound}
    read, stored = (ranks * chunks, count) if is_merge(body) else (length, count * chunks)
    extents = ((*rows.sizes, stored if operand.kind == "store" else read) for operand in body.operands)
    geometry = Geometry(**numbers | {"touched": touched_of(body, map(zip, extents, rows.strides))})
    layout_ = replace(row_layout(body, rows, call, units=False), wide=is_wide(geometry, max(length, rows.length)))
    return (layout_,), (geometry,)


def parameters(kernel: Kernel, layouts: Sequence[RowLayout], device: Device) -> KernelParameters:
    """Declares the parameters of rows, whose lengths are ``length`` of a row, ``start`` and ``count`` of the ranks that
    are stored, ``ranks`` of a chunk where chunks are merged, and the ``bound`` of numbers that are counted."""
    (body,) = kernel.bodies
    lengths = ("length", "start", "count", *["ranks"] * is_merge(body), *["bound"] * is_counted(body))
    return row_parameters(kernel, layouts, device, lengths)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Any) -> Work:
    """Counts what one launch amounts to; a launch that stores nothing is none. An empty row has ends: zeros."""
    (geometry,), (body,) = geometries, kernel.bodies
    counted = launch.work(kernel, geometries, schedule)
    if any(instruction.op == "sort" and instruction.attr[0] == "ends" for instruction in body.instructions):
        return replace(counted, elements=max(counted.elements, geometry.bound))
    return counted if geometry.count else replace(counted, elements=0)
