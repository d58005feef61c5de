"""Derives strides from an operand's movements, and from strides what accesses and indices they allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitgen.ir.body import Body
from jitgen.ir.views import Strided
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, Call, view_of


def views_of(body: Body, call: Call) -> list[Strided]:
    """Returns the memory of each operand of ``body`` as it is walked; NotViewable where a movement needs a copy
    first."""
    return [view_of(operand, call) for operand in body.operands]


def stride_kind(stride: int) -> str:
    """Returns the kind of an operand along a dimension in which it has ``stride``, in elements."""
    return {1: "contiguous", 0: "broadcast"}.get(stride, "strided")


def unit_of(sizes: Iterable[int], accesses: Iterable[tuple[int, Sequence[int]]]) -> int:
    """Returns the largest power of two, at most ``MAX_UNIT``, of which sizes and strides are multiples, in elements.

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
    """Returns whether an index of an operand, of which ``dimensions`` has (size, stride) pairs, needs 64 bits."""
    reach = (sum((size - 1) * abs(stride) for size, stride in pairs if size) for pairs in dimensions)
    return max(reach, default=0) >= INDEX_LIMIT


def constant_in_row(body: Body, inner: Sequence[int]) -> set[int]:
    """Returns the positions of instructions with the same result for all of the innermost dimension, along which
    operands have the strides ``inner``."""
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
