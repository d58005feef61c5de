"""Weights of a row: values that are proportional to an exponential along their last dimension.

A softmax is such a value: exp(S - b) * r, with b and r one value for a row. Attention is a product of such weights
(``families/attention``), and the derivative of that product needs no sum over its weights (``gradients/weights.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.ir.analysis import varies
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES


def exponential_behind(weights: Node) -> bool:
    """Whether some path of the operations that ``linear_in`` follows ends in an exponential: a quick test."""
    stack, seen = [weights], set()
    while stack:
        node = stack.pop()
        if node.op in ("exp", "exp2"):
            return True
        if id(node) not in seen and node.op in ("cast", "mul", "div", "where"):
            seen.add(id(node))
            stack.extend(node.inputs)
    return False


def linear_in(weights: Node) -> Node | None:
    """The exponential that ``weights`` is proportional to along its last dimension; None where there is none."""
    node, last = weights, (len(weights.shape) - 1,)
    while node.op != "exp":
        position = linear_operand(node, last)
        if position is None:
            return None
        node = node.inputs[position]
    return node


def linear_operand(node: Node, last: Sequence[int]) -> int | None:
    """The operand that ``node`` is proportional to, its other operands being one value for a row; None if none is."""
    if node.op == "cast":
        return 0 if DTYPES[node.dtype].is_floating_point and DTYPES[node.inputs[0].dtype].is_floating_point else None
    if node.op == "mul":
        varying = [position for position in (0, 1) if varies(node.inputs[position], last)]
        return varying[0] if len(varying) == 1 else None
    if node.op == "div":
        return 0 if varies(node.inputs[0], last) and not varies(node.inputs[1], last) else None
    if node.op == "where" and not varies(node.inputs[0], last):
        zero = [
            position
            for position in (1, 2)
            if node.inputs[position].op == "const" and not node.inputs[position].attrs[0]
        ]
        return 3 - zero[0] if len(zero) == 1 else None
    return None
