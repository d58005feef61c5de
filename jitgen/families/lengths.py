"""Says how long the text of a kernel is, in plain operations: compilers take time that grows with it, and from some
length on faster than it.

A pointwise expression that is longer than ``LONGEST`` is computed by several kernels (``long_expressions.py``). Results
and regions that are longer together have a region and a kernel each, unless most of their text is what they have in
common.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jitgen.ir.graph import Node, postorder, walked
from jitgen.ir.nodes import CAT, VIEW
from jitgen.ir.ops import flops_of

LONGEST = 1024
"""Plain operations of a text, at most: of 1,600 additions and multiplications Triton took 19 s, where 800 took 5 s, g++
4.7 s (2.4 s), and NVRTC 1.5 s (0.8 s), on two cores of an AMD EPYC."""

INLINED = frozenset(
    {
        *("sin", "cos", "tan", "sinh", "cosh", "pow", "atan2", "erf", "erfc", "log1p", "asinh", "acosh", "atanh"),
        *("fmod", "remainder", "floor_divide", "trunc_divide"),
    }
)
"""Operations of which a compiler inlines a text of some hundred instructions or more."""

OF_INLINED = 32
"""What one of them counts for: each takes g++ or NVRTC 0.1 to 0.4 s more (a multiplication 0.001 to 0.003), and other
functions 0.01 to 0.05 s (busy cores)."""


def length_of(op: str) -> int:
    """Returns what operation ``op`` adds to the length of a text."""
    return OF_INLINED if op in INLINED else max(1, flops_of(op))


def length(nodes: Iterable[Node]) -> int:
    """Returns the length of a text that computes ``nodes``, of which those that are not pointwise count for nothing."""
    return sum(length_of(node.op) for node in nodes if node.kind.is_pointwise)


class Lengths:
    """Knows the lengths of expressions, from tensors and what is not pointwise on; an upper bound where that is within
    ``LONGEST``."""

    def __init__(self) -> None:
        self._lengths: dict[Node, int] = {}

    def measured(self, root: Node) -> int:
        """Returns the length of the expression ``root``."""
        for node in postorder([root], lambda node: () if node in self._lengths else operands_of(node)):
            if node in self._lengths:
                continue
            operands = operands_of(node)
            counts = [self._lengths[child] for child in dict.fromkeys(operands)]
            if node.kind is CAT:  # each piece has a region of its own
                count = max(counts)
            else:
                count = (length_of(node.op) if node.kind.is_pointwise else 0) + sum(counts)
            if count > LONGEST:  # what operands have in common was counted for each
                count = length(walked([node], operands_of))
            self._lengths[node] = count
        return self._lengths[root]


def operands_of(node: Node) -> tuple[Node, ...]:
    """Returns the operands of which a text computes ``node``: views move to what they are of."""
    is_text = node.kind.is_pointwise or node.kind in (CAT, VIEW)
    return node.inputs if is_text and not node.kind.is_number else ()


def share_a_text(left: Set[Node], right: Set[Node]) -> bool:
    """Returns whether one text computes the nodes of ``left`` and those of ``right``: it is not too long, or one for
    each would compute most of what is in both twice."""
    both = length(left | right)
    return both <= LONGEST or 2 * (length(left) + length(right)) > 3 * both
