"""What kernels have in common that go along rows: outer dimensions, which count rows, and one along the row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jitgen.ir.body import Body
from jitgen.kernel.launch import Integer, traffic


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
