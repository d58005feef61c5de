"""What follows a product: views that are undone, so that the kernel stores its result where they say."""

from __future__ import annotations

from typing import Any

from jitgen.ir.analysis import at_own_coordinates
from jitgen.ir.graph import Node
from jitgen.ir.index import Index
from jitgen.ir.nodes import VIEW
from jitgen.ir.regions import Movement, Store
from jitgen.ir.views import Mover

MOST_MOVEMENTS = 16
"""Views behind a result that are undone; with more of them it is materialized."""


def undone(position: int, value: Node, end: Node, index: Index, mover: Mover) -> Store | None:
    """The store of ``value`` in the shape of ``end``, views behind that undone; None where that cannot be, or where
    something else than pointwise operations is between."""
    movements: tuple[Movement, ...] = ()
    while (view := _view_of(value, end)) is not None:
        inverse = _inverse(view)
        if inverse is None or len(movements) == MOST_MOVEMENTS:
            return None
        value, movements = mover.move(value, *inverse), (*movements, inverse)
    if value.shape != end.shape or not (value is end or end in at_own_coordinates(value, end.kind)):
        return None
    stack, seen = [value], {end}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if not node.kind.is_pointwise:
                return None
            stack += (child for child in node.inputs if index.depends(child, end))
    return Store(position, value, movements)


def last_two(rank: int) -> tuple[Any, ...]:
    """The movement that exchanges the last two dimensions of ``rank``."""
    return "permute", (*range(rank - 2), rank - 1, rank - 2)


def _view_of(root: Node, end: Node) -> Node | None:
    """The first view of ``end`` that is reached from ``root`` through pointwise nodes."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind is VIEW:
            if node.under_views is end:
                return node
        elif node.kind.is_pointwise:
            stack.extend(reversed(node.inputs))
    return None


def _inverse(view: Node) -> Movement | None:
    """The movement from ``view`` back to its source; None where the view leaves out or repeats elements."""
    kind, *parameters = view.attrs
    shape = view.inputs[0].shape
    if kind == "permute":
        (order,) = parameters
        return ("permute", tuple(order.index(dim) for dim in range(len(order)))), shape
    if kind in ("squeeze", "unsqueeze"):
        return ("unsqueeze" if kind == "squeeze" else "squeeze", *parameters), shape
    return (("reshape",), shape) if kind == "reshape" else None
