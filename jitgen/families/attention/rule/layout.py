"""Kinds and units of strides, as the layouts of attention and of its gradients say them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitgen.ir.views import Strided
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT

MOST_UNIT = 16
"""Elements of a unit at most: 16 bytes of the narrowest dtype."""


def free_strides(view: Strided) -> tuple[int, ...]:
    """The strides of ``view``; a dimension of one element has stride 0."""
    return tuple(0 if size == 1 else stride for size, stride in zip(view.sizes, view.strides, strict=True))


def score_kind(by_row: bool, by_key: bool) -> str:
    """The kind of an operand of scores, by what of a tile an element depends on; one of ``context.LEVELS``."""
    return "both" if by_row and by_key else "row" if by_row else "key" if by_key else "task"


def unit_of(sizes: Iterable[int], accesses: Iterable[tuple[int, Sequence[int]]]) -> int:
    """The largest power of two, at most ``MOST_UNIT``, that sizes and strides are multiples of, in elements.

    Args:
        sizes: of rows of contiguous operands.
        accesses: for each contiguous operand in memory, the bytes of an element, and the bytes that its addresses are
            sums of multiples of.
    """
    unit = MOST_UNIT
    while any(size % unit for size in sizes):
        unit //= 2
    for size, steps in accesses:
        while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
            unit //= 2
    return unit


def reaches_wide(dimensions: Iterable[Iterable[tuple[int, int]]]) -> bool:
    """Whether an index of an operand, of which ``dimensions`` has (size, stride) pairs, needs 64 bits."""
    reach = (sum((size - 1) * abs(stride) for size, stride in each if size) for each in dimensions)
    return max(reach, default=0) >= INDEX_LIMIT
