"""Where a matmul kernel's operands lie: two strides each, and what they allow.

Every operand of a region is a matrix: the activation is (M, K), a dense weight (N, K), and what the epilogue reads and
writes (M, N). A quantised weight's parts are read whole, in the order their layout gives them.

As in ``families/layout.py`` the outcome is split into the *layout*, which decides the source, and the *geometry*, which
a launch passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.families.layout import ACCESS_BYTES, INDEX_LIMIT, Memory, base_of, item_size, locate
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel

QUANTIZED_PARTS = ("codes", "scales", "zeros")
MAX_UNIT = 16


@dataclass(frozen=True)
class GemmLayout:
    """The part of a region's strides that decides its source. Device-neutral.

    Attributes:
        operands: for each operand, by its kind:

            * ``load``, ``store`` and ``iota``: ``"full"`` (column stride 1), ``"column"`` (row stride 0, column stride
              1: a bias), ``"row"`` (column stride 0: a value for each row), ``"scalar"``, or ``"strided"``;
            * ``x`` and ``weight``: ``"k"`` (stride 1 along K), ``"outer"`` (stride 1 along rows or columns), or
              ``"strided"``;
            * a quantised weight's parts: ``"whole"``.
        units: for each operand, the largest power of two of elements, at most 16, by which its address and its other
            stride divide, up to 16 bytes: what one access may move. 1 where no stride is 1.
        columns_unit: the largest power of two, at most 16, that divides N.
        length_unit: the largest power of two, at most 128, that divides K.
        wide: whether an index can reach 2**31.
    """

    operands: tuple[str, ...]
    units: tuple[int, ...]
    columns_unit: int
    length_unit: int
    wide: bool


@dataclass(frozen=True)
class GemmGeometry:
    """A region's sizes and strides in a call.

    Attributes:
        rows, columns, length: M, N, K.
        strides: per operand, in elements: (row, column) of what the epilogue touches, (row, k) of the activation,
            (column, k) of a dense weight; (0, 0) of a quantised weight's parts.
        offsets: per operand, in elements from the buffer's pointer.
        extents: per operand, elements it holds: what a launch reads or writes at least once.
    """

    rows: int
    columns: int
    length: int
    strides: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def resolve(
    kernel: Kernel, environment: Mapping[str, Any], buffers: Sequence[Memory], accesses: bool = True
) -> tuple[tuple[GemmLayout, ...], tuple[GemmGeometry, ...]]:
    """Layout and geometry of each region of ``kernel``; NotViewable when a movement needs a copy first.

    ``accesses``: whether the source depends on how wide accesses are; the CPU's does not.
    """
    resolved = [_resolve_body(body, environment, buffers, accesses) for body in kernel.bodies]
    return tuple(layout for layout, _ in resolved), tuple(geometry for _, geometry in resolved)


def _resolve_body(
    body: Body, environment: Mapping[str, Any], buffers: Sequence[Memory], accesses: bool
) -> tuple[GemmLayout, GemmGeometry]:
    rows, columns = (symbols.evaluate(size, environment) for size in body.shape)
    length = symbols.evaluate(body.contractions[0].length, environment)
    strides: list[tuple[int, int]] = []
    offsets, extents, units, wide = [], [], [], False
    for operand in body.operands:
        if operand.kind in QUANTIZED_PARTS:
            part = locate(operand.movements, base_of(operand, environment, buffers), environment)
            strides.append((0, 0))
            offsets.append(part.offset)
            extents.append(_product(part.sizes))
            units.append(MAX_UNIT)
            wide = wide or extents[-1] >= INDEX_LIMIT
            continue
        view = locate(operand.movements, base_of(operand, environment, buffers), environment)
        outer, inner = view.strides
        strides.append((outer, inner))
        offsets.append(view.offset)
        extents.append(_product(size for size, step in zip(view.sizes, view.strides, strict=True) if step))
        units.append(_unit(operand, view.offset, outer, inner, buffers) if accesses else 1)
        reach = sum((size - 1) * abs(step) for size, step in zip(view.sizes, view.strides, strict=True) if size)
        wide = wide or reach >= INDEX_LIMIT
    kinds = tuple(_kind(operand, *pair) for operand, pair in zip(body.operands, strides, strict=True))
    columns_unit = _divisor(columns, 16) if accesses else 1
    length_unit = _divisor(length, 128) if accesses else 1
    layout = GemmLayout(kinds, tuple(units), columns_unit, length_unit, wide or rows * columns >= INDEX_LIMIT)
    return layout, GemmGeometry(rows, columns, length, tuple(strides), tuple(offsets), tuple(extents))


def _product(sizes: Any) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``size``; ``most`` for 0."""
    unit = most
    while size % unit:
        unit //= 2
    return unit


def _kind(operand: Operand, outer: int, inner: int) -> str:
    if operand.kind in QUANTIZED_PARTS:
        return "whole"
    if operand.kind in ("x", "weight"):
        return "k" if inner == 1 else "outer" if outer == 1 else "strided"
    if operand.kind == "iota":
        return "strided"
    if operand.kind == "load":
        if inner == 0:
            return "row" if outer else "scalar"
        if inner == 1 and outer == 0:
            return "column"
    return "full" if inner == 1 else "strided"


def _unit(operand: Operand, offset: int, outer: int, inner: int, buffers: Sequence[Memory]) -> int:
    if operand.buffer is None or 1 not in (outer, inner):
        return 1
    size = item_size(operand.dtype)
    steps = [offset * size, (outer if inner == 1 else inner) * size, buffers[operand.buffer].alignment]
    unit = ACCESS_BYTES // size
    while unit > 1 and any(step % (unit * size) for step in steps):
        unit //= 2
    return unit
