"""Asks the families, in the order of the registry, which regions compute some values, and answers what they ask.

A value that no strides let a region write is computed into a temporary, and copied from there.

Neighbours: ``families/family.py`` says what a family is asked, and what it may ask (``Partition``, which ``Claims``
is); ``families/partition.py`` and ``families/steps.py`` ask for regions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.call_memory import CallMemory
from jitgen.families.temporaries import Temporaries
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.nodes import VIEW
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region, Store, grid_axes, renumbered, stores_of, without_results
from jitgen.ir.views import Strided, contiguous_strides


class State(NamedTuple):
    """Holds what is undone when regions are dropped again: temporaries, which of them are partitioned together,
    decisions, and names of rewrites."""

    temporaries: int
    joined: int
    decisions: dict[tuple[str, Any], Decision]
    rewrites: dict[str, None]


class Claims:
    """Makes regions of values.

    Attributes:
        mover, device, memory, temporaries: see ``Partition``.
        decisions: what families have decided, by family and question.
    """

    def __init__(self, device: Device, memory: CallMemory, temporaries: Temporaries) -> None:
        self.mover, self.device, self.memory, self.temporaries = temporaries.mover, device, memory, temporaries
        self.decisions: dict[tuple[str, Any], Decision] = {}
        self._changes: frozenset[Node] = frozenset()

    # ------------------------------------------------------------------------------------------ what families ask

    def materialize(self, node: Node) -> Node:
        """Returns the ``input`` node of a temporary that holds ``node``."""
        return self.temporaries.materialize(node)

    def decide(self, family: str, question: Any) -> Decision:
        """Answers ``question`` by ``family.decide`` at this call's sizes; the answer is recorded for the program."""
        asked = question.at(self.memory.environment)
        self.decisions[family, question] = registry.decision(family, asked, self.device)
        return self.decisions[family, question]

    def is_updated(self, node: Node) -> bool:
        """Returns whether ``node``, a result, is the new value of its first input, an argument, in the memory of
        that."""
        return node in self._changes

    # ------------------------------------------------------------------------------------------------- attempts

    def state(self) -> State:
        """Returns what ``restore`` goes back to."""
        temporaries = self.temporaries
        return State(len(temporaries.values), len(temporaries.joined), dict(self.decisions), dict(self.mover.fired))

    def restore(self, state: State) -> None:
        """Forgets what was materialized, decided and rewritten since ``state``."""
        self.temporaries.forget_from(state.temporaries, state.joined)
        self.decisions = dict(state.decisions)
        self.mover.fired = dict(state.rewrites)

    # ---------------------------------------------------------------------------------------------------- regions

    def regions_in_memory(self, values: Sequence[Node]) -> list[Region]:
        """Makes the regions that compute ``values`` into contiguous memory."""
        return self.regions(values, [self.memory.contiguous(value.shape) for value in values])

    def regions_at(
        self,
        positions: Sequence[int],
        results: Sequence[Node],
        memories: Sequence[Strided] | Mapping[int, Strided],
        changes: Collection[int] = (),
    ) -> list[Region]:
        """Makes the regions that compute those of ``results`` at ``positions``, by which their stores name them.

        Args:
            changes: the positions of results that are changes of arguments.
        """
        changes = [number for number, position in enumerate(positions) if position in changes]
        regions = self.regions([results[p] for p in positions], [memories[p] for p in positions], changes)
        return renumbered(regions, positions)

    def regions(
        self, results: Sequence[Node], memories: Sequence[Strided], changes: Collection[int] = ()
    ) -> list[Region]:
        """Makes the regions that compute ``results`` into ``memories``. Each family claims some of those results that
        the families before it left. A result that its region cannot write in place is copied from a temporary.

        Args:
            changes: the positions of scatters into arguments whose memory the results have.
        """
        claimed = self._claimed(results, changes)
        legal = [self._legal(region, memories) for region in claimed]
        left = sorted(stores_of(claimed) - stores_of(legal))
        if left:
            self.memory.depends_on_strides()
            unwritable = self._unwritable(claimed, memories)
            values = [
                self.temporaries.from_operands(results[p]) if p in unwritable else self.materialize(results[p])
                for p in left
            ]
            copies = self.regions(values, [memories[p] for p in left])
            legal = without_results(legal, left) + renumbered(copies, left)
        return sorted(legal, key=lambda region: region.is_update)  # behind what it changes

    def _claimed(self, results: Sequence[Node], changes: Collection[int]) -> list[Region]:
        """Returns the regions that families claim of ``results``, those at ``changes`` in the memory of their bases."""
        regions: list[Region] = []
        values, positions = list(results), list(range(len(results)))
        for family in registry.FAMILIES:
            if values:
                values = list(family.rewrite_values(values, self))
                new = {node for position, node in zip(positions, values, strict=True) if position not in changes}
                self._changes = frozenset(values) - new
                claim = family.claim(values, self)
                own = [replace(r, family=r.family or registry.FAMILIES[-1].name) for r in claim.regions]
                regions += renumbered(own, positions)
                positions = [position for position, node in zip(positions, claim.rest, strict=True) if node is not None]
                values = [node for node in claim.rest if node is not None]
        if values:
            raise AssertionError(f"no family computes {', '.join(sorted({node.op for node in values}))}")
        return regions

    def _unwritable(self, regions: Sequence[Region], memories: Sequence[Strided]) -> set[int]:
        """Returns the results that ``regions`` cannot write in the order of the views behind them, even to contiguous
        memory. A temporary of such a result would not be written in place; one of the value before the views is."""
        plain = [Strided(memory.sizes, contiguous_strides(memory.sizes)) for memory in memories]
        stores = [store for region in regions for store in region.stores]
        return {store.result for store in stores if not self._is_writable(store, plain)}

    def _is_writable(self, store: Store, memories: Sequence[Strided]) -> bool:
        return self.memory.located(store.movements, memories[store.result]) is not None

    def _legal(self, region: Region, memories: Sequence[Strided]) -> Region:
        """Makes each view in ``region`` that no strides describe read a contiguous temporary, and drops the stores that
        cannot write to the memory of their results."""
        region = self._with_viewable_shape(region, memories)
        stores = tuple(
            store.with_sources(self._with_viewable_reshapes)
            for store in region.stores
            if self._is_writable(store, memories)
        )
        return registry.named(region.family).legalize(replace(region, stores=stores), self, memories)

    def _with_viewable_shape(self, region: Region, memories: Sequence[Strided]) -> Region:
        """Moves a pointwise ``region`` before a reshape that would need a copy, if the region needs none there: the
        elements of a group_norm are computed in the shape of the groups, whose statistics they read."""
        if any(stage.kind != "map" for stage in region.stages) or any(store.indices for store in region.stores):
            return region
        reshapes = [n for n in topological(store.value for store in region.stores) if self._needs_copy(n, n)]
        for shape in dict.fromkeys(reshape.inputs[0].shape for reshape in reshapes if reshape.shape == region.shape):

            def moved(node: Node, shape: Shape = shape) -> Node:
                return self.mover.move(node, ("reshape",), shape)

            stores = [store.moved(("reshape",), shape, moved) for store in region.stores]
            views = [node for node in topological(store.value for store in stores) if node.kind is VIEW]
            # A gather is not computed in another shape: a view of it would be left.
            fits = not any(view.under_views.inputs or self._needs_copy(view, view) for view in views)
            if fits and all(self._is_writable(store, memories) for store in stores):
                return Region(region.family, grid_axes(shape), tuple(stores))
        return region

    def _with_viewable_reshapes(self, root: Node) -> Node:
        """Makes reshapes under ``root`` that need a copy read a temporary; a value that is computed of several of them
        is one temporary in their place."""
        builder = self.mover.builder
        memo = self._reshaped_values(root)
        for node in topological([root], known=memo):
            if id(node) in memo:
                continue
            children = [memo[id(child)] for child in node.inputs]
            rebuilt = builder.rebuilt(node, children)
            if self._needs_copy(node, rebuilt):
                rebuilt = builder.like(node, [self.materialize(children[0])])
            memo[id(node)] = rebuilt
        return memo[id(root)]

    def _needs_copy(self, node: Node, rebuilt: Node) -> bool:
        return node.kind is VIEW and node.attrs.kind == "reshape" and self.memory.strides(rebuilt) is None

    def _reshaped_values(self, root: Node) -> dict[int, Node]:
        """Returns, by their ids, the last values under ``root`` that are computed pointwise of several reshapes that
        need a copy, as a reshape of one temporary, which has the shape before these. No other operand needs a copy to
        have that shape, as the weights of a ``group_norm`` do."""
        order = topological([root])
        is_viewable = functools.cache(self._is_viewable)
        copied: set[Node] = set()  # reshapes that need a copy
        leaves: dict[int, frozenset[Node]] = {}  # what is computed pointwise is computed of
        fitting: dict[int, Shape] = {}
        for node in order:
            if node.is_in_memory or node.kind.is_number:
                leaves[id(node)] = frozenset([] if node.kind.is_number else [node])
                if self._needs_copy(node, node):
                    copied.add(node)
            elif node.kind.is_pointwise and all(id(child) in leaves for child in node.inputs):
                own = leaves[id(node)] = frozenset().union(*(leaves[id(child)] for child in node.inputs))
                shapes = {reshape.inputs[0].shape for reshape in own & copied}
                if len(own & copied) > 1 and len(shapes) == 1:
                    (shape,) = shapes
                    if all(is_viewable(operand, shape) for operand in own - copied):
                        fitting[id(node)] = shape
        ends = {id(child) for node in order if id(node) not in fitting for child in node.inputs} | {id(root)}
        reshaped: dict[int, Node] = {}
        for node in order:
            if id(node) in ends and id(node) in fitting:
                value = self.materialize(self.mover.move(node, ("reshape",), fitting[id(node)]))
                reshaped[id(node)] = self.mover.move(value, ("reshape",), node.shape)
        return reshaped

    def _is_viewable(self, operand: Node, shape: Shape) -> bool:
        """Returns whether ``operand`` has ``shape`` without a copy."""
        moved = self.mover.move(operand, ("reshape",), shape)
        return not any(self._needs_copy(node, node) for node in topological([moved]))
