"""Splitting concatenations away: a graph's results as *regions*, each a plain pointwise expression.

``cat([a, b])`` computed element by element would need a predicate on every load. Instead the iteration space is split
where the parts meet: region 0 computes the result's first part from ``a``, region 1 the rest from ``b``, and both run
in one kernel. In a rotary embedding, ``x * cos + cat([-x2, x1]) * sin`` becomes two regions with plain strided loads.

A region iterates over ``shape``. Its expressions hold no ``cat``: only pointwise nodes over ``const``, ``scalar``,
and chains of views over ``input`` and ``iota``. Each is stored through a chain of views of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape, topological, under_views
from jitgen.ir.symbols import Size
from jitgen.ir.views import BARRIERS, Mover

FEW_LEAVES, MANY_LEAVES = 4, 24
"""Regions without a tensor in common are joined while they read few; more than many would cost registers."""

MAX_STORES = 32
"""Results one region writes; more of a shape become several regions, which read their inputs again."""

MAX_READS = 64
"""Tensors one region reads. Of a wider expression, ``ir/cut.py`` computes parts into temporaries first."""

Movement = tuple[tuple[Any, ...], Shape]
"""A view's attrs and its result shape."""


@dataclass(frozen=True)
class Store:
    """``value`` written to result ``result``, seen through ``movements`` (outermost tensor first)."""

    result: int
    value: Node
    movements: tuple[Movement, ...] = ()


@dataclass(frozen=True)
class Region:
    """Values over one iteration space: pointwise, or (``ir/rows.py``) reducing its last ``row_rank`` dimensions."""

    shape: Shape
    stores: tuple[Store, ...]
    row_rank: int = 0


def split(results: Sequence[Node], mover: Mover, materialize: Callable[[Node], Node]) -> list[Region]:
    """The regions that compute ``results``.

    ``materialize`` is asked for a node that must be in memory first (a concatenation under a movement that cannot
    pass it); it returns the ``input`` node standing for the temporary.
    """
    groups: dict[Shape, list[Store]] = {}
    for index, node in enumerate(results):
        groups.setdefault(node.shape, []).append(Store(index, node))
    regions: list[Region] = []
    pending = [Region(shape, part) for shape, stores in groups.items() for part in _parted(stores)]
    while pending:
        region = pending.pop(0)
        parts = _split_once(region, mover, materialize)
        if parts is None:
            _merge(regions, region, mover)
        else:
            pending[:0] = parts
    return regions


def _parted(stores: Sequence[Store]) -> Iterator[tuple[Store, ...]]:
    """``stores`` in order, in parts that write and read few enough tensors for one region."""
    part: list[Store] = []
    reads: set[int] = set()
    for store in stores:
        fresh = {id(leaf) for leaf in _leaves([store])}
        if part and (len(part) == MAX_STORES or len(reads | fresh) > MAX_READS):
            yield tuple(part)
            part, reads = [], set()
        part.append(store)
        reads |= fresh
    if part:
        yield tuple(part)


def _merge(regions: list[Region], region: Region, mover: Mover) -> None:
    """Append ``region``, or join it to one that walks an equal space and reads some of the same tensors.

    The two halves of a rotary embedding read the same four tensors: joined, each is read once.
    """
    leaves = _leaves(region.stores)
    for place, other in enumerate(regions):
        if len(other.shape) == len(region.shape) and len(other.stores) + len(region.stores) <= MAX_STORES:
            theirs = _leaves(other.stores)
            shared = {id(leaf) for leaf in leaves} & {id(leaf) for leaf in theirs}
            joined = len(leaves) + len(theirs) - len(shared)
            if (shared or joined <= FEW_LEAVES) and joined <= MANY_LEAVES:
                equal = [symbols.compare("eq", a, b) for a, b in zip(other.shape, region.shape, strict=True)]
                # Sizes that happen to be equal in this call are no reason to assume that they always are.
                known = all(condition is True for condition in equal)
                if known or (shared and mover.likely(equal) and all(mover.decide(condition) for condition in equal)):
                    regions[place] = Region(other.shape, (*other.stores, *region.stores))
                    return
    regions.append(region)


def _leaves(stores: Sequence[Store]) -> list[Node]:
    """What ``stores`` read: inputs, seen through their views."""
    seen: dict[int, Node] = {}
    stack = [store.value for store in stores]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            if node.op not in ("input", "view"):
                stack.extend(node.inputs)
    return [node for node in seen.values() if node.op in ("input", "view")]


def _split_once(region: Region, mover: Mover, materialize: Callable[[Node], Node]) -> list[Region] | None:
    nodes = topological(store.value for store in region.stores)
    inside = _reached_without_views(region)
    for node in nodes:
        if node.op == "cat" and id(node) in inside:
            return _split_at(region, node, mover)
    for node in nodes:
        if node.op == "view" and id(node) in inside and under_views(node).op == "cat":
            source = node.inputs[0]
            if node.attrs[0] == "reshape" and source.op == "cat":
                return [_reiterate(region, source.shape, mover)]
            temporary = materialize(under_views(node))
            return [_substitute(region, under_views(node), temporary, mover)]
    return None


def _reached_without_views(region: Region) -> set[int]:
    """Nodes that are computed at the region's own coordinates: reached from a store through pointwise nodes."""
    reached: set[int] = set()
    stack = [store.value for store in region.stores]
    while stack:
        node = stack.pop()
        if id(node) not in reached:
            reached.add(id(node))
            if node.op not in ("cat", "view"):
                stack.extend(node.inputs)
    return reached


def _split_at(region: Region, cat: Node, mover: Mover) -> list[Region]:
    """One region for each part of ``cat``."""
    dim = cat.attrs[0]
    start: Size = 0
    parts = []
    for part in cat.inputs:
        length = part.shape[dim]
        shape = (*region.shape[:dim], length, *region.shape[dim + 1 :])
        memo: dict[int, Node] = {id(cat): part}
        stores = tuple(
            replace(
                store,
                value=_cut(store.value, dim, start, length, mover, memo),
                movements=(*store.movements, (("slice", dim, start, 1), shape)),
            )
            for store in region.stores
        )
        parts.append(Region(shape, stores))
        start = symbols.add(start, length)  # type: ignore[assignment]
    return parts


def _cut(node: Node, dim: int, start: Size, length: Size, mover: Mover, memo: dict[int, Node]) -> Node:
    """``node`` cut to [start, start + length) of ``dim``, with the nodes in ``memo`` replaced."""
    stack = [node]
    while stack:
        top = stack[-1]
        pointwise = top.op not in ("const", "scalar", *BARRIERS)
        waiting = [n for n in top.inputs if id(n) not in memo] if pointwise and id(top) not in memo else []
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if id(top) in memo:
            continue
        if top.op in ("const", "scalar"):
            memo[id(top)] = top
        elif not pointwise:
            memo[id(top)] = mover.slice(top, dim, start, length)
        else:
            shape = (*top.shape[:dim], length, *top.shape[dim + 1 :])
            memo[id(top)] = mover.builder.like(top, [memo[id(n)] for n in top.inputs], shape)
    return memo[id(node)]


def _reiterate(region: Region, shape: Shape, mover: Mover) -> Region:
    """``region`` iterating over ``shape`` instead, a finer or coarser shape with the same elements in order."""
    stores = tuple(
        replace(
            store,
            value=mover.move(store.value, ("reshape",), shape),
            movements=(*store.movements, (("reshape",), shape)),
        )
        for store in region.stores
    )
    return Region(shape, stores)


def _substitute(region: Region, old: Node, new: Node, mover: Mover) -> Region:
    memo: dict[int, Node] = {id(old): new}
    stores = tuple(replace(store, value=mover.substituted(store.value, memo)) for store in region.stores)
    return Region(region.shape, stores)
