"""Claims the values and the indices of sorted rows, and what is counted of rows, with pointwise work before.

A *sort region* iterates over ``(outer..., row)`` of what is sorted. Its stages are ``map, sort``: the elements of a row
may be computed, and one sort gives values, indices or both. What is computed of these pointwise is a stage too, on a
CPU where ranks are many; what is computed of them otherwise, and what a row is computed from by another kind of kernel,
is materialized. Where few ranks of a short row are *selected*, reductions of that row before, and of the ranks behind,
are stages as well: the router of a mixture of experts is a softmax, the greatest probabilities, and these over their
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Claim, Partition
from jitgen.families.rows.sort import NAME, counting, limits
from jitgen.families.rows.sort.selection import DIALECTS, selected, sorted_by, with_taken, without_taken
from jitgen.ir.graph import Graph, Movement, Node
from jitgen.ir.nodes import COUNTED, SORT
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.ir.views import Mover


def recognised(graph: Graph, mover: Mover, device: Device) -> Graph:
    """Returns ``graph`` with numbers below a bound counted, and with ranks selected among groups of a row."""
    graph = counting.recognised(graph, mover, device)
    graph = limits.recognised(graph, mover) if device.dialect in DIALECTS else graph
    return with_taken(graph, mover, device)


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims a region for each value that is a sort; every other one is left with its sorts materialized."""
    regions: list[Region] = []
    rest: list[Node | None] = list(values)
    for position, node in enumerate(values):
        selects = SORT in node.kinds and COUNTED not in node.kinds
        selection = selected(node, position, partition) if selects else None
        if selection is not None:
            regions.append(selection)
            rest[position] = None
            continue
        rest[position] = node = without_taken(limits.without_limits(node, partition.mover), partition)
        if node.kind in (SORT, COUNTED):
            regions.append(_region(node, position, partition))
            rest[position] = None
            continue
        for kind in (SORT, COUNTED):
            if kind in node.kinds:
                rest[position] = node = partition.temporaries.without(kind, node)
    return Claim(_joined(regions), rest)


def merge(left: Region, right: Region) -> Region | None:
    """Merges values and indices of one sort, and ranks of one sort with the same beginning, into one region."""
    if sorted_by(left) != sorted_by(right):
        return None
    return replace(left, stores=(*left.stores, *right.stores))


def _joined(regions: Sequence[Region]) -> list[Region]:
    joined: list[Region] = []
    for region in regions:
        for position, other in enumerate(joined):
            merged = merge(other, region)
            if merged is not None:
                joined[position] = merged
                break
        else:
            joined.append(region)
    return joined


def _region(node: Node, position: int, partition: Partition) -> Region:
    """Makes the region of ``node``, with the sorted dimension last."""
    rank, dim = len(node.shape), node.attrs.dim if node.kind is SORT else 0
    order = (*(other for other in range(rank) if other != dim), dim)
    movements: tuple[Movement, ...] = ()
    if order != tuple(range(rank)):
        shape = tuple(node.shape[other] for other in order)
        attrs: tuple[Any, ...] = ("permute", order)
        movements = ((attrs, shape),)
        node = partition.mover.move(node, attrs, shape)
    operand = node.inputs[0]
    if node.kind is COUNTED:  # the ranks that it counts are stored, and not what they are selected by as well
        operand = partition.temporaries.without(SORT, operand)
    operand = partition.temporaries.pointwise(operand)
    node = partition.mover.builder.like(node, [operand])
    return Region(NAME, row_axes(operand.shape, 1), (Store(position, node, movements),))
