"""Defines what a kernel family is: one frozen object with everything that the rest of jitgen asks of it.

A family has a package of its own below ``jitgen/families`` (or anywhere else, see ``registry.register``), which exports
``FAMILY``. From a traced graph to a launch it is asked, in this order:

1. ``recognise``: is something of the graph, as it was traced, computed by other nodes? (Numbers that are counted.)
   ``respell``: shall the whole graph be computed by other operations? (Products of integers that are cast to floats.)
   ``plan``: which values of the whole graph shall be in memory, because several kernels read them? (Residual sums.)
2. ``rewrite_values``: shall some results be computed in another way before anything is claimed? (Long rows in chunks.)
3. ``claim``: which of these results can one region hold, and what must be in memory before? The families are asked in
   the order of the registry, each about what the ones before it left.
4. ``merge``, ``legalize``, ``joins``: which regions become one, which of their operands and results need a copy, and
   which regions may share a kernel.
5. ``rewrite_kernel``: shall this kernel become several, for the sizes of this call? (Split-K.) Or for its
   strides? (Texts of many tensors.)
6. ``layout``: the strides of a call, split into what decides the source and what a launch passes; ``parameters``: the
   parameters of the kernel, declared, from which follows what a launch passes and how sources name it.
7. ``problem``, ``candidates``, ``facts``, ``cost``: the schedules that would do, whether one of them was measured to be
   the best for such a problem, and what each is estimated to take.
8. ``render``: the source. Imported only where one is needed: a process that finds its kernels in the store renders
   nothing.
9. ``launch``, ``tensor_maps``, ``work``: how a call launches the kernel, what it copies by tensor maps, and what all of
   that amounts to.

``explain`` says what a kernel does, ``buckets`` at which sizes its schedules change. A kernel's layouts and schedule
are frozen values, and with the graph and the route they are the request key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from jitgen.device import Device
from jitgen.fingerprint import folders_digest
from jitgen.ir import symbols
from jitgen.ir.body import Body
from jitgen.ir.body_builder import BodyBuilder
from jitgen.ir.graph import Graph, Node, Shape
from jitgen.ir.program import Buffer, Decision, Kernel
from jitgen.ir.regions import Region
from jitgen.ir.symbols import Expr, Scalar
from jitgen.ir.views import Mover, Strided
from jitgen.kernel.launch import Arguments, LaunchShape, Work
from jitgen.kernel.operands import Call, MappedTensor
from jitgen.kernel.parameters import KernelParameters
from jitgen.schedule.choose import Choice, choose

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.families.call_memory import CallMemory
    from jitgen.families.temporaries import Temporaries
    from jitgen.spec import KernelSource

ANY_FAMILY = ""
"""The family of a kernel that a rewrite makes and that only maps, and of short rows among updates
(``families/short_rows.py``): the last one of the registry, which computes whatever is left."""


# ---------------------------------------------------------------------------------------- from a graph to kernels


class Partition(Protocol):
    """Answers what a family may ask while a graph is partitioned into kernels (``families/partition.py``).

    Attributes:
        mover: moves views towards inputs, builds nodes (``mover.builder``) and decides symbolic comparisons, which
            become guards (``mover.decide``).
        device: what the kernels are for.
        memory: where the tensors of this call lie.
        temporaries: what is computed before the results, and values rebuilt to read from there.
    """

    mover: Mover
    device: Device
    memory: CallMemory
    temporaries: Temporaries

    def materialize(self, node: Node) -> Node:
        """Returns the ``input`` node of a temporary that holds ``node``; some family computes it in a kernel of its
        own."""

    def decide(self, family: str, question: Any) -> Decision:
        """Answers ``question`` by ``family.decide`` at this call's sizes, or by the question itself where ``family`` is
        empty; the answer is remembered, and explained to users."""

    def state(self) -> Any:
        """Returns what ``restore`` goes back to."""

    def restore(self, state: Any) -> None:
        """Forgets what was materialized, decided and rewritten since ``state``."""

    def is_updated(self, node: Node) -> bool:
        """Returns whether ``node``, a result, is the new value of its first input, an argument, in the memory of
        that."""


Q = TypeVar("Q", bound="Question")


@dataclass(frozen=True)
class Question:
    """Asks ``Family.decide`` a question, with what the answer depends on; sizes are symbolic until ``at`` is called.

    Attributes:
        placements: what the answers mean in words: yes, and no.
    """

    placements: ClassVar[tuple[str, str]]

    def at(self: Q, environment: Mapping[str, Any]) -> Q:
        """Returns the question with numbers for its sizes."""

        def number(value: Any) -> Any:
            if isinstance(value, tuple):
                numbers = map(number, value)
                return type(value)(*numbers) if hasattr(value, "_fields") else tuple(numbers)
            return symbols.evaluate(value, environment)

        return replace(self, **{name: number(value) for name, value in vars(self).items()})

    def decide(self, device: Device) -> Decision:
        """Answers the question by itself; one whose family answers it does not."""
        raise AssertionError(f"a family that asks {self} has to answer it")

    def placement(self, fused: bool) -> str:
        """Returns what the answer means in words."""
        yes, no = self.placements
        return yes if fused else no


@dataclass(frozen=True)
class Claim:
    """Says what a family takes of the results it was shown.

    Attributes:
        regions: their stores name results by position.
        rest: as long as the results: None where a region computes the result, else the node that is left to do.
    """

    regions: Sequence[Region]
    rest: Sequence[Node | None]


@dataclass(frozen=True)
class KernelRewrite:
    """Replaces one kernel by several.

    Attributes:
        temporaries: buffers that the kernels pass on to one another.
        kernels: makes them of the kernel (whose buffers may have been renumbered) and the number of the first of the
            temporaries.
    """

    temporaries: tuple[Buffer, ...]
    kernels: Callable[[Kernel, int], tuple[Kernel, ...]]


# ------------------------------------------------------------------------------------------- from a call to a launch


@dataclass(frozen=True)
class Problem:
    """Describes what a schedule is chosen for, unless a family defines a problem of its own."""

    kernel: Kernel
    layouts: tuple[Any, ...]
    geometries: tuple[Any, ...]


@dataclass(frozen=True)
class SizeBuckets:
    """Describes a size that differs from call to call, such as a number of rows, and where other kernels take over as
    it grows.

    Attributes:
        size: an expression of a graph's sizes, such as the product of batch and sequence length.
        ends: upper ends of the buckets; sizes beyond the last are one bucket more.
        varies: False for a size that mostly is a property of a model, such as the length of a row: its buckets count
            only where all sizes in it vary for another reason.
        node: the node whose kernel they are about, if it is one node's.
        inside: nodes that have no kernel of their own, because a kernel of this family computes them: the buckets that
            families later in the registry name for these count for nothing.
    """

    size: Scalar
    ends: tuple[int, ...] = ()
    varies: bool = True
    node: Node | None = None
    inside: tuple[Node, ...] = ()


# ------------------------------------------------------------------------------------------------------- the family


def _plain_body(
    region: Region, numbers: Sequence[int], shapes: Sequence[Shape], scalars: list[tuple[Expr, str]]
) -> Body:
    return BodyBuilder(shapes, scalars).lower(region, numbers)


def _plain_problem(kernel: Kernel, layouts: Sequence[Any], geometries: Sequence[Any], device: Device) -> Problem:
    return Problem(kernel, tuple(layouts), tuple(geometries))


def _keep(kept: Any, *_: Any) -> Any:
    return kept


def _none(*_: Any) -> None:
    """Stands for what a family has none of: no other kernel, no facts, regions that stay two."""


def _empty(*_: Any) -> tuple[()]:
    return ()


def _no_cost(problem: Any, candidate: Any, device: Device) -> float:
    return 0.0


def _same_schedule(kernel: Kernel, geometries: Sequence[Any], schedule: Any, device: Device) -> Any:
    return schedule


def _never_joins(bodies: Sequence[Body], body: Body) -> bool:
    return False


def _own_decision(question: Question, device: Device) -> Decision:
    return question.decide(device)


@dataclass(frozen=True)
class Family:
    """Defines one kernel family; see the module for when each attribute is asked.

    Attributes:
        name: of the templates' folder, in stored plans and manifests, and in the banner of a source.
        claim: ``(values, partition) -> Claim``.
        layout: ``(kernel, call) -> (layouts, geometries)``, one of each per region; NotViewable where a movement needs
            a copy first.
        candidates: ``(problem, device) -> schedules``, at least one: frozen values.
        render: ``(kernel, layouts, schedule, device, compiler) -> (source, line origins)``.
        launch: ``(kernel, layouts, geometries, settled schedule, device) -> LaunchShape``.
        parameters: ``(kernel, layouts, device) -> KernelParameters``.
        tensor_maps: ``(kernel, layouts, geometries, settled schedule, device) -> tensors`` that the kernel copies by
            tensor maps, which come before its other parameters.
        work: ``(kernel, geometries, schedule) -> Work``.
        explain: ``(kernel, layouts, schedule, device) -> lines``, the first a title.
        problem: ``(kernel, layouts, geometries, device) -> problem``: what a schedule may depend on.
        cost: ``(problem, candidate, device) -> estimated time``, in any unit; the cheapest candidate is taken, of
            equals the first.
        facts: ``(problem, device) -> facts`` by which measured choices tell problems apart: numbers,
            text and arrays of these, by name. None where the family takes no measured choices.
        settle: ``(kernel, geometries, schedule, device) -> settled schedule``: what the sizes of a call decide that the
            schedule leaves open, such as which of two entries it launches; the schedule itself where nothing is open.
        recognise: ``(graph, mover, device) -> graph`` before views are moved, with patterns of nodes as other nodes.
        respell: ``(values, partition) -> values`` of the whole graph, the results and what temporaries hold, computed
            by other operations.
        plan: ``(values, partition) -> values`` of the whole graph, the results and what temporaries hold, in which what
            several kernels would compute again is read from temporaries. Families after it are asked about these too.
        rewrite_values: ``(values, partition) -> values``.
        merge: ``(region, other) -> Region`` that computes both; None where they stay two.
        legalize: ``(region, partition, memories of the results) -> Region`` that reads copies of operands whose strides
            it cannot walk, and lacks the stores whose strides it cannot walk: their results are copied from
            temporaries.
        body: ``(region, numbers of its results' buffers, shapes of all buffers, scalars) -> Body``; run-time scalars
            are added to the list ``scalars``.
        joins: ``(bodies of a kernel, body) -> bool``: whether that kernel may compute the body too.
        rewrite_kernel: ``(kernel, call, device) -> KernelRewrite``, or None; the memory of the call is that of the
            program before it is rewritten.
        decide: ``(question, device) -> Decision`` on a ``Question`` that was asked; by default its own ``decide``.
        buckets: ``(graph, environment, device) -> SizeBuckets``, several; none where the graph has nothing of this
            family.
        templates: for a family outside jitgen, the folder of its templates, which it also gives ``render.source``.
        code: for a family outside jitgen, the folder of its Python files: what it generates depends on them.
    """

    name: str
    claim: Callable[[Sequence[Node], Partition], Claim]
    layout: Callable[[Kernel, Call], tuple[tuple[Any, ...], tuple[Any, ...]]]
    candidates: Callable[[Any, Device], Sequence[Any]]
    render: Callable[[Kernel, Sequence[Any], Any, Device, str], tuple[KernelSource, Rendered]]
    launch: Callable[[Kernel, Sequence[Any], Sequence[Any], Any, Device], LaunchShape]
    parameters: Callable[[Kernel, Sequence[Any], Device], KernelParameters]
    work: Callable[[Kernel, Sequence[Any], Any], Work]
    explain: Callable[[Kernel, Sequence[Any], Any, Device], list[str]]
    problem: Callable[[Kernel, Sequence[Any], Sequence[Any], Device], Any] = _plain_problem
    cost: Callable[[Any, Any, Device], float] = _no_cost
    facts: Callable[[Any, Device], Mapping[str, Any] | None] = _none
    tensor_maps: Callable[[Kernel, Sequence[Any], Sequence[Any], Any, Device], Sequence[MappedTensor]] = _empty
    settle: Callable[[Kernel, Sequence[Any], Any, Device], Any] = _same_schedule
    recognise: Callable[[Graph, Mover, Device], Graph] = _keep
    respell: Callable[[Sequence[Node], Partition], Sequence[Node]] = _keep
    plan: Callable[[Sequence[Node], Partition], Sequence[Node]] = _keep
    rewrite_values: Callable[[Sequence[Node], Partition], Sequence[Node]] = _keep
    merge: Callable[[Region, Region], Region | None] = _none
    legalize: Callable[[Region, Partition, Sequence[Strided]], Region] = _keep
    body: Callable[[Region, Sequence[int], Sequence[Shape], list[tuple[Expr, str]]], Body] = _plain_body
    joins: Callable[[Sequence[Body], Body], bool] = _never_joins
    rewrite_kernel: Callable[[Kernel, Call, Device], KernelRewrite | None] = _none
    decide: Callable[[Any, Device], Decision] = _own_decision
    buckets: Callable[[Graph, Mapping[str, Any], Device], Sequence[SizeBuckets]] = _empty
    templates: Path | None = None
    code: Path | None = None

    def fingerprint(self) -> str:
        """Returns what decides the sources of a family from outside jitgen; jitgen's own families are part of
        ``code_digest``."""
        folders = [folder for folder in (self.code, self.templates) if folder is not None]
        return folders_digest(*folders) if folders else ""

    def arguments(
        self, kernel: Kernel, layouts: Sequence[Any], geometries: Sequence[Any], settled: Any, device: Device
    ) -> Arguments:
        """Returns what one launch passes."""
        maps = self.tensor_maps(kernel, layouts, geometries, settled, device)
        return self.parameters(kernel, layouts, device).arguments(geometries, settled, maps)

    def choose(self, problem: Any, device: Device) -> Choice:
        """Returns the candidate for ``problem`` that was measured to be the best; without a measurement the cheapest,
        of equals the first."""
        return choose(
            self.name,
            self.candidates(problem, device),
            lambda candidate: self.cost(problem, candidate, device),
            lambda: self.facts(problem, device),
            device,
        )
