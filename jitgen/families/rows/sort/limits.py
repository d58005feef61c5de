"""Recognises rows of which few groups are kept before ranks are selected: ``limited`` nodes.

DeepSeek's router counts each group of experts by its greatest score, or by the sum of its two greatest, keeps the
groups that count most, and takes the top-k of the experts in these. In torch that is a sort of each group, a sort of
the groups, a scatter of ones into zeros at the places of those that are kept, and the same for every expert of a group.
A kernel that selects ranks has the row at hand, and finds the groups of it beforehand. Where none does, the sorts and
the scatter are computed as they stand: a ``limited`` node holds them.
"""

from __future__ import annotations

from typing import Any

from jitgen.ir import symbols
from jitgen.ir.analysis import in_shape, is_same_shape, rewritten, rewritten_graph
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import CAST, CONST, LIMITED, REDUCE, SCATTER, SORT, VIEW
from jitgen.ir.sorts import MOST_GROUPS
from jitgen.ir.views import Mover

NAME = "ranks are selected among the groups of a row that count most"
_SAME_PLACES = ("expand", "reshape", "squeeze", "unsqueeze")


def recognised(graph: Graph, mover: Mover) -> Graph:
    """Returns ``graph`` with the groups of rows that are sorted found in what is sorted."""
    sorted_ = {node.inputs[0] for node in topological(graph.results) if _is_ranked(node)}
    memo: dict[int, Node] = {}
    for operand in sorted_:
        limited = _with_limits(operand, mover)
        if limited is not operand:
            memo[id(operand)] = limited
    if not memo:
        return graph
    mover.fired.setdefault(NAME)
    return rewritten_graph(graph, mover, lambda _, rebuilt: rebuilt, memo)


def without_limits(node: Node, mover: Mover) -> Node:
    """Returns ``node`` with the groups of rows found by nodes of their own."""
    if LIMITED not in node.kinds:
        return node
    return rewritten(node, mover, lambda was, rebuilt: rebuilt.inputs[1] if was.kind is LIMITED else rebuilt)


def alone(node: Node, mover: Mover) -> Node:
    """Returns the ``limited`` node ``node`` without the other nodes that compute it; others as they are."""
    return mover.builder.like(node, node.inputs[:1]) if node.kind is LIMITED else node


def _is_ranked(node: Node) -> bool:
    last = len(node.shape) - 1
    return node.kind is SORT and last > 0 and node.attrs.dim == last and node.attrs.descending


def _with_limits(operand: Node, mover: Mover) -> Node:
    """Returns ``operand``, what is sorted, with the masks of groups in it as ``limited`` nodes; itself without any.
    Pointwise nodes over these get the shape of ``operand``, which guards say theirs is equal to."""
    images: dict[Node, Node] = {}
    for node in topological([operand]):
        if node.kind.is_pointwise:
            children = [images.get(child, child) for child in node.inputs]
            if any(a is not b for a, b in zip(children, node.inputs, strict=True)):
                images[node] = mover.builder.like(node, children, operand.shape)
        elif node.kind is VIEW and node.attrs.kind == "expand" and len(node.inputs[0].shape) == len(node.shape):
            if node.inputs[0] in images:
                images[node] = images[node.inputs[0]]
        elif node.kind is VIEW and (mask := _limited(node, operand, mover)) is not None:
            images[node] = mask
    return images.get(operand, operand)


def _limited(mask: Node, operand: Node, mover: Mover) -> Node | None:
    """Returns the ``limited`` node that is ``mask``, ones and zeros for the elements of ``operand``; None if that is
    something else."""
    base = mask
    while base.kind is VIEW and base.attrs.kind in _SAME_PLACES and base.shape != ():
        base = base.inputs[0]
    while base.kind is CAST:
        base = base.inputs[0]
    if base.kind is not SCATTER or len(base.shape) != 2 or mask.attrs.kind != "reshape":
        return None
    zeros, ones, *indices = base.inputs
    if base.attrs != ("set", (0, -1), ()) or len(indices) != 1 or not (_is_number(zeros, 0) and _is_number(ones, 1)):
        return None
    length, groups, kept = operand.shape[1], base.shape[1], indices[0].shape[1]
    chosen = indices[0]
    while chosen.kind is VIEW and chosen.attrs.kind == "slice" and chosen.attrs[1:] == (1, 0, 1):
        chosen = chosen.inputs[0]
    if chosen.kind is not SORT or chosen.attrs != ("indices", 1, True, 0) or not isinstance(groups, int):
        return None
    if not 2 <= groups <= MOST_GROUPS or not isinstance(kept, int):
        return None
    counted = _counted_groups(chosen.inputs[0])
    if counted is None:
        return None
    elements, terms = counted
    size = symbols.floordiv(length, groups)
    whole = symbols.compare("eq", symbols.mul(size, groups), length)
    shape = (elements.shape[-1], mask.shape[-1], symbols.evaluate(length, mover.environment))
    if elements.shape[-2] != groups or elements.kind is not VIEW or elements.attrs.kind != "reshape":
        return None
    elements = elements.inputs[0]
    if not mover.decide(whole) or not is_same_shape(elements.shape, operand.shape, mover) or shape[2] < groups * terms:
        return None
    # As many elements of a group in the mask as in what is counted, from the same place on.
    if shape[:2] != (size, length):
        return None
    if operand.dtype != "float32" or elements.dtype != "float32":
        return None
    same = [in_shape(node, operand.shape, mover) for node in (elements, mask)]
    return mover.builder.make("limited", same, mask.dtype, operand.shape, (groups, kept, terms), mask.location)


def _counted_groups(counts: Node) -> tuple[Node, int] | None:
    """Returns what ``counts`` counts groups by, the elements of each group, and how many of the greatest; None if it is
    something else."""
    while counts.kind is VIEW and counts.attrs.kind == "squeeze":
        counts = counts.inputs[0]
    if counts.kind is not REDUCE or counts.attrs.dims != (len(counts.inputs[0].shape) - 1,):
        return None
    (elements,), kind = counts.inputs, counts.attrs.kind
    if len(elements.shape) != 3:
        return None
    if kind == "max":
        return elements, 1
    if kind != "sum" or elements.shape[-1] != 2:
        return None
    while elements.kind is VIEW and elements.attrs.kind == "slice" and elements.attrs[1:] == (2, 0, 1):
        elements = elements.inputs[0]
    if elements.kind is not SORT or elements.attrs != ("values", 2, True, 0):
        return None
    return elements.inputs[0], 2


def _is_number(node: Node, number: Any) -> bool:
    base = node.under_views
    while base.kind is CAST:
        base = base.inputs[0].under_views
    return base.kind is CONST and base.attrs.value == number
