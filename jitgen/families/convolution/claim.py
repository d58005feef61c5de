"""Claims convolutions with the pointwise operations after them.

A result that is pointwise in a convolution, or a view of such a value without repeated or left-out elements, is stored
by the convolution's kernel. Other convolutions are materialized; images and filters are in memory already
(``families/windows.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.convolution import NAME
from jitgen.families.family import Claim, Partition
from jitgen.ir import symbols
from jitgen.ir.analysis import at_coordinates_of, at_own_coordinates
from jitgen.ir.graph import Node, kinds_of, topological
from jitgen.ir.nodes import CONVOLVE
from jitgen.ir.regions import Axis, Region, Stage, Store, grid_axes
from jitgen.ir.views import Mover


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims a region for each convolution that some of ``values`` end in."""
    if CONVOLVE not in kinds_of(values):
        return Claim((), values)
    stores = [_in_its_shape(position, node, partition.mover) for position, node in enumerate(values)]
    owned: dict[int, Node] = {}
    others: set[int] = set()
    for node, store in zip(values, stores, strict=True):
        first = next(at_own_coordinates(store.value, CONVOLVE)) if store is not None else None
        if first is not None:
            owned[id(first)] = first
        inside = topological([node if store is None else store.value])
        others |= {id(other) for other in inside if other.kind is CONVOLVE and other is not first}
    regions: dict[int, list[Store]] = {}
    rest: list[Node | None] = []
    for node, store in zip(values, stores, strict=True):
        first = next(at_own_coordinates(store.value, CONVOLVE)) if store is not None else None
        if store is None or first is None or id(first) in others:
            rest.append(partition.temporaries.without(CONVOLVE, node))
            continue
        value = partition.temporaries.pointwise(store.value, {id(first)})
        regions.setdefault(id(first), []).append(Store(store.result, value, store.movements))
        rest.append(None)
    return Claim([_region(owned[key], of_one) for key, of_one in regions.items()], rest)


def _region(node: Node, stores: Sequence[Store]) -> Region:
    length = symbols.product(node.inputs[1].shape[2:])
    axes = (*grid_axes(node.shape), Axis("k", length, "sequential", inner=True))
    return Region(NAME, axes, tuple(stores), (Stage("contract", ("k",)), Stage("map")))


def _in_its_shape(result: int, node: Node, mover: Mover) -> Store | None:
    """Stores ``node``, result number ``result``, in the shape of the convolutions that it is pointwise in; None if
    there are none, or a view of one cannot be undone."""
    undone = at_coordinates_of(node, mover, lambda source: source.kind is CONVOLVE)
    if undone is None:
        return None
    value, movements = undone
    convolutions = list(at_own_coordinates(value, CONVOLVE))
    if not convolutions or any(node.shape != value.shape for node in convolutions):
        return None
    return Store(result, value, movements)
