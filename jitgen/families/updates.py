"""Decides which updates of arguments are computed in place, which of them share a kernel, and in which order.

The new value of an argument may be written into it by a kernel that reads it only at the elements it writes, after all
others have read it. So arguments whose new values read one another at their own coordinates, as the moments and the
parameter of an optimiser's step do, are *together*: one region reads all of them, and then writes them. One whose value
reads another at other coordinates is written before that one.

An argument of which only elements are replaced, by scatters, is changed where it is: ``families/changes.py``.

Neighbours: ``families/partition.py`` asks, and computes every other update into a temporary that it copies at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import INPUT, SCATTER, VIEW
from jitgen.ir.regions import Region


@dataclass(frozen=True)
class Reads:
    """Lists the inputs that a value reads by its pointwise operations; what else it is computed from is in memory by
    then.

    Attributes:
        own: by number, those that an element reads at its own coordinates.
        moved: those that it reads through views.
        plain: whether it is computed from such inputs and numbers alone.
    """

    own: frozenset[int]
    moved: frozenset[int]
    plain: bool


@dataclass(frozen=True)
class Together:
    """Describes what one region computes.

    Attributes:
        updates: the numbers of the inputs that it writes.
        results: the positions of results that it computes besides, as they read these.
        reads_moved: the inputs that it reads at other coordinates.
    """

    updates: tuple[int, ...]
    results: tuple[int, ...]
    reads_moved: frozenset[int]


def reads_of(value: Node) -> Reads:
    """Returns the ``Reads`` of ``value``."""
    own: set[int] = set()
    moved: set[int] = set()
    plain = value.kind.is_pointwise
    for node in walked([value], lambda node: node.inputs if node.kind.is_pointwise else ()):
        source = node.under_views
        if node.kind.is_pointwise:
            continue
        if source.kind is INPUT:
            (moved if node.kind is VIEW else own).add(source.attrs.number)
        else:
            plain = plain and not source.inputs
    return Reads(frozenset(own), frozenset(moved), plain)


def in_place(updates: Mapping[int, Node], results: Mapping[int, Node]) -> list[list[Together]]:
    """Orders what is computed in place of ``updates``, the new values of inputs: lists whose members are independent,
    and each of which comes before the next.

    Args:
        results: what the function returns, by position; those that only pointwise operations compute of inputs join the
            region of an update that they read.
    """
    reads = {index: reads_of(node) for index, node in updates.items() if _is_computed_alone(node)}
    joining = {position: reads_of(node) for position, node in results.items()}
    while True:
        groups_ = _together(reads, joining)
        refused = {index for group in groups_ for index in group.reads_moved.intersection(group.updates)}
        order = [] if refused else _in_order(groups_)
        if not refused and order is not None:
            return order
        for index in refused or groups_[0].updates:
            del reads[index]


def _is_computed_alone(value: Node) -> bool:
    """Returns whether a region computes ``value`` of what is in memory at its own coordinates, or is a view there."""
    return value.kind.is_pointwise or value.under_views.kind is INPUT


def _together(reads: Mapping[int, Reads], results: Mapping[int, Reads]) -> list[Together]:
    """Groups the inputs of which ``reads`` has new values by which read one another at their own coordinates."""
    groups: dict[int, set[int]] = {index: {index} for index in reads}

    def join(indices: Iterable[int]) -> None:
        joined = set().union(*(groups[index] for index in indices))
        groups.update((index, joined) for index in joined)

    for index, read in reads.items():
        join({index, *read.own & reads.keys()})
    joined_results: dict[int, int] = {}
    for position, read in results.items():
        known = read.own & reads.keys()
        if read.plain and known and not read.moved & reads.keys():
            join(known)
            joined_results[position] = min(known)
    merged = []
    for members in {id(members): members for members in groups.values()}.values():
        positions = tuple(position for position, index in joined_results.items() if index in members)
        moved = (reads[index].moved for index in members)
        merged.append(Together(tuple(sorted(members)), positions, frozenset().union(*moved)))
    return merged


def _in_order(groups: Sequence[Together]) -> list[list[Together]] | None:
    """Orders ``groups`` in lists, each after those that read at other coordinates what it writes; None if some wait for
    one another."""
    left, order = list(groups), []
    while left:
        awaited = frozenset[int]().union(*(group.reads_moved for group in left))
        ready = [group for group in left if awaited.isdisjoint(group.updates)]
        if not ready:
            return None
        order.append(ready)
        left = [group for group in left if group not in ready]
    return order


def are_safe(regions: Sequence[Region], written: Mapping[int, int]) -> bool:
    """Returns whether every region that reads an input which ``regions`` write is the one that writes it.

    Args:
        written: the input in whose memory a result is, by the result's position.
    """
    writers = {
        written[store.result]: region for region in regions for store in region.stores if store.result in written
    }
    return all(writers.get(node.attrs.number, region) is region for region in regions for node in _inputs_of(region))


def _inputs_of(region: Region) -> set[Node]:
    return {node for node in topological(s for store in region.stores for s in store.sources) if node.kind is INPUT}


# ----------------------------------------------------------------------------------- computed with other values


def independent_updates(
    updates: Mapping[int, Node], readers: Sequence[Node], shapes: Sequence[Shape]
) -> dict[int, Node]:
    """Returns the ``updates`` that any kernel may compute with others: nothing else reads what the argument was, and
    they read no other argument at their own coordinates that is updated, with which they would be together.

    Args:
        readers: what else is computed: results, and new values of arguments of which elements are replaced.
        shapes: of the inputs.
    """
    values = Index([*readers, *updates.values()])
    is_read_by_another = values.behind_several([*readers, *updates.values()])  # of which several may be one node
    inputs = {node.attrs.number: node for node in values.order if node.kind is INPUT}
    independent = {}
    for number, node in updates.items():
        is_read = number in inputs and is_read_by_another(node, inputs[number])
        is_own = not is_read and node.shape == shapes[number] and _reads_at_own_coordinates(node, number)
        if is_own and reads_of(node).own & updates.keys() <= {number}:
            independent[number] = node
    return independent


def _reads_at_own_coordinates(value: Node, number: int) -> bool:
    """Returns whether every element of ``value`` reads input ``number`` only at its own coordinates, so that ``value``
    can be computed into that input."""
    if any(kind.reads_elsewhere for kind in value.kinds):
        return False
    return not any(node.kind is VIEW and is_input(node.under_views, number) for node in topological([value]))


def is_scatter_into(node: Node, number: int) -> bool:
    """Returns whether ``node`` is a new value of input ``number``, of which elements are replaced or changed."""
    return node.kind is SCATTER and is_input(node.inputs[0], number)


def is_input(node: Node, number: int) -> bool:
    """Returns whether ``node`` is input ``number``."""
    return node.kind is INPUT and node.attrs.number == number
