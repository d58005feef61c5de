"""What kernels have in common that go along rows: outer dimensions, which count rows, and one along the row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jitgen.ir.body import Body
from jitgen.kernel.launch import Integer, traffic
from jitgen.kernel.layout import reaches_wide, unit_of, views_of
from jitgen.kernel.operands import INDEX_LIMIT, Call, item_size


@dataclass(frozen=True)
class RowGeometry:
    """A call's sizes, strides and offsets, all in elements.

    Attributes:
        sizes: sizes of the outer dimensions, outermost first.
        length: elements of a row.
        strides: for each operand its stride in each outer dimension, then its stride along the row.
        offsets: for each operand the offset of its first element.
    """

    sizes: tuple[int, ...]
    length: int
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def elements(self) -> int:
        return self.rows * self.length


def row_views(body: Body, call: Call) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Strides and offset of each operand where a row is the last dimension; one with an element for a row does not
    move along it."""
    views = views_of(body, call)
    strides = [
        (*view.strides[:-1], 0) if operand.row else view.strides
        for operand, view in zip(body.operands, views, strict=True)
    ]
    return strides, tuple(view.offset for view in views)


def row_wide(geometry: RowGeometry, length: int) -> bool:
    """Whether an index can reach 2**31 in rows of ``length`` elements."""
    extents = (*geometry.sizes, length)
    pairs = (zip(extents, strides, strict=True) for strides in geometry.strides)
    return geometry.elements >= INDEX_LIMIT or reaches_wide(pairs)


def row_unit(body: Body, geometry: RowGeometry, dim: int, kinds: Sequence[str], call: Call) -> int:
    """The largest power of two of elements, at most ``MAX_UNIT``, that one access can move along ``dim`` of every
    operand whose kind is ``"contiguous"``; 1 on a CPU.

    Args:
        dim: -1 for the row, -2 for the innermost outer dimension.
    """
    if not call.is_gpu:
        return 1
    accesses = []
    for operand, kind, strides, offset in zip(body.operands, kinds, geometry.strides, geometry.offsets, strict=True):
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            others = (stride for index, stride in enumerate(strides) if index != len(strides) + dim)
            steps = [offset * size, *(stride * size for stride in others), call.buffers[operand.buffer].alignment]
            accesses.append((size, steps))
    return unit_of(((*geometry.sizes, geometry.length)[dim],), accesses)


def row_integers(
    body: Body, outer: int, kinds: Sequence[str], lengths: Sequence[str] = ("length",)
) -> Iterator[Integer]:
    """The integer parameters in order.

    ``lengths``, numbers of the geometry; ``n0``, ... the sizes of the outer dimensions; ``s<operand>_<dim>`` an
    operand's stride in an outer dimension; ``r<operand>`` its stride along the row where ``kinds`` has ``"strided"``;
    ``o<operand>`` the first value of an iota.
    """
    for name in lengths:
        yield name, name, -1, -1
    for dim in range(outer):
        yield f"n{dim}", "sizes", -1, dim
    for index, (operand, kind) in enumerate(zip(body.operands, kinds, strict=True)):
        if operand.kind == "iota":
            yield f"o{index}", "offsets", index, -1
        for dim in range(outer):
            yield f"s{index}_{dim}", "strides", index, dim
        if kind == "strided":
            yield f"r{index}", "strides", index, outer


def row_traffic(body: Body, geometry: RowGeometry) -> tuple[int, int]:
    """Bytes that a launch moves and that it writes; see ``traffic``."""
    extents = ((*geometry.sizes, 1 if operand.row else geometry.length) for operand in body.operands)
    return traffic(body, geometry.strides, extents)
