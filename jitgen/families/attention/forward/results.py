"""What comes after the product of weights and values: views that are undone, and how far pointwise operations reach."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.forward.match import Attention
from jitgen.families.operands import locate
from jitgen.ir import symbols
from jitgen.ir.analysis import at_own_coordinates, is_pointwise
from jitgen.ir.graph import Node, Shape, topological, under_views
from jitgen.ir.regions import Movement, Store
from jitgen.ir.views import Mover, NotViewable, Strided, contiguous_strides

MOST_MOVEMENTS = 16
"""Views behind a result that are undone; with more of them it is materialized."""


def last_of(of: Attention, values: Sequence[Node], found: Sequence[Attention], mover: Mover) -> Node:
    """The last node of the pointwise operations and views that follow the result of ``of`` one after another, without
    the result of another one of ``found``."""
    users: dict[int, list[Node]] = {}
    for node in topological(values):
        for child in node.inputs:
            users.setdefault(id(child), []).append(node)
    node, others = of.result, {id(each.result) for each in found if each is not of}
    while len(users.get(id(node), ())) == 1 and not any(node is value for value in values):
        (user,) = users[id(node)]
        if others & {id(each) for each in topological([user])} or undone(0, user, of, mover) is None:
            break
        node = user
    return node


def undone(position: int, value: Node, of: Attention, mover: Mover) -> Store | None:
    """The store of ``value`` in the shape of the product ``of.result``, views behind it undone; None where that cannot
    be, or where something else than pointwise operations is between."""
    movements: tuple[Movement, ...] = ()
    shape = value.shape
    while (view := _view_of(value, of.result)) is not None:
        inverse = _inverse(view)
        if inverse is None or len(movements) == MOST_MOVEMENTS:
            return None
        value, movements = mover.move(value, *inverse), (*movements, inverse)
    if value.shape != of.result.shape or of.result not in at_own_coordinates(value, "contract"):
        return None
    behind = {id(of.result)}
    for node in topological([value]):
        if any(id(child) in behind for child in node.inputs):
            behind.add(id(node))
            if not is_pointwise(node):
                return None
    return Store(position, value, movements) if _is_writable(shape, movements, mover) else None


def _is_writable(shape: Shape, movements: Sequence[Movement], mover: Mover) -> bool:
    """Whether strides describe a row-major result of ``shape`` under ``movements``, in the current call if one is
    known. A result of merged dimensions may have none for the batch of a product that merges others."""
    if not mover.environment or not any(attrs == ("reshape",) for attrs, _ in movements):
        return True
    sizes = tuple(symbols.evaluate(size, mover.environment) for size in shape)
    try:
        locate(movements, Strided(sizes, contiguous_strides(sizes)), mover.environment)
    except NotViewable:
        mover.general = False
        return False
    return True


def _view_of(root: Node, result: Node) -> Node | None:
    """The first view of ``result`` that is reached from ``root`` through pointwise nodes."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op == "view":
            if under_views(node) is result:
                return node
        elif is_pointwise(node):
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
