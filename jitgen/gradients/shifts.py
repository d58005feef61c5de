"""Proves that the values subtracted from exponents of rows change nothing, as in a softmax.

A softmax subtracts the largest score b of a row from its scores. The exponentials and their sum are then divided by
exp(b), their quotient is what it was, and so is b plus the logarithm of the sum: the gradient of b is zero, and its
backward needs neither to find the largest score again nor to add anything up. ``changes_nothing`` proves that for what
a graph computes from b. Where it cannot, b has a gradient like every other value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.ir.graph import Node, postorder
from jitgen.ir.nodes import CAST, CONST, CONTRACT, REDUCE, VIEW
from jitgen.spec import DTYPES

_EXPONENTIALS = {"exp": "log", "exp2": "log2"}
"""Each exponential and its inverse."""


@dataclass(frozen=True)
class _Shift:
    """Says how a value of a row depends on b.

    Attributes:
        times: what b is multiplied with.
        exponential: None for a sum of ``times`` times b and what does not depend on b; for a product of what does not
            and the exponential of ``times`` times b: ``"exp"`` or ``"exp2"``.
        vanishes: whether it is zero where all powers of the row are.
        guarded: whether it is a constant where all powers of the row are zero: what vanishes may be divided by it.
    """

    times: int
    exponential: str | None = None
    vanishes: bool = False
    guarded: bool = False

    def is_like(self, other: _Shift) -> bool:
        """Returns whether both depend on b in the same way."""
        return (self.times, self.exponential) == (other.times, other.exponential)


_NONE = _Shift(0)


def changes_nothing(
    base: Node, power: Node, users: Mapping[int, Sequence[Node]], active: Collection[int], roots: Collection[int]
) -> bool:
    """Returns whether no root depends on ``base``, one value for each row of ``power``, along what gradients flow
    through.

    Args:
        base: the value, before it is spread along rows.
        power: an exponential of which ``base`` is subtracted from the operand.
        users: what reads a node, by its id.
        active: the ids of nodes that a gradient flows through. Others count as constants.
        roots: the ids of the nodes that gradients come from.
    """
    shifts: dict[int, _Shift] = {id(base): _Shift(1)}
    waiting = _reached(base, users, active)
    if id(base) in roots:
        return False
    for node in waiting:
        if all(id(child) not in shifts for child in node.inputs):
            continue
        shift = _shift_of(node, [shifts.get(id(child), _NONE) for child in node.inputs], power)
        if shift is None or (shift.times and id(node) in roots):
            return False
        if shift.times:
            shifts[id(node)] = replace(shift, vanishes=True) if node is power else shift
    return True


def _reached(base: Node, users: Mapping[int, Sequence[Node]], active: Collection[int]) -> list[Node]:
    """Returns the active nodes that are computed from ``base``, each after its operands."""
    *nodes, _ = postorder([base], lambda node: [user for user in users.get(id(node), ()) if id(user) in active])
    return nodes[::-1]


def _shift_of(node: Node, shifts: Sequence[_Shift], power: Node) -> _Shift | None:
    """Returns how the value of ``node`` depends on b, from ``shifts`` of its operands, not all of which are zero; None
    if that cannot be said."""
    first, rank = shifts[0], len(power.shape)
    if node.kind is VIEW:
        return first if _keeps_rows(node, rank) else None
    if node.kind is CAST and DTYPES[node.dtype].is_floating_point:
        return first
    if node.op in ("mul", "div"):
        return _product(first, shifts[1], 1 if node.op == "mul" else -1)
    if node.op == "reciprocal" and first.exponential is not None:
        return replace(first, times=-first.times, vanishes=False)
    if any(shift.guarded for shift in shifts):
        return None
    if node.op in ("add", "sub"):
        return _sum(first, shifts[1], 1 if node.op == "add" else -1)
    if node.op == "neg" and first.exponential is None:
        return _Shift(-first.times)
    if node.op in _EXPONENTIALS and first.exponential is None:
        return _Shift(first.times, node.op)
    if first.exponential is not None and node.op == _EXPONENTIALS[first.exponential]:
        return _Shift(first.times)
    if node.kind is CONTRACT and first.exponential is not None and not shifts[1].times:
        return first if _keeps_rows_of_left(node.attrs.equation, rank) else None
    if node.kind is REDUCE and node.attrs == ("sum", (rank - 1,)) and first.exponential is not None:
        return first
    return _selected(node, shifts, power) if node.op == "where" else None


def _sum(left: _Shift, right: _Shift, sign: int) -> _Shift | None:
    if left.exponential is None and right.exponential is None:
        return _Shift(left.times + sign * right.times)
    return replace(left, vanishes=left.vanishes and right.vanishes) if left.is_like(right) else None


def _product(left: _Shift, right: _Shift, sign: int) -> _Shift | None:
    kinds = {shift.exponential for shift in (left, right) if shift.times}
    if len(kinds) != 1 or None in kinds:
        return None
    times = left.times + sign * right.times
    guarded, vanishes = left.guarded or right.guarded, left.vanishes or (sign > 0 and right.vanishes)
    if guarded and left.times and right.times:
        return _NONE if vanishes and not times else None
    return _Shift(times, kinds.pop(), vanishes, guarded) if times else _NONE


def _selected(node: Node, shifts: Sequence[_Shift], power: Node) -> _Shift | None:
    """Returns the shift of ``where``, if its operands have equal shifts.

    A constant 0 is every exponential times 0. Any other constant guards a division: it is one where the condition is
    that the sum of the powers of a row is zero.
    """
    condition, *values = node.inputs
    if shifts[1].is_like(shifts[2]):
        return replace(shifts[1], vanishes=shifts[1].vanishes and shifts[2].vanishes)
    constants = [value for value in values if value.kind is CONST]
    if len(constants) != 1:
        return None
    (constant,) = constants
    other = values[1 - values.index(constant)]
    shift = shifts[1 + values.index(other)]
    if shift.exponential is None:
        return None
    if constant.attrs.value == 0:
        return shift
    picked = "eq" if constant is values[0] else "ne"
    tests_zero = condition.op == picked and any(
        one is other and zero.kind is CONST and zero.attrs.value == 0
        for one, zero in (condition.inputs, condition.inputs[::-1])
    )
    return replace(shift, vanishes=False, guarded=True) if tests_zero and _is_sum_of(other, power) else None


def _is_sum_of(row_sum: Node, power: Node) -> bool:
    """Returns whether ``row_sum`` is the sum of each row of ``power``, and of nothing else."""
    while row_sum.kind in (VIEW, CAST):
        row_sum = row_sum.inputs[0]
    source = row_sum.inputs[0] if row_sum.kind is REDUCE else row_sum
    while source.kind is CAST:
        source = source.inputs[0]
    return row_sum.kind is REDUCE and source is power


def _keeps_rows(view: Node, rank: int) -> bool:
    """Returns whether each element of ``view`` is in the row in which it was; values have ``rank`` dimensions."""
    (source,) = view.inputs
    kind, last = view.attrs.kind, rank - 1
    if kind == "expand":
        sizes = zip(source.shape[:last], view.shape[:last], strict=True) if len(source.shape) == rank else ()
        return len(source.shape) == rank and all(before != 1 or after == 1 for before, after in sizes)
    if kind in ("unsqueeze", "squeeze"):
        return bool(view.attrs.dim == last)
    shapes = tuple(source.shape), tuple(view.shape)
    return kind == "reshape" and any(len(one) == rank and one == (*other, 1) for one, other in (shapes, shapes[::-1]))


def _keeps_rows_of_left(equation: str, rank: int) -> bool:
    """Returns whether a product sums over the last dimension of its left operand, of which it has the others in their
    order."""
    operands, _, result = equation.partition("->")
    left, _, _ = operands.partition(",")
    return len(left) == len(result) == rank and left[:-1] == result[:-1] and left[-1] not in result
