"""Orders what a program computes before its results: temporaries, and changes of arguments.

A *step* is one of these. ``Steps`` asks for the regions of every temporary (``families/claims.py``), computes in
another way what waits for itself, and puts all steps in an order.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from jitgen.errors import InternalError
from jitgen.families import registry
from jitgen.families.changes import State
from jitgen.families.claims import Claims
from jitgen.families.kernels import MAX_OPERANDS
from jitgen.families.lengths import LONGEST, length
from jitgen.families.short_rows import beside_others
from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import GATHER, INPUT
from jitgen.ir.regions import Region, renumbered, without_results
from jitgen.ir.views import Strided

MOST_TEMPORARIES = 64
"""Temporaries beyond four for each node of the graph; a partition that asks for more of them would not end."""


class Step(NamedTuple):
    """Identifies what is computed before the results: a temporary, or a change of an argument that is updated in place.

    Attributes:
        number: of the temporary, or of the result, which may be an argument's new value.
        change: the number of the change, for an argument that is changed several times; None for a temporary.
    """

    number: int
    change: int | None = None


def cycle(after: Mapping[Step, Set[Step]]) -> list[Step]:
    """Returns steps that wait for one another, the first for the second and so on around; empty if every step can come
    after those that ``after`` names for it."""
    left = {step: before & after.keys() for step, before in after.items()}
    blocked = {step: len(before) for step, before in left.items()}
    following: dict[Step, list[Step]] = {step: [] for step in left}
    for step, before in left.items():
        for earlier in before:
            following[earlier].append(step)
    ready = [step for step, count in blocked.items() if not count]
    while ready:
        step = ready.pop()
        del left[step]
        for later in following[step]:
            blocked[later] -= 1
            if not blocked[later]:
                ready.append(later)
    if not left:
        return []
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(before for before in left if before in left[path[-1]]))
    return path[path.index(path[-1]) : -1]


class Steps:
    """Holds the steps of one partition: which regions each has, and what waits for what.

    Attributes:
        name: the function's name, for errors.
        memories: where each result lies.
        most: more temporaries than these mean that the partition does not end.
        waiting: the regions of each step that is not in order yet.
        together: for each step of temporaries, those that its regions compute.
        leader: for each temporary, the step that computes it.
        apart: the steps that are computed from temporaries of their operands.
    """

    def __init__(self, claims: Claims, name: str, nodes: int, memories: Sequence[Strided]) -> None:
        self.claims, self.temporaries = claims, claims.temporaries
        self.name, self.memories, self.most = name, memories, MOST_TEMPORARIES + 4 * nodes
        self.waiting: dict[Step, list[Region]] = {}
        self.together: dict[Step, list[Step]] = {}
        self.leader: dict[Step, Step] = {}
        self.apart: set[Step] = set()
        self._inputs: dict[Step, tuple[list[Region], set[Node]]] = {}
        """The inputs that the regions of each step read, beside these regions."""

    def stages(
        self, updates: Mapping[int, Sequence[tuple[int, list[Region]]]], states: Mapping[Node, State]
    ) -> list[tuple[list[Step], list[Region]]]:
        """Returns (steps, regions) of the temporaries and of early updates, in an order in which each comes after what
        it reads. Temporaries whose regions a family merges are one entry, and so is what a kernel with an update may
        compute beside it.

        Args:
            updates: by the argument's number, its changes in their order: (number of the result, regions).
            states: the nodes that are arguments before the last of their changes, which come after who reads these.
        """
        after: dict[Step, set[Step]] = {}
        changes: dict[int, list[Step]] = {}
        for index, chain in updates.items():
            steps = [Step(result, number) for number, (result, _) in enumerate(chain)]
            self.waiting |= {step: regions for step, (_, regions) in zip(steps, chain, strict=True)}
            after |= {step: set(steps[:number]) for number, step in enumerate(steps)}
            changes[index] = steps
        self._compute_values()
        read = {step: self._read_by(self._inputs_of(step), {}) for step in self.waiting}
        for position in range(len(self.temporaries.values)):
            step = Step(position)
            if self.together.get(step) == [step] and (regions := self._with_known_products(position, read)):
                self.waiting[step] = regions
                read[step] = self._read_by(self._inputs_of(step), {})
        while True:
            behind = {
                step: after.get(step, set())
                | {self.leader.get(before, before) for before in self._read_by(self._inputs_of(step), changes, states)}
                for step in self.waiting
            }
            for step in self.waiting:
                for state in {states[node] for node in self._inputs_of(step) if node in states}:
                    behind[changes[state.argument][state.changes]] |= {step} - {changes[state.argument][state.changes]}
            around = cycle(behind)
            if not around:
                return self._ordered(behind, bool(updates))
            self._break(around)
            self._compute_values()

    def _ordered(self, after: Mapping[Step, Set[Step]], has_updates: bool) -> list[tuple[list[Step], list[Region]]]:
        """Returns the steps in order, each after those that ``after`` has for it; steps that may share a kernel are
        one."""
        waiting = self.waiting
        ordered: list[tuple[list[Step], list[Region]]] = []
        blocked = {step: len(before & waiting.keys()) for step, before in after.items()}
        following: dict[Step, list[Step]] = {step: [] for step in waiting}
        for step, before in after.items():
            for earlier in before & waiting.keys():
                following[earlier].append(step)
        while waiting:
            ready = self._without_early([step for step in waiting if not blocked[step]], blocked, following)
            self._share_short_rows(ready)
            # An update shares a kernel with the regions right before it; several regions of one step stay in order.
            ready.sort(key=lambda step: (len(waiting[step]) > 1, waiting[step][0].family) if has_updates else ())
            first, *others = ready
            regions, steps = list(waiting.pop(first)), list(self.together.get(first, [first]))
            computed, mergeable = [first], len(steps) == len(regions) == 1
            for other in others:
                members = self.together.get(other, [other])
                behind = renumbered(waiting[other], range(len(steps), len(steps) + len(members)))
                is_one = mergeable and len(behind) == len(members) == 1
                if not (is_one and self._merge_into(regions, behind[0], [*steps, *members])):
                    if not (has_updates or behind[0].family == regions[0].family):
                        continue
                    regions += behind
                steps += members
                waiting.pop(other)
                computed.append(other)
            for step in (step for earlier in computed for step in following[earlier]):
                blocked[step] -= 1
            ordered.append((steps, regions))
        return ordered

    def with_results(
        self, stages: Sequence[tuple[list[Step], list[Region]]], results: Sequence[Region], updated: Container[int]
    ) -> tuple[list[tuple[list[Step], list[Region]]], list[Region]]:
        """Returns ``stages`` with those of ``results``, regions that compute results, that one of their regions
        computes besides; and the others. No argument has changed in ``stages``: results may read it at any of them.

        Args:
            updated: results that are new values of arguments, which are written after all else.
        """
        needed = {
            position: self._read_by(_inputs_of([result]), {})
            for position, result in enumerate(results)
            if not any(store.result in updated for store in result.stores)
        }
        computed: set[Step] = set()
        merged, taken = [], set[int]()
        for members, regions in stages:
            steps, regions = list(members), list(regions)
            for position in [position for position, read in needed.items() if read <= computed]:
                result = results[position]
                written = dict.fromkeys(store.result for store in result.stores)  # a cat by several stores
                numbers = {position: number for number, position in enumerate(written, len(steps))}
                stores = tuple(replace(store, result=numbers[store.result]) for store in result.stores)
                members = [*steps, *(Step(number, 0) for number in numbers)]
                if self._merge_into(regions, replace(result, stores=stores), members):
                    steps = members
                    taken.add(position)
                    del needed[position]
            merged.append((steps, regions))
            computed.update(steps)
        return merged, [result for position, result in enumerate(results) if position not in taken]

    def without_unread(
        self, stages: Sequence[tuple[list[Step], list[Region]]], behind: Sequence[Region], returned: Set[int]
    ) -> tuple[list[tuple[list[Step], list[Region]]], set[int]]:
        """Returns ``stages`` without what they store in temporaries that nothing reads, and the positions of these: a
        value that several kernels were to read may be computed again by the last of them. What a family states the
        stages of, updates, and runs and blocks of columns are stored by kernels that store all they compute.

        Args:
            behind: the regions that run after ``stages``.
            returned: the positions of temporaries that the function returns.
        """
        unread: set[int] = set()
        own = {
            steps[store.result].number
            for steps, regions in stages
            for region in regions
            if not (region.stated or region.is_update or any(one.run > 1 or one.block for one in region.stores))
            for store in region.stores
            if steps[store.result].change is None
        }
        while True:
            regions = [*behind, *(region for _, of_steps in stages for region in of_steps)]
            more = own - unread - returned - {step.number for step in self._read_by(_inputs_of(regions), {})}
            if not more:
                return [(steps, regions) for steps, regions in stages if regions], unread
            unread |= more
            stages = [
                (steps, without_results(regions, {n for n, step in enumerate(steps) if step in map(Step, more)}))
                for steps, regions in stages
            ]

    def _merge_into(self, regions: list[Region], region: Region, members: Sequence[Step]) -> bool:
        """Puts one that computes ``region`` too in the place of one of ``regions``; False if none may.

        Args:
            members: the steps by whose positions stores name their results.
        """
        for position, other in enumerate(regions):
            both = _merged(other, region)
            if both is not None and _is_moderate(both) and self._is_legal(both, members):
                regions[position] = both
                return True
        return False

    def _is_legal(self, region: Region, members: Sequence[Step]) -> bool:
        """Returns whether ``region``, of two that each need no further copy, needs none either: rows of the two may lie
        in different orders."""
        state = self.claims.state()
        legal = registry.named(region.family).legalize(region, self.claims, [self._memory(step) for step in members])
        self.claims.restore(state)
        return legal.stores == region.stores

    def _memory(self, step: Step) -> Strided:
        """Returns where the result of ``step`` lies."""
        if step.change is not None:
            return self.memories[step.number]
        return self.claims.memory.contiguous(self.temporaries.values[step.number].shape)

    def _without_early(
        self, ready: Sequence[Step], blocked: Mapping[Step, int], following: Mapping[Step, Sequence[Step]]
    ) -> list[Step]:
        """Returns ``ready`` without steps that are better done later, because more steps of their family will be ready
        then and can share a kernel: normalised keys, and values that are not, on their way to a cache."""
        families = {step: self.waiting[step][0].family for step in ready}
        early: set[str] = set()
        for family in dict.fromkeys(families.values()):
            released = Counter(later for step in ready if families[step] != family for later in following[step])
            behind = (later for later, count in released.items() if count == blocked[later])
            if any(self.waiting[later][0].family == family for later in behind) and not self._share(families, family):
                early.add(family)
        left = [step for step in ready if families[step] not in early]
        return left or list(ready)

    def _share_short_rows(self, ready: Sequence[Step]) -> None:
        """Lets short rows of the steps ``ready`` be computed by one kernel (``families/short_rows.py``)."""
        shared = iter(with_short_rows([region for step in ready for region in self.waiting[step]], self.claims))
        for step in ready:
            self.waiting[step] = [next(shared) for _ in self.waiting[step]]

    def _share(self, families: Mapping[Step, str], family: str) -> bool:
        """Returns whether a region of ``family`` may share a kernel with one of another family, and so be computed at
        once: a state of an unrolled loop, and what is read of the states before it."""
        own: list[Region] = []
        others: list[Region] = []
        for step in families:
            regions = self.waiting[step]
            if len(regions) == len(self.together.get(step, [step])) == 1:
                (own if families[step] == family else others).extend(regions)
        return any(may_merge(region, other) for region in own for other in others)

    def _compute_values(self) -> None:
        """Adds to ``waiting`` the regions of temporaries that have none yet, and of the temporaries that these regions
        read."""
        for position, value in enumerate(self.temporaries.values):  # which grow meanwhile
            if position == self.most:
                raise self._endless([value])
            if Step(position) in self.leader:
                continue
            numbers = next((joined for joined in self.temporaries.joined if joined[0] == position), (position,))
            numbers = tuple(number for number in numbers if Step(number) not in self.leader)
            self.together[Step(position)] = list(map(Step, numbers))
            self.leader |= dict.fromkeys(self.together[Step(position)], Step(position))
            values = [self.temporaries.values[number] for number in numbers]
            self.waiting[Step(position)] = self.claims.regions_in_memory(values)

    def _break(self, around: Sequence[Step]) -> None:
        """Changes how one of the steps ``around``, which wait for one another, is computed: each of its temporaries by
        itself if it has several, else from temporaries of its operands."""
        joined = next((step for step in around if len(self.together.get(step, ())) > 1), None)
        if joined is not None:
            for step in self.together[joined]:
                self.together[step], self.leader[step] = [step], step
                self.waiting[step] = self.claims.regions_in_memory([self.temporaries.values[step.number]])
            return
        temporaries = [step for step in around if step.change is None]
        first = next((step for step in temporaries if step not in self.apart), None)
        if first is None:
            raise self._endless([self.temporaries.values[step.number] for step in temporaries])
        self.apart.add(first)
        value = self.temporaries.from_operands(self.temporaries.values[first.number])
        self.waiting[first] = self.claims.regions_in_memory([value])

    def _with_known_products(self, position: int, read: Mapping[Step, set[Step]]) -> list[Region] | None:
        """Returns the regions of temporary ``position`` that read another temporary in place of a product which that
        holds: a second kernel would compute the product again. None where there is none, or where they need new
        temporaries.

        Args:
            read: the temporaries that each step reads.
        """
        value = self.temporaries.with_stored_products(position)
        if value is None:
            return None
        state, step = self.claims.state(), Step(position)
        regions = self.claims.regions_in_memory([value])
        unread = read[step] - self._read_by(_inputs_of(regions), {})
        needs_more = len(self.temporaries.values) > state.temporaries
        if needs_more or unread.difference(*(others for other, others in read.items() if other != step)):
            self.claims.restore(state)
            return None
        return regions

    def _endless(self, values: Sequence[Node]) -> InternalError:
        """Returns the error for temporaries that wait for one another, or that need ever more temporaries."""
        where = {f"{node.op}{f' at {node.location}' if node.location else ''}" for node in values}
        return InternalError(f"{self.name}: jitgen finds no order in which to compute {'; '.join(sorted(where))}")

    def _inputs_of(self, step: Step) -> set[Node]:
        """Returns the inputs that the regions of ``step`` read. They are walked through once: every cycle of steps that
        is broken asks again."""
        regions = self.waiting[step]
        known = self._inputs.get(step)
        if known is None or known[0] is not regions:
            known = self._inputs[step] = regions, _inputs_of(regions)
        return known[1]

    def _read_by(
        self,
        inputs: Set[Node],
        changes: Mapping[int, Sequence[Step]],
        states: Mapping[Node, State] = types.MappingProxyType({}),
    ) -> set[Step]:
        """Returns what must be computed before ``inputs`` are read: temporaries, and ``changes`` of arguments, up to
        the ``states`` that these are read in."""
        first = self.temporaries.first
        read = {Step(node.attrs.number - first) for node in inputs if node.attrs.number >= first}
        for node in inputs:
            made = changes.get(node.attrs.number, ())
            read.update(made[: states[node].changes] if node in states else made)
        return read


def _inputs_of(regions: Sequence[Region]) -> set[Node]:
    nodes = topological(node for region in regions for store in region.stores for node in store.sources)
    return {node for node in nodes if node.kind is INPUT}


def with_short_rows(regions: Sequence[Region], claims: Claims) -> list[Region]:
    """Returns ``regions``, which may run at the same time, with short rows in the family of pointwise kernels."""
    return beside_others(regions, claims, registry.FAMILIES[-1].name, may_merge)


def may_merge(left: Region, right: Region) -> bool:
    """Returns whether one region may compute what these two do."""
    both = _merged(left, right)
    return both is not None and _is_moderate(both)


def _merged(left: Region, right: Region) -> Region | None:
    """Merges two regions into one, if they are of one family that merges them, or if one is pointwise and the other
    goes along rows of its shape; None if not."""
    if left.family == right.family:
        return registry.named(left.family).merge(left, right)
    rows, pointwise = (left, right) if left.row_rank else (right, left)
    if rows.shape != pointwise.shape or pointwise.is_update or not _takes_pointwise(rows):
        return None
    if any(stage.kind != "map" for stage in pointwise.stages) or any(store.indices for store in pointwise.stores):
        return None
    if any(GATHER in node.kinds for store in pointwise.stores for node in store.sources):
        return None  # pointwise kernels alone read at computed indices
    same = replace(pointwise, family=rows.family, axes=rows.axes)
    left, right = (rows, same) if rows is left else (same, rows)
    return registry.named(rows.family).merge(left, right)


def _is_moderate(region: Region) -> bool:
    """Returns whether a kernel of ``region`` has few enough operands and is compiled in a few seconds."""
    nodes = topological(node for store in region.stores for node in store.sources)
    computed = [node for node in nodes if not node.is_in_memory]
    read = {child for node in computed for child in node.inputs if child.is_in_memory}
    return len(read) + len(region.stores) <= MAX_OPERANDS and length(computed) <= LONGEST


def _takes_pointwise(region: Region) -> bool:
    """Returns whether ``region`` goes along rows and computes elements of them."""
    kinds = {stage.kind for stage in region.stages}
    return bool(kinds & {"reduce", "scan"}) and kinds <= {"map", "reduce", "scan"}
