"""Describes a call's memory in numbers, as all families have it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jitgen.ir.body import Body
from jitgen.ir.views import Strided


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Holds the numbers of a region's operands in one call, in elements.

    Attributes:
        strides: for each operand, along the axes of the region.
        offsets: for each operand, its first element's distance from its buffer's pointer; an index's first value.
        gathered: for each operand, (size, stride) of each dimension that a computed index chooses along.
        touched: for each operand, how many elements in memory a launch reads or writes, each counted once.
    """

    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered: tuple[tuple[tuple[int, int], ...], ...] = ()
    touched: tuple[int, ...] = ()

    @property
    def gathered_sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(size for size, _ in chosen) for chosen in self.gathered)

    @property
    def gathered_strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stride for _, stride in chosen) for chosen in self.gathered)


def gathered_of(views: Sequence[Strided], rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Computes ``Geometry.gathered`` of operands that are walked in ``rank`` dimensions, from the further ones of
    ``views``."""
    return tuple(tuple(zip(view.sizes[rank:], view.strides[rank:], strict=True)) for view in views)


def touched_of(body: Body, walked: Iterable[Iterable[tuple[int, int]]]) -> tuple[int, ...]:
    """Computes ``Geometry.touched``: along a dimension of stride 0, an operand that is only read is one element.

    Args:
        walked: for each operand, (size, stride) of each dimension of the walk over it.
    """
    return tuple(
        math.prod(size for size, stride in pairs if stride or operand.kind == "store" or operand.gathered)
        for operand, pairs in zip(body.operands, walked, strict=True)
    )
