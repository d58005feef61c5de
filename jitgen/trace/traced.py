"""Holds what a trace leaves: the graph, the structure of the return value, and what it captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from jitgen.ir.graph import Graph
from jitgen.trace.captured import Captured
from jitgen.trace.journal import Changes


@dataclass(frozen=True)
class Output:
    """Describes one leaf of the function's return value.

    Attributes:
        index: the graph output that it is; None where it is no tensor.
        value: where it is no tensor, the value, or its ``Expr`` where that is symbolic; ``Sizes`` of a ``torch.Size``.
        untracked: why autograd does not know of a tensor in a graph without marks; see ``TensorProxy``.
    """

    index: int | None
    value: Any = None
    untracked: str | None = None


class Sizes(tuple[Any, ...]):
    """Holds the ints and ``Expr`` of a ``torch.Size``, which a function may return."""


@dataclass(frozen=True)
class Traced:
    """Holds the result of a trace.

    Attributes:
        graph: the function as a graph.
        leaves, tree: the return value, flattened, and the structure to rebuild it with.
        captured: the captured tensors, in the order of the graph's inputs; they follow the arguments.
        guards: captured values, and torch settings that the trace depends on, which must not change.
        follows_arguments: whether captured tensors or guarded values are read from objects among the arguments.
        changes: what the function changed outside of it, of which the call that was traced makes what is not there yet;
            such a trace is for one call alone.
        under_no_grad: indices of captured tensors that required grad, and that the function uses under ``no_grad``.
    """

    graph: Graph
    leaves: tuple[Output, ...]
    tree: pytree.TreeSpec
    captured: tuple[Captured, ...]
    guards: tuple[Captured, ...]
    under_no_grad: frozenset[int] = frozenset()
    follows_arguments: bool = False
    changes: Changes | None = None

    @staticmethod
    def from_graph(graph: Graph) -> Traced:
        """Makes a trace that is ``graph`` alone: every input is an argument, and the results are a tuple."""
        leaves = tuple(map(Output, range(len(graph.outputs))))
        return Traced(graph, leaves, pytree.tree_flatten(tuple(range(len(leaves))))[1], (), ())
