"""Recognises values that are proportional to an exponential along their last dimension, as probabilities of attention
are.

A softmax is such a value: exp(S - b) * r, with b and r one value for a row. Attention is a product of such weights
(``families/attention``), and the derivative of that product needs no sum over its weights (``gradients/weights.py``).
"""

from __future__ import annotations

from jitgen.ir.analysis import runs_along
from jitgen.ir.graph import Node, walked
from jitgen.ir.patterns import ZERO, Rewrite, Rewrites, cast, select, wildcards
from jitgen.spec import DTYPES

x, y, condition = wildcards("x y condition")
not_zero = x.where(lambda node: ZERO.match(node) is None)
SELECTION = select(condition, not_zero, ZERO) | select(condition, ZERO, not_zero)
"""x where a condition holds, or where it does not, and 0 elsewhere."""

PROPORTIONAL = Rewrites(
    Rewrite(
        "a cast of floats",
        cast(x),
        x,
        lambda last, node, x: DTYPES[node.dtype].is_floating_point and DTYPES[x.dtype].is_floating_point,
    ),
    Rewrite("a product", x * y, x, lambda last, x, y: runs_along(x, last) and not runs_along(y, last)),
    Rewrite("a quotient", x / y, x, lambda last, x, y: runs_along(x, last) and not runs_along(y, last)),
    Rewrite("a selection", SELECTION, x, lambda last, condition: not runs_along(condition, last)),
)
"""What is proportional to x along the dimension ``last``, because its other operands are one value for a row."""


def exponential_behind(weights: Node) -> bool:
    """Returns whether some path of the operations that ``linear_in`` follows ends in an exponential: a quick test."""
    nodes = walked([weights], lambda node: node.inputs if node.op in ("cast", "mul", "div", "where") else ())
    return any(node.op in ("exp", "exp2") for node in nodes)


def linear_in(weights: Node) -> Node | None:
    """Returns the exponential to which ``weights`` is proportional along its last dimension; None without one."""
    node: Node | None = weights
    while node is not None and node.op != "exp":
        node = linear_operand(node)
    return node


def linear_operand(node: Node) -> Node | None:
    """Returns the operand to which ``node`` is proportional along its last dimension, if its other operands are one
    value for a row; else None."""
    return PROPORTIONAL.result(node, len(node.shape) - 1)
