"""Partitions a traced graph into a program of kernels, whose bodies a dialect can print. The passes are:

1. ``Family.recognise``: patterns of the graph, as it was traced, become other nodes.
   ``moved.move_views``: every view is moved to the inputs.
2. ``_planned``: what several kernels read and would compute again becomes a temporary (``Family.plan``).
3. ``results.returned`` and ``_add_updates``: which values are results, and in which order arguments are updated.
4. ``claims.Claims``: each family in turn may rewrite results, and claims some of them for its regions. A value that a
   region needs in memory is *materialized*: it becomes a temporary, which is partitioned in the same manner.
5. ``steps.Steps``: temporaries, and changes of arguments, are put in order.
6. ``kernels.kernels_of``: regions become kernels of instructions in compute dtypes; ``copies.without_copies``: launches
   of users' kernels update arguments in place.

No family is named here. They are called in the order of ``families/registry.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.call_memory import CallMemory
from jitgen.families.changes import State, with_written_reshapes
from jitgen.families.claims import Claims
from jitgen.families.copies import without_copies, without_temporaries
from jitgen.families.family import Family
from jitgen.families.kernels import kernels_of, with_coarse, with_constant_weights
from jitgen.families.moved import EqualSizes, Moved, move_views
from jitgen.families.results import Results, returned, stored_in_temporaries, views_of_updated
from jitgen.families.steps import Steps, with_short_rows
from jitgen.families.temporaries import Temporaries
from jitgen.families.updates import are_safe, in_place, independent_updates
from jitgen.ir.attributes import CHANNELS_LAST, CONTIGUOUS
from jitgen.ir.graph import Builder, Graph, Node
from jitgen.ir.index import Index
from jitgen.ir.program import Alias, Buffer, Kernel, Program
from jitgen.ir.regions import Region, renumbered, without_results
from jitgen.ir.views import Decide, Memory, Mover, Strided


def program_of(
    graph: Graph,
    decide: Decide,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    device: Device,
    out: Sequence[Strided | None] = (),
) -> Program:
    """Makes the program of ``graph``.

    Args:
        decide: decides (and records) symbolic comparisons on which the partition depends.
        environment: a value for every symbol, from the call at hand.
        memory: strides and alignment of every input of that call. They only decide what needs a copy, before or after.
        device: the device that the kernels are for.
        out: for each result, the memory of the caller's ``out=`` tensor, if there is one; then no temporary can be
            returned in place of a result.
    """
    return Partitioner(graph, decide, CallMemory(environment, memory, out), device).program()


@dataclass(frozen=True)
class Stages:
    """Holds the regions that compute results, in the order in which they run, behind the temporaries.

    Attributes:
        changes: of each argument of which elements are replaced before others read it, in order: the result's position
            and the regions of one change. They run among the temporaries.
        results: compute what is returned, and new values of arguments that nothing else reads.
        in_place: compute new values of arguments into these, in lists of which each may run only after the one before.
        copies: copy the other new values from temporaries.
    """

    changes: Mapping[int, Sequence[tuple[int, list[Region]]]]
    results: list[Region]
    in_place: list[list[Region]]
    copies: list[Region]

    @property
    def behind_temporaries(self) -> list[list[Region]]:
        return [self.results, *self.in_place, self.copies]

    def renumbered(self, dropped: Mapping[int, Any], positions: Sequence[int]) -> Stages:
        """Returns the stages without the results ``dropped``, with new ``positions`` of the others."""
        return Stages(
            {number: [(positions[p], regions) for p, regions in chain] for number, chain in self.changes.items()},
            renumbered(without_results(self.results, dropped), positions),
            [renumbered(level, positions) for level in self.in_place],
            renumbered(self.copies, positions),
        )


class Partitioner:
    """Holds the state of one graph's partition.

    Attributes:
        views: the outputs that are views of an updated argument, by position.
        graph: the graph without these.
    """

    def __init__(self, graph: Graph, decide: Decide, memory: CallMemory, device: Device) -> None:
        self.memory = memory
        self.mover = Mover(Builder(), decide, memory.environment)
        graph = with_written_reshapes(graph, self.mover)
        for family in registry.FAMILIES:
            graph = family.recognise(graph, self.mover, device)
        self.views = views_of_updated(graph, memory)
        outputs = tuple(node for position, node in enumerate(graph.outputs) if position not in self.views)
        self.graph = graph = replace(graph, outputs=outputs) if self.views else graph
        self.index = Index(graph.results)
        self.sizes = EqualSizes(graph, self.index)
        self.temporaries = Temporaries(self.mover, len(graph.inputs))
        self.claims = Claims(device, memory, self.temporaries)

    def program(self) -> Program:
        moved = move_views(self.graph, self.index, self.sizes, self.claims)
        moved = self._over_all(moved, lambda family: family.respell)
        moved = self._over_all(moved, lambda family: family.plan)
        results = returned(self.graph, moved, self.memory, self.temporaries)
        stages = self._stages(moved, results)
        aliases = stored_in_temporaries(stages.results, results, self.memory, self.temporaries)
        if aliases:
            new = itertools.count()
            positions = [-1 if position in aliases else next(new) for position in range(len(results.nodes))]
            results, stages = results.without(aliases, positions), stages.renumbered(aliases, positions)
        for position, view in self.views.items():
            results.outputs.insert(position, view)
        return self._program(results, stages, moved.states)

    def _over_all(self, moved: Moved, hook: Callable[[Family], Callable[..., Sequence[Node]]]) -> Moved:
        """Returns ``moved`` with all values, and those of the temporaries that there are, as a hook of the families
        has them."""
        chains = [node for chain in moved.changes.values() for node in chain]
        values = [*moved.outputs, *moved.updates.values(), *chains, *self.temporaries.values]
        others = len(values) - len(self.temporaries.values)
        for family in registry.FAMILIES:
            values = list(hook(family)(values, self.claims))
            values += self.temporaries.values[len(values) - others :]  # what the family has materialized
        planned = iter(values)
        outputs = [next(planned) for _ in moved.outputs]
        updates = {number: next(planned) for number in moved.updates}
        changes = {number: [next(planned) for _ in chain] for number, chain in moved.changes.items()}
        self.temporaries.replace_values(planned)
        return Moved(outputs, updates, changes, moved.in_place, moved.states)

    def _stages(self, moved: Moved, results: Results) -> Stages:
        """Adds the new values of arguments to ``results``, and makes the regions of all.

        An update is computed into its argument directly where nothing else reads what the argument was. Others are
        computed in place at the end, those that read one another together, or else into temporaries that are copied.
        """
        outputs = dict(enumerate(results.nodes))
        single = moved.in_place - moved.changes.keys()
        results.update({number: node for number, node in moved.updates.items() if number in single})
        scattered = range(len(outputs), len(results.nodes))
        results.update(self._independent(moved, results.nodes))
        before_changes = len(results.nodes)
        results.update({number: chain[-1] for number, chain in moved.changes.items()})
        left = {n: node for n, node in moved.updates.items() if n not in results.mutated.values()}
        levels = self._in_place(left, outputs, results)
        before_copies = len(results.nodes)
        left = {n: node for n, node in left.items() if n not in results.mutated.values()}
        results.update({number: self.temporaries.materialize(node) for number, node in left.items()})

        memories = [results.memory(position, self.memory) for position in range(len(results.nodes))]
        computed = {store.result for region in itertools.chain(*levels) for store in region.stores}
        direct = [position for position in range(before_changes) if position not in computed]
        regions = self.claims.regions_at(direct, results.nodes, memories, scattered)
        copies = self.claims.regions_at(range(before_copies, len(results.nodes)), results.nodes, memories)
        changes = {
            number: [(position, self.claims.regions([node], [memories[position]], [0])) for node in chain]
            for position, (number, chain) in enumerate(moved.changes.items(), before_changes)
        }
        return Stages(changes, regions, levels, copies)

    def _independent(self, moved: Moved, results: Sequence[Node]) -> dict[int, Node]:
        """Returns the updates that kernels compute with the ``results``, scatters into arguments among them, and that
        nothing else depends on."""
        others = {number: node for number, node in moved.updates.items() if number not in moved.in_place}
        readers = [*results, *(node for chain in moved.changes.values() for node in chain)]
        shapes = [self.sizes.shape(spec.shape) for spec in self.graph.inputs]
        return independent_updates(others, readers, shapes)

    def _in_place(
        self, updates: Mapping[int, Node], outputs: Mapping[int, Node], results: Results
    ) -> list[list[Region]]:
        """Makes the regions that compute ``updates`` in place, in lists of which each may run only after the one
        before, and adds these updates to ``results``.

        Args:
            outputs: of ``results``, those that are returned, by position.
        """
        shapes = [self.sizes.shape(spec.shape) for spec in self.graph.inputs]
        candidates = {number: node for number, node in updates.items() if node.shape == shapes[number]}
        levels: list[list[Region]] = []
        for level in in_place(candidates, outputs):
            regions: list[Region] = []
            for together in level:
                state = self.claims.state()
                values = {number: self.temporaries.from_operands(updates[number]) for number in together.updates}
                with_values = Results([*results.nodes], [], dict(results.mutated))
                with_values.update(values)
                written = dict(zip(range(len(results.nodes), len(with_values.nodes)), values, strict=True))
                positions = [*written, *together.results]
                memories = {position: with_values.memory(position, self.memory) for position in positions}
                made = self.claims.regions_at(positions, with_values.nodes, memories)
                if are_safe(made, written):
                    results.update(values)
                    regions += made
                else:
                    self.claims.restore(state)
            levels.append(regions)
        return levels

    def _program(self, results: Results, stages: Stages, states: Mapping[Node, State]) -> Program:
        """Makes kernels of the regions of temporaries and of ``stages``."""
        memories = [results.memory(position, self.memory) for position in range(len(results.nodes))]
        order = Steps(self.claims, self.graph.name, len(self.index.order), memories)
        steps = order.stages(stages.changes, states)
        if not stages.changes:
            steps, behind = order.with_results(steps, stages.results, results.mutated)
            stages = replace(stages, results=behind)
        first = self.temporaries.first
        returned = {output.input - first for output in results.outputs if isinstance(output, Alias)}
        regions_behind = [region for regions in stages.behind_temporaries for region in regions]
        steps, unread = order.without_unread(steps, regions_behind, returned)
        inputs = tuple(Buffer(spec.dtype, spec.shape) for spec in self.graph.inputs)
        temporaries = tuple(Buffer(node.dtype, node.shape) for node in self.temporaries.values)
        outputs = tuple(
            Buffer(node.dtype, node.shape, node.attrs == CONTIGUOUS, node.attrs == CHANNELS_LAST)
            for node in results.nodes
        )
        buffers = (*inputs, *temporaries, *outputs)
        shapes = [buffer.shape for buffer in buffers]
        end = len(inputs) + len(temporaries)
        kernels: list[Kernel] = []
        dialect = self.claims.device.dialect
        for members, regions in steps:
            numbers = [step.number + (len(inputs) if step.change is None else end) for step in members]
            kernels += kernels_of(regions, numbers, shapes, self.graph.name, len(kernels), dialect)
        for regions in stages.behind_temporaries:
            regions = with_short_rows(regions, self.claims)
            kernels += kernels_of(regions, range(end, len(buffers)), shapes, self.graph.name, len(kernels), dialect)
        constant = with_constant_weights(kernels, self.graph)
        program = Program(
            self.graph.name,
            inputs,
            temporaries,
            outputs,
            tuple(results.outputs),
            tuple(sorted((number, position) for position, number in results.mutated.items())),
            with_coarse(constant, buffers, range(len(inputs), end), results.outputs),
            tuple((family, question, decision) for (family, question), decision in self.claims.decisions.items()),
            general=self.memory.is_general and self.mover.general,
            rewrites=tuple(self.mover.fired),
            lines=tuple(self.memory.asked.items()),
        )
        program = without_temporaries(program, {first + number for number in unread})
        program = without_copies(program, self.memory)
        assert not (any(self.memory.out) and program.returns_temporaries), "a result is not in the caller's out="
        return program
