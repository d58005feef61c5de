"""Follows the product of probabilities and values: views that are undone, and how far pointwise operations reach."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.forward.match import Attention
from jitgen.families.attention.rule import views
from jitgen.ir import symbols
from jitgen.ir.graph import Movement, Node, Shape
from jitgen.ir.index import Index
from jitgen.ir.regions import Store
from jitgen.ir.views import Mover, NotViewable, Strided, contiguous_strides
from jitgen.kernel.operands import locate


def last_of(attention: Attention, index: Index, attentions: Sequence[Attention], mover: Mover) -> Node:
    """Returns the last node of the pointwise operations and views that follow the result of ``attention`` one after
    another, without the result of another one of ``attentions``."""
    node, others = attention.result, [other.result for other in attentions if other is not attention]
    while len(index.users[node]) == 1 and node not in index.roots:
        (user,) = index.users[node]
        if any(index.depends(user, other) for other in others) or undone(0, user, attention, index, mover) is None:
            break
        node = user
    return node


def undone(position: int, value: Node, attention: Attention, index: Index, mover: Mover) -> Store | None:
    """Makes the store of ``value`` in the shape of the product ``attention.result``; see ``views.undone``."""
    store = views.undone(position, value, attention.result, index, mover)
    return store if store is not None and _is_writable(value.shape, store.movements, mover) else None


def _is_writable(shape: Shape, movements: Sequence[Movement], mover: Mover) -> bool:
    """Returns whether strides describe a row-major result of ``shape`` under ``movements``, in the current call if one
    is known. A result of merged dimensions may have none for the batch of a product that merges others."""
    if not mover.environment or not any(attrs == ("reshape",) for attrs, _ in movements):
        return True
    sizes = symbols.evaluated(shape, mover.environment)
    try:
        locate(movements, Strided(sizes, contiguous_strides(sizes)), mover.environment)
    except NotViewable:
        mover.general = False
        return False
    return True
