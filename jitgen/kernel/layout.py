"""From an operand's movements to strides, and from strides to what accesses and indices they allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitgen.ir.body import Body
from jitgen.ir.views import Strided
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, Call, view_of


def views_of(body: Body, call: Call) -> list[Strided]:
    """The memory of each operand of ``body`` as it is walked; NotViewable where a movement needs a copy first."""
    return [view_of(operand, call) for operand in body.operands]


def stride_kind(stride: int) -> str:
    """What an operand is along a dimension in which it has ``stride``, in elements."""
    return {1: "contiguous", 0: "broadcast"}.get(stride, "strided")


def unit_of(sizes: Iterable[int], accesses: Iterable[tuple[int, Sequence[int]]]) -> int:
    """The largest power of two, at most ``MAX_UNIT``, that sizes and strides are multiples of, in elements.

    Args:
        sizes: of rows of contiguous operands.
        accesses: for each contiguous operand in memory, the bytes of an element, and the bytes that its addresses are
            sums of multiples of. Beyond ``ACCESS_BYTES`` nothing is asked of these.
    """
    unit = MAX_UNIT
    while any(size % unit for size in sizes):
        unit //= 2
    for size, steps in accesses:
        while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
            unit //= 2
    return unit


def reaches_wide(dimensions: Iterable[Iterable[tuple[int, int]]]) -> bool:
    """Whether an index of an operand, of which ``dimensions`` has (size, stride) pairs, needs 64 bits."""
    reach = (sum((size - 1) * abs(stride) for size, stride in pairs if size) for pairs in dimensions)
    return max(reach, default=0) >= INDEX_LIMIT


def constant_in_row(body: Body, inner: Sequence[int]) -> set[int]:
    """The positions of instructions whose results are the same for all of the innermost dimension, along which operands
    have the strides ``inner``."""
    constant: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if instruction.op in ("load", "iota"):
            if inner[instruction.attr] == 0:
                constant.add(position)
        elif instruction.op == "gather":
            if inner[instruction.attr] == 0 and constant.issuperset(instruction.args):
                constant.add(position)
        elif constant.issuperset(instruction.args):
            constant.add(position)
    return constant
