"""Describes a call's memory in numbers, as all families have it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jitgen.ir.body import Body
from jitgen.ir.views import Strided


class Touched(NamedTuple):
    """Says which elements in memory one operand reads or writes.

    Attributes:
        elements: how many, each counted once.
        first, last: the range that they are in, from the operand's first element.
    """

    elements: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Holds the numbers of a region's operands in one call, in elements.

    Attributes:
        strides: for each operand, along the axes of the region.
        offsets: for each operand, its first element's distance from its buffer's pointer; an index's first value.
        gathered: for each operand, (size, stride) of each dimension that a computed index chooses along.
        touched: for each operand, the elements in memory that a launch reads or writes.
    """

    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered: tuple[tuple[tuple[int, int], ...], ...] = ()
    touched: tuple[Touched, ...] = ()

    @property
    def gathered_sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(size for size, _ in chosen) for chosen in self.gathered)

    @property
    def gathered_strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stride for _, stride in chosen) for chosen in self.gathered)


@dataclass(frozen=True, kw_only=True)
class PointGeometry(Geometry):
    """Holds the numbers of a region that computes each point of its axes by itself.

    Attributes:
        sizes: of the axes, outermost first.
    """

    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


def gathered_of(views: Sequence[Strided], rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Computes ``Geometry.gathered`` of operands that are walked in ``rank`` dimensions, from the further ones of
    ``views``."""
    return tuple(tuple(zip(view.sizes[rank:], view.strides[rank:], strict=True)) for view in views)


def touched_of(body: Body, walked: Iterable[Iterable[tuple[int, int]]]) -> tuple[Touched, ...]:
    """Computes ``Geometry.touched``: along a dimension of stride 0, an operand that is only read is one element.

    Args:
        walked: for each operand, (size, stride) of each dimension of the walk over it.
    """
    return tuple(
        touched(pairs, operand.kind == "store" or operand.gathered > 0)
        for operand, pairs in zip(body.operands, walked, strict=True)
    )


def touched(pairs: Iterable[tuple[int, int]], moves: bool) -> Touched:
    """Returns what a walk in dimensions of (size, stride) meets.

    Args:
        moves: whether there is another element at each step, whatever the stride says.
    """
    elements, first, last = 1, 0, 0
    for size, stride in pairs:
        elements *= size if stride or moves else 1
        reach = max(size - 1, 0) * stride
        first, last = first + min(reach, 0), last + max(reach, 0)
    return Touched(elements, first, last)


def elements_read(bodies: Sequence[Body], geometries: Sequence[Geometry]) -> dict[tuple[int, str], int]:
    """Counts the elements that a launch reads of each (buffer, dtype), one that several operands read once: as many as
    these read together, but none outside of the range that they read."""
    ranges: dict[tuple[int, str], set[Touched]] = defaultdict(set)
    for body, geometry in zip(bodies, geometries, strict=True):
        for index, (operand, read) in enumerate(zip(body.operands, geometry.touched, strict=True)):
            if operand.buffer is not None and operand.kind != "store":
                chosen = touched(geometry.gathered[index] if geometry.gathered else (), True)
                start = geometry.offsets[index]
                reach = Touched(read.elements, start + read.first + chosen.first, start + read.last + chosen.last)
                ranges[operand.buffer, operand.dtype].add(reach)
    return {
        buffer: min(sum(read.elements for read in reads), max(r.last for r in reads) - min(r.first for r in reads) + 1)
        for buffer, reads in ranges.items()
    }
