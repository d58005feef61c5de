"""Recognises sums of a few elements that computed indices choose, as additions of a pointwise kernel.

A mixture of experts adds, for each token, the rows that its experts have computed, which lie where the sort put them. A
reduction would read them from a temporary that a pointwise kernel has gathered them to; a pointwise kernel that adds
reads each row once, where it is. The sum by which the weights of a top-k are divided is such additions where experts
are counted: the weights are then computed beside the rows that are gathered, without a kernel of their own. Elements
are added in their order, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.ir.analysis import is_taken, nearest, rewritten_graph
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Graph, Node, kinds_of
from jitgen.ir.nodes import COUNTED, GATHER, GROUPED, REDUCE, SORT, VIEW, Kind
from jitgen.ir.ops import FLOATS
from jitgen.ir.views import Mover

SELECTING = ("cuda", "cpp")
"""Dialects in which what selects ranks of a row reduces them too."""
MOST_TERMS = 16
"""Elements of a sum; a kernel's source has an addition for each."""
NAME = "a sum of few chosen elements is additions"


def recognised(graph: Graph, mover: Mover, device: Device) -> Graph:
    """Returns ``graph`` with short sums as additions."""
    kinds = kinds_of(graph.results)
    if REDUCE not in kinds:
        return graph
    # What selects ranks adds them up.
    chosen = (GATHER, SORT) if COUNTED in kinds and device.dialect not in SELECTING else (GATHER, GROUPED)

    def change(node: Node, rebuilt: Node) -> Node:
        return _added(rebuilt, mover) if _is_short_sum(node, chosen, mover) else rebuilt

    changed = rewritten_graph(graph, mover, change)
    return changed if NAME in mover.fired else graph


def _is_short_sum(node: Node, chosen: Sequence[Kind], mover: Mover) -> bool:
    """Returns whether ``node`` is a sum of few elements, along one dimension, which a kind of ``chosen`` gives."""
    if node.kind is not REDUCE or node.attrs.kind != "sum" or len(node.attrs.dims) != 1:
        return False
    (operand,), (dim,) = node.inputs, node.attrs.dims
    if compute_dtype(node.dtype) not in FLOATS or not isinstance(operand.shape[dim], int):
        return False
    if not 2 <= operand.shape[dim] <= MOST_TERMS:
        return False
    sources = nearest(operand, chosen, lambda node: node.kind.is_pointwise or node.kind is VIEW)
    return any(
        node.kind is SORT or (node.attrs.by == "ids" if node.kind is GROUPED else not is_taken(node, mover))
        for node in sources
    )


def _added(node: Node, mover: Mover) -> Node:
    """Returns the sum ``node`` as additions."""
    (operand,), (dim,), make = node.inputs, node.attrs.dims, mover.builder.make
    mover.fired.setdefault(NAME)
    dtype, total = compute_dtype(node.dtype), None
    for index in range(operand.shape[dim]):
        term = make("view", (operand,), operand.dtype, node.shape, ("slice", dim, index, 1), node.location)
        term = term if operand.dtype == dtype else make("cast", (term,), dtype, node.shape, (), node.location)
        total = term if total is None else make("add", (total, term), dtype, node.shape, (), node.location)
    assert total is not None
    return total if node.dtype == dtype else make("cast", (total,), node.dtype, node.shape, (), node.location)
