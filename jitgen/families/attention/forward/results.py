"""What comes after the product of weights and values: views that are undone, and how far pointwise operations reach."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.forward.match import Attention
from jitgen.families.attention.rule import views
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.regions import Movement, Store
from jitgen.ir.views import Mover, NotViewable, Strided, contiguous_strides
from jitgen.kernel.operands import locate


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
    """The store of ``value`` in the shape of the product ``of.result``; see ``views.undone``."""
    store = views.undone(position, value, of.result, mover)
    return store if store is not None and _is_writable(value.shape, store.movements, mover) else None


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
