"""Computes the range of what an operation makes of integers, by the ranges of its operands.

A range is the least and the greatest value; of a condition these are 0 and 1. Values do not overflow here: whether a
range fits a dtype is for those to see who ask. Neighbours: ``families/attention/rule/narrow.py`` asks for instructions,
``deploy/trial_inputs.py`` for nodes; ``families/attention/rule/bounds.py`` prints such rules for ranges of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Range = tuple[int, int]
"""The least and the greatest value."""

WIDEST_SHIFT = 62
"""Bits by which an integer of 64 bits is shifted at most to have a range."""


def of_result(op: str, dtype: str, operands: Sequence[Range | None]) -> Range | None:
    """Returns the range of what ``op`` computes of integers or conditions; None where it is not known.

    Args:
        op: a name of ``ir/ops.py``.
        dtype: of the result.
        operands: their ranges; None where one is not known, which for a condition of ``where`` is no loss.
    """
    if op == "where":
        operands = operands[0] or (0, 1), *operands[1:]
    known = [ends for ends in operands if ends is not None]
    if op not in _RULES or len(known) < len(operands):
        return None
    if op == "bitwise_not" and dtype != "bool":
        return ~known[0][1], ~known[0][0]
    return _RULES[op](*known)


def hull(ranges: Sequence[Range]) -> Range:
    """Returns the least range that has all of ``ranges``."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _corners(operation: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """Returns the range of an operation that is monotonic in each operand."""

    def rule(left: Range, right: Range) -> Range:
        corners = [operation(a, b) for a in left for b in right]
        return min(corners), max(corners)

    return rule


def _quotient(left: Range, right: Range) -> Range | None:
    return _corners(lambda a, b: a // b)(left, right) if right[0] > 0 else None


def _truncated_quotient(left: Range, right: Range) -> Range | None:
    return _quotient(left, right) if left[0] >= 0 else None


def _remainder(left: Range, right: Range) -> Range | None:
    if right[0] <= 0:
        return None
    return left if left[0] >= 0 and left[1] < right[0] else (0, right[1] - 1)


def _shifted(operation: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    rule = _corners(operation)
    return lambda left, right: rule(left, right) if right[0] >= 0 and right[1] <= WIDEST_SHIFT else None


def _selected(condition: Range, left: Range, right: Range) -> Range:
    if condition[0] == condition[1]:
        return left if condition[0] else right
    return hull([left, right])


def _less(left: Range, right: Range) -> Range:
    return int(left[1] < right[0]), int(left[0] < right[1])


def _equal(left: Range, right: Range) -> Range:
    may_be = left[0] <= right[1] and right[0] <= left[1]
    return int(may_be and left[0] == left[1] == right[0] == right[1]), int(may_be)


def _conjunction(left: Range, right: Range) -> Range | None:
    lows, highs = zip(left, right, strict=True)
    if min(lows) < 0:
        return None
    return (min(lows) if max(highs) <= 1 else 0), min(highs)


def _disjunction(left: Range, right: Range) -> Range | None:
    lows, highs = zip(left, right, strict=True)
    return (max(lows), (1 << max(highs).bit_length()) - 1) if min(lows) >= 0 else None


def _difference(left: Range, right: Range) -> Range | None:
    ends = _disjunction(left, right)
    if ends is None or ends[1] > 1:
        return None if ends is None else (0, ends[1])
    return _not(_equal(left, right))


def _not(condition: Range) -> Range:
    return 1 - condition[1], 1 - condition[0]


_RULES: Mapping[str, Callable[..., Range | None]] = {
    "add": _corners(lambda a, b: a + b),
    "sub": _corners(lambda a, b: a - b),
    "mul": _corners(lambda a, b: a * b),
    "minimum": _corners(min),
    "maximum": _corners(max),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (max(0, a[0], -a[1]), max(-a[0], a[1])),
    "floor_divide": _quotient,
    "trunc_divide": _truncated_quotient,
    "remainder": _remainder,
    "left_shift": _shifted(lambda a, b: a << b),
    "right_shift": _shifted(lambda a, b: a >> b),
    "where": _selected,
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "le": lambda a, b: _not(_less(b, a)),
    "ge": lambda a, b: _not(_less(a, b)),
    "bitwise_and": _conjunction,
    "bitwise_or": _disjunction,
    "bitwise_xor": _difference,
    "bitwise_not": _not,
}
"""The range of an operation's result, by the ranges of its operands; None where it is not known."""
