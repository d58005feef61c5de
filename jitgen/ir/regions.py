"""Defines regions: what one kernel computes, as an iteration space and the stages that run over it.

A *region* has axes and stores. The indices of a grid axis are distributed over the blocks of a grid. A sequential axis
is walked by one block, or by one cluster of blocks; results have it as a dimension, or it is inner to the kernel, such
as K of a product. The *stages* are the steps of a kernel in the order in which it runs them, each over axes of its own:

============  ==========================================================================================
``map``       pointwise work on elements, or on results of earlier stages
``contract``  a product summed over an axis
``reduce``    the elements along the sequential axes combined to one value
``scan``      at every element, the combination of the elements up to it
``sort``      the elements in another order
``scatter``   values combined with elements of the result, which is read and written in place; by the region's order
              along the sequential axes
``launch``    a kernel that a user wrote, which says itself what it does over the axes of its grid
============  ==========================================================================================

RMSNorm is ``reduce, map`` over a sequential axis; SwiGLU is ``contract, contract, map``. Stages follow from the stored
expressions, unless several axes are walked inside one another: attention has ``contract over d, map, reduce over n,
contract over n, map``, with n, the keys, sequential and inner, and its family says so (``Region.stated``). A family
claims regions (``families/family.py``); ``ir/body_builder.py`` lowers one to the instructions that a dialect prints.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jitgen.ir.graph import Movement, Node, Shape, topological
from jitgen.ir.nodes import LAUNCH, PRODUCTS, SCATTER
from jitgen.ir.symbols import Size

MAX_READS = 64
"""The most tensors that one region reads. Operands of a wider expression are computed into temporaries before it, those
that read most tensors first."""
MAX_REGIONS = 16
"""The most regions of one kernel that differ in text, which limits the length of a source."""

STAGES = ("map", "contract", "reduce", "scan", "sort", "scatter", "launch")


@dataclass(frozen=True)
class Axis:
    """Represents one axis of an iteration space.

    Attributes:
        name: unique in its region: ``m``, ``n`` and ``k`` of products; otherwise ``i0``, ``i1``, ... for grid axes and
            ``j0``, ``j1``, ... for sequential ones.
        size: the number of indices.
        walk: ``"grid"`` or ``"sequential"``; see the module.
        inner: whether no result is indexed by it, such as K of a product, or the keys of attention.
    """

    name: str
    size: Size
    walk: Literal["grid", "sequential"] = "grid"
    inner: bool = False


@dataclass(frozen=True)
class Stage:
    """Represents one step of a region.

    Attributes:
        kind: one of ``STAGES``.
        over: the names of the axes that it combines elements along; empty for a ``map``.
        count: how many operations of this kind the step does (two products, three reductions, ...).
    """

    kind: str
    over: tuple[str, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}{self.kind}" + (f" over {', '.join(self.over)}" if self.over else "")


@dataclass(frozen=True)
class Store:
    """Writes ``value`` to the view of result ``result`` that ``movements`` describe, from the whole result on.

    Attributes:
        indices: integers in the value's shape that choose where an element is stored: the view has a further dimension
            for each of them, after those of the value. No two elements choose the same place.
        within: the range of indices along the sequential axis at which elements are stored; the result has no others.
        run: of how many neighbours along the last axis the result has the largest; of 1 it has every element.
        block: where the result has one element for each block of so many along the last axis, whose values are equal;
            else 0.
    """

    result: int
    value: Node
    movements: tuple[Movement, ...] = ()
    indices: tuple[Node, ...] = ()
    within: tuple[Size, Size] | None = None
    run: int = 1
    block: int = 0

    @property
    def sources(self) -> tuple[Node, ...]:
        """Lists all nodes that the store reads."""
        return (self.value, *self.indices)

    @property
    def is_update(self) -> bool:
        """Returns whether the store leaves some elements of the result unchanged."""
        return self.value.kind in (SCATTER, LAUNCH) or bool(self.indices)

    def moved(self, attrs: tuple[Any, ...], shape: Shape, move: Callable[[Node], Node]) -> Store:
        """Moves the store's iteration space to ``shape``; ``move`` does the same to a node."""
        rank = len(self.value.shape)
        chosen = self.movements[-1][1][rank:] if self.indices else ()
        if attrs[0] == "permute":
            attrs = "permute", (*attrs[1], *range(rank, rank + len(chosen)))
        return self.with_sources(move, ((attrs, (*shape, *chosen)),))

    def with_sources(self, change: Callable[[Node], Node], movements: tuple[Movement, ...] = ()) -> Store:
        """Applies ``change`` to all that the store reads, and further ``movements`` to its result."""
        indices = tuple(map(change, self.indices))
        movements = (*self.movements, *movements)
        return replace(self, value=change(self.value), movements=movements, indices=indices)


@dataclass(frozen=True)
class Region:
    """Represents values over one iteration space.

    Attributes:
        family: the name of the family that computes it.
        axes: first those that index results, in the order of the results' dimensions, then the inner ones.
        stores: the values and the results they are written to. A value's shape is ``shape``, or has sizes of 1 at the
            sequential axes. A sorted value has as many elements along the sequential axis as ranks are
            asked for.
        stated: the stages, where the family states them; otherwise they follow from the stores.
    """

    family: str
    axes: tuple[Axis, ...]
    stores: tuple[Store, ...]
    stated: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        names = {axis.name for axis in self.axes}
        for stage in self.stated:
            if stage.kind not in STAGES or not names.issuperset(stage.over):
                raise AssertionError(f"{self.family}: a region over {', '.join(sorted(names))} has no stage {stage}")

    @property
    def shape(self) -> Shape:
        """Returns the sizes of the axes that index results."""
        return shape_of(self.axes)

    @property
    def row_rank(self) -> int:
        """Returns how many of the axes that index results are sequential: the last ones."""
        return row_rank_of(self.axes)

    @property
    def is_update(self) -> bool:
        """Returns whether it changes results that must have been written before."""
        return any(store.is_update for store in self.stores)

    @property
    def elements_read(self) -> frozenset[Node]:
        """Returns the tensors, or views of them, from which the values of the stores are computed element by
        element."""
        nodes = topological(store.value for store in self.stores)
        return frozenset(node for node in nodes if node.is_in_memory and node.shape == self.shape)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        return self.stated or stages_of([node for store in self.stores for node in store.sources], self.axes)


def grid_axes(shape: Iterable[Size]) -> tuple[Axis, ...]:
    """Makes axes ``i0``, ``i1``, and so on, of an iteration space whose elements are independent of one another."""
    return tuple(Axis(f"i{dim}", size) for dim, size in enumerate(shape))


def row_axes(shape: Sequence[Size], row_rank: int) -> tuple[Axis, ...]:
    """Makes grid axes, followed by the sequential axes ``j0``, ``j1``, and so on, of a row: the last ``row_rank``
    dimensions."""
    outer = len(shape) - row_rank
    row = (Axis(f"j{dim}", size, "sequential") for dim, size in enumerate(shape[outer:]))
    return (*grid_axes(shape[:outer]), *row)


def shape_of(axes: Iterable[Axis]) -> Shape:
    return tuple(axis.size for axis in axes if not axis.inner)


def row_rank_of(axes: Iterable[Axis]) -> int:
    return sum(axis.walk == "sequential" and not axis.inner for axis in axes)


def stages_of(values: Sequence[Node], axes: Sequence[Axis]) -> tuple[Stage, ...]:
    """Returns the stages that compute ``values``; a stage depends only on stages before it.

    Products sum over all inner axes, reductions and scans run along all sequential axes of the results. AssertionError
    where one product reads another, because each has axes of its own then: the family has to state the stages.
    """
    names = {
        "contract": tuple(axis.name for axis in axes if axis.inner),
        "reduce": tuple(axis.name for axis in axes if axis.walk == "sequential" and not axis.inner),
    }
    names["scan"] = names["sort"] = names["scatter"] = names["reduce"]
    level: dict[int, int] = {}
    after_product: set[int] = set()
    stages: dict[tuple[int, int], Stage] = {}
    for node in topological(values):
        kind = "contract" if node.kind in PRODUCTS else node.op
        here = max((level[id(child)] for child in node.inputs), default=0)
        level[id(node)] = here + (kind in names)
        reads_product = any(id(child) in after_product for child in node.inputs)
        if node.kind in PRODUCTS and reads_product:
            raise AssertionError("a product reads another one of its region: the family has to state the stages")
        if node.kind in PRODUCTS or reads_product:
            after_product.add(id(node))
        if kind in names:
            key = (here + 1, STAGES.index(kind))
            before = stages.get(key, Stage(kind, names[kind], 0))
            stages[key] = Stage(kind, names[kind], before.count + 1)
        elif node.kind.is_pointwise:
            stages[here, len(STAGES)] = Stage("map")
    return tuple(stages[key] for key in sorted(stages)) or (Stage("map"),)


def stores_of(regions: Iterable[Region]) -> Counter[int]:
    """Counts the stores of each result."""
    return Counter(store.result for region in regions for store in region.stores)


def without_results(regions: Sequence[Region], results: Container[int]) -> list[Region]:
    """Removes the stores of ``results`` from ``regions``."""
    reduced = [replace(r, stores=tuple(store for store in r.stores if store.result not in results)) for r in regions]
    return [region for region in reduced if region.stores]


def renumbered(regions: Sequence[Region], numbers: Sequence[int]) -> list[Region]:
    """Replaces each store's result, a position, by the number at that position."""
    return [
        region
        if all(numbers[store.result] == store.result for store in region.stores)
        else replace(region, stores=tuple(replace(store, result=numbers[store.result]) for store in region.stores))
        for region in regions
    ]
