"""Moves views that follow a product into its store, so that the kernel writes the result in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jitgen.ir.analysis import at_coordinates_of, at_own_coordinates
from jitgen.ir.graph import Node, walked
from jitgen.ir.index import Index
from jitgen.ir.regions import Store
from jitgen.ir.views import Mover


def undone(position: int, value: Node, end: Node, index: Index, mover: Mover) -> Store | None:
    """Makes the store of ``value`` whose memory has the shape of ``end``, with the views between them undone; None if
    an operation between them is not pointwise, or a view cannot be undone."""
    moved = at_coordinates_of(value, mover, lambda source: source is end)
    if moved is None:
        return None
    value, movements = moved
    if value.shape != end.shape or not (value is end or end in at_own_coordinates(value, end.kind)):
        return None

    def between(node: Node) -> Iterator[Node]:
        return (child for child in node.inputs if child is not end and index.depends(child, end))

    nodes = walked([value] if value is not end else [], between)
    return Store(position, value, movements) if all(node.kind.is_pointwise for node in nodes) else None


def last_two(rank: int) -> tuple[Any, ...]:
    """Returns the movement that exchanges the last two dimensions of ``rank``."""
    return "permute", (*range(rank - 2), rank - 1, rank - 2)
