"""Claims for pointwise kernels everything that other families leave, with concatenations removed.

``cat([a, b])`` computed element by element would need a predicate on every load. Instead the iteration space is divided
at the boundaries of the concatenated tensors: one region computes the elements that come from ``a``, another one those
that come from ``b``, and both run in one kernel. In a rotary embedding, ``x * cos + cat([-x2, x1]) * sin`` becomes two
regions with plain strided loads.

The expressions of a region hold no ``cat``: only pointwise nodes and gathers over ``const``, ``scalar``, and chains of
views over ``input`` and ``iota``. Each value is stored through a chain of views of a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from jitgen.families.elementwise import NAME
from jitgen.families.family import Claim, Partition
from jitgen.families.lengths import share_a_text
from jitgen.ir import symbols
from jitgen.ir.analysis import sliced
from jitgen.ir.body import Body
from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.nodes import CAT, GATHER, INPUT, SCATTER, VIEW
from jitgen.ir.regions import MAX_READS, Region, Store, grid_axes
from jitgen.ir.scatters import scatter_store
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover, NotViewable, Strided, contiguous_strides
from jitgen.kernel.operands import locate

MOST_UNRELATED_LEAVES = 4
"""The most tensors that two regions without a common tensor may read together to be merged into one."""

MOST_LEAVES = 24
"""The most tensors that merged regions may read together; loads of more would take too many registers."""

MAX_STORES = 32
"""The most results that one region writes; more results of a shape become several regions, each with its own loads."""


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims all ``values``; a scatter that is left is an update in place of distinct elements."""
    return Claim(_regions(values, partition.mover, partition.materialize), [None] * len(values))


def joins(bodies: Sequence[Body], body: Body) -> bool:
    """Returns True: any pointwise regions may share a kernel."""
    return True


def _region(shape: Shape, stores: Sequence[Store]) -> Region:
    return Region(NAME, grid_axes(shape), tuple(stores))


def _regions(results: Sequence[Node], mover: Mover, materialize: Callable[[Node], Node]) -> list[Region]:
    """Returns the regions that compute ``results``.

    ``materialize`` is called for a node that must be in memory first (a concatenation below a view that cannot be moved
    through it); it returns the ``input`` node that stands for the temporary.
    """
    groups: dict[Shape, list[Store]] = {}
    updates: list[Store] = []
    for index, node in enumerate(results):
        if node.kind is SCATTER:
            updates.append(scatter_store(index, node, mover))
        else:
            groups.setdefault(node.shape, []).append(Store(index, node))
    regions: list[Region] = []
    pending = [_region(shape, group) for shape, stores in groups.items() for group in _in_groups(stores)]
    pending += [_region(store.value.shape, [store]) for store in updates]
    while pending:
        region = pending.pop(0)
        mover.step(region.stores[0].value)
        replacements = _without_one_concatenation(region, mover, materialize, results)
        if replacements is None:
            _add(regions, region, mover)
        else:
            pending[:0] = replacements
    return regions


def _in_groups(stores: Sequence[Store]) -> Iterator[tuple[Store, ...]]:
    """Yields ``stores`` in order, in groups that write and read few enough tensors for one region, and whose text is no
    longer than compilers are quick with."""
    group: list[Store] = []
    nodes: set[Node] = set()
    for store in stores:
        own = set(_nodes([store]))
        reads = sum(node.kind in (INPUT, VIEW) for node in nodes | own)
        if group and (len(group) == MAX_STORES or reads > MAX_READS or not share_a_text(nodes, own)):
            yield tuple(group)
            group, nodes = [], set()
        group.append(store)
        nodes |= own
    if group:
        yield tuple(group)


def _add(regions: list[Region], region: Region, mover: Mover) -> None:
    """Merges ``region`` into one that has the same iteration space and reads some of the same tensors, or appends it.

    The two halves of a rotary embedding read the same four tensors; merged, they read each of them once.
    """
    leaves = _leaves(region.stores)
    for index, other in enumerate(regions):
        if region.is_update or other.is_update:  # each orders its dimensions by the one result that it writes
            continue
        if len(other.shape) == len(region.shape) and len(other.stores) + len(region.stores) <= MAX_STORES:
            theirs = _leaves(other.stores)
            shared = {id(leaf) for leaf in leaves} & {id(leaf) for leaf in theirs}
            merged = len(leaves) + len(theirs) - len(shared)
            if (shared or merged <= MOST_UNRELATED_LEAVES) and merged <= MOST_LEAVES:
                equal = [symbols.compare("eq", a, b) for a, b in zip(other.shape, region.shape, strict=True)]
                # Sizes that are equal in this call may differ in others. Requiring them to be equal (``mover.decide``)
                # restricts the kernel to such calls, which only a shared tensor is worth.
                known = all(condition is True for condition in equal)
                if not share_a_text(set(_nodes(region.stores)), set(_nodes(other.stores))):
                    continue
                if known or (shared and mover.likely(equal) and all(mover.decide(condition) for condition in equal)):
                    regions[index] = _region(other.shape, (*other.stores, *region.stores))
                    return
    regions.append(region)


def _leaves(stores: Sequence[Store]) -> list[Node]:
    """Returns the inputs, or views of inputs, that ``stores`` read."""
    return [node for node in _nodes(stores) if node.kind in (INPUT, VIEW)]


def _nodes(stores: Sequence[Store]) -> Iterator[Node]:
    """Yields what ``stores`` write, and all that is computed for it, from inputs and views of inputs on."""
    sources = (node for store in stores for node in store.sources)
    return walked(sources, lambda node: () if node.kind in (INPUT, VIEW) else node.inputs)


def _without_one_concatenation(
    region: Region, mover: Mover, materialize: Callable[[Node], Node], results: Sequence[Node]
) -> list[Region] | None:
    """Returns regions in place of ``region`` with one concatenation less, or one that is nearer to the region's own
    coordinates; None if it has none. ``results`` are what all regions store to."""
    nodes = topological(node for store in region.stores for node in store.sources)
    inside = _reached_without_views(region)
    for node in nodes:
        if node.kind is CAT and id(node) in inside:
            return _divided_at(region, node, mover)
    viewed = _viewed(nodes, inside)
    for node in viewed:
        moved = _before(node, region, mover)
        # Another gather, one that reads ``node`` among them, may stop the reshape: then it would be the next to ask for
        # its own shape, and neither would ever be reached.
        if moved is not None and _viewed_count(moved) < len(viewed) and _is_writable(moved, results, mover):
            return [moved]
        temporary = materialize(node.under_views)
        return [_substitute(region, node.under_views, temporary, mover)]
    return None


def _viewed(nodes: Sequence[Node], inside: Container[int]) -> list[Node]:
    """Returns the views of concatenations and gathers among ``nodes``, those of a region, that are ``inside`` it."""
    views = (node for node in nodes if node.kind is VIEW and id(node) in inside)
    return [node for node in views if node.under_views.kind in (CAT, GATHER)]


def _viewed_count(region: Region) -> int:
    """Counts the views of concatenations and gathers that are computed at the coordinates of ``region``."""
    nodes = topological(node for store in region.stores for node in store.sources)
    return len(_viewed(nodes, _reached_without_views(region)))


def _is_writable(region: Region, results: Sequence[Node], mover: Mover) -> bool:
    """Returns whether each store of ``region`` has strides in a contiguous result, at the sizes of this call."""
    for store in region.stores:
        sizes = symbols.evaluated(results[store.result].shape, mover.environment)
        try:
            locate(store.movements, Strided(sizes, contiguous_strides(sizes)), mover.environment)
        except NotViewable:
            return False
    return True


def _reached_without_views(region: Region) -> set[int]:
    """Returns the nodes that are computed at the region's own coordinates: reached from a store through pointwise
    nodes."""
    sources = (node for store in region.stores for node in store.sources)
    return {id(node) for node in walked(sources, lambda node: () if node.kind in (CAT, VIEW) else node.inputs)}


def _divided_at(region: Region, cat: Node, mover: Mover) -> list[Region]:
    """Divides ``region`` into one for each tensor that ``cat`` concatenates; tensors without elements have none, unless
    all are so."""
    dim = cat.attrs.dim
    start: Size = 0
    regions = []
    for concatenated in cat.inputs:
        if concatenated.shape == cat.shape:  # the others, if there are any, have no elements
            return [_substitute(region, cat, concatenated, mover)]
    for concatenated in (tensor for tensor in cat.inputs if tensor.shape[dim] != 0):
        length = concatenated.shape[dim]
        shape = (*region.shape[:dim], length, *region.shape[dim + 1 :])
        memo: dict[int, Node] = {id(cat): concatenated}
        cut = functools.partial(sliced, dim=dim, start=start, length=length, mover=mover, memo=memo)
        stores = tuple(store.moved(("slice", dim, start, 1), shape, cut) for store in region.stores)
        regions.append(_region(shape, stores))
        start = symbols.add(start, length)  # type: ignore[assignment]
    return regions


def _before(view: Node, region: Region, mover: Mover) -> Region | None:
    """Moves the iteration space of ``region`` to the coordinates of what ``view``, a reshape or a permuted one, is of;
    None for other views."""
    if view.attrs.kind == "permute":
        order = view.attrs.order
        back = "permute", tuple(order.index(dim) for dim in range(len(order)))
        (view,) = view.inputs
        region = _moved(region, back, view.shape, mover)
    if view.kind is not VIEW or view.attrs.kind != "reshape" or view.inputs[0].kind is VIEW:
        return None
    return _moved(region, ("reshape",), view.inputs[0].shape, mover)


def _moved(region: Region, attrs: tuple[Any, ...], shape: Shape, mover: Mover) -> Region:
    """Moves the iteration space of ``region`` to ``shape``, which has the same elements."""

    def moved(node: Node) -> Node:
        return mover.move(node, attrs, shape)

    return _region(shape, tuple(store.moved(attrs, shape, moved) for store in region.stores))


def _substitute(region: Region, old: Node, new: Node, mover: Mover) -> Region:
    """Replaces ``old`` by ``new`` in ``region``."""
    memo: dict[int, Node] = {id(old): new}
    stores = (store.with_sources(lambda node: mover.substituted(node, memo)) for store in region.stores)
    return _region(region.shape, tuple(stores))
