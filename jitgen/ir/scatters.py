"""Defines scatters: a tensor of which elements that integers choose are replaced by values, or combined with them.

A ``scatter`` has the inputs ``(base, value, index, ...)`` and the attrs ``(kind, coordinates, movements)``. It is what
is left of ``base`` when every element of ``value``, in row-major order, has been combined by ``kind`` with an element
of the result. ``coordinates`` says with which: as those of a gather (``ir/gathers.py``), they are coordinates of
``value`` or indices, which have the value's shape (or are 0-d numbers). There is one for each dimension of the view of
the base that ``movements`` lead to (pairs of a view's attrs and shape), so that ``a[1:, i] = v`` is one scatter, and
``a[1:] = v`` one without indices. Along a coordinate there may be more elements than ``value`` has; the first ones are
meant. What an index out of range chooses is left out; a kernel on a CPU reports it.

Several values may choose one element. They are combined in their order, by one thread, so a call gives the same bits
whenever it is repeated; of values that replace an element, the last one stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jitgen.ir.gathers import Coordinates, to_iteration_space
from jitgen.ir.regions import Store

if TYPE_CHECKING:
    from jitgen.ir.graph import Node, Shape
    from jitgen.ir.views import Mover

SCATTERS: dict[str, str | None] = {"set": None, "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""What a ``scatter`` does with an element and a value: the operation of ``ir/ops.py``; None where the value stays."""

LEFT_OUT = -(2**62)
"""An index that leaves its value out without a report: jitgen's own, for values that a later one replaces."""

_OF_BOOL = {"add": "bitwise_or", "mul": "bitwise_and"}


def combination(kind: str, dtype: str) -> str | None:
    """Returns the operation by which ``kind`` combines elements of compute dtype ``dtype``."""
    operation = SCATTERS[kind]
    return _OF_BOOL.get(operation, operation) if operation and dtype == "bool" else operation


def scatter_store(result: int, node: Node, mover: Mover) -> Store:
    """Makes the store of the values of ``node``, a scatter that replaces distinct elements, to what holds its base
    already.

    Its iteration space is that of the values: the dimensions that are coordinates, then those along which only indices
    differ.
    """
    base, *sources = node.inputs
    _, coordinates, movements = node.attrs
    shape, coordinates, sources = in_order(sources, coordinates, mover)
    target = movements[-1][1] if movements else base.shape
    value, *indices = sources
    return Store(result, value, (*movements, *to_iteration_space(target, shape, coordinates)), tuple(indices))


def in_order(sources: Sequence[Node], coordinates: Coordinates, mover: Mover) -> tuple[Shape, Coordinates, list[Node]]:
    """Returns values and indices with the dimensions that are coordinates before those along which only indices differ:
    their shape, the coordinates, and the moved nodes."""
    shape = sources[0].shape
    rank = len(shape)
    order = (*(d for d in range(rank) if d in coordinates), *(d for d in range(rank) if d not in coordinates))
    if order == tuple(range(rank)):
        return shape, coordinates, list(sources)
    places = tuple(order.index(coordinate) if coordinate >= 0 else coordinate for coordinate in coordinates)
    return tuple(shape[dim] for dim in order), places, [mover.permute(source, order) for source in sources]
