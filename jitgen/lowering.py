"""Lowers a graph for one call: kernels, the layout of their buffers, and a schedule for each.

``pipeline.lower`` calls ``partition``, ``lay_out`` and ``schedule`` in this order and returns their results as one
``Lowered``, whose digest is the request key. Everything here is plain Python over frozen values: no Jinja, no compiler,
no device.

Neighbours: ``families/partition.py`` divides a graph into kernels, ``families/family.py`` says what is asked of a
family, ``call/`` binds a ``Lowered`` and its compiled kernels to a launcher.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jitgen import settings
from jitgen.balance import Balance
from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.aliasing import read_elsewhere
from jitgen.fingerprint import code_digest, numeric_facts
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Guard
from jitgen.ir.least import least
from jitgen.ir.program import Kernel, Program, plain
from jitgen.ir.views import Memory, Strided
from jitgen.kernel.launch import Arguments, LaunchShape, Work
from jitgen.kernel.operands import Call, locate, ordered_like, output_strides
from jitgen.quant.weights import LAYOUTS, Layouts
from jitgen.runtime import overlap
from jitgen.schedule.chips import Chip
from jitgen.schedule.choose import Choice
from jitgen.spec import SCHEMA, KernelSource, Target, digest
from jitgen.trace.guards import Guards

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.families.family import Family


@dataclass(frozen=True)
class Route:
    """Says how kernels are made: backend, compiler and target, and the exact chip if a device is there to tell.

    Attributes:
        batch_invariant: whether a row's bits must not depend on how many rows a call has.
        automatic: whether the backend follows from the target alone, so that ``alternative`` may take its place.
        bounded_waits: whether kernels in CUDA C++ end with an error that names the barrier instead of hanging.
    """

    backend: str
    compiler: str
    target: Target
    chip: Chip | None = None
    batch_invariant: bool = False
    automatic: bool = False
    bounded_waits: bool = False

    @property
    def alternative(self) -> Route | None:
        """Returns the route of graphs for which a family says that this one ``lacks`` a kernel; None without one."""
        triton = replace(self, backend="triton", compiler="triton", automatic=False)
        if self.automatic and self.backend == "cpp" and settings.interpreting_triton():
            return replace(triton, target=Target.parse("interpreter"))
        return triton if self.automatic and self.backend == "cuda" else None

    @functools.cached_property
    def layouts(self) -> Layouts:
        """Returns the layouts of quantised weights that kernels read. Groups by codes have mainloops of wgmma."""
        device = self.device
        hopper = self.target.arch == "sm_90a" and device.has_tensor_maps
        return Layouts(LAYOUTS[self.backend], hopper and device.dialect == "cuda" and not device.uses_cutlass)

    @property
    def device(self) -> Device:
        """Returns target, dialect and chip, which is all that a family may look at. A dialect has its backend's name,
        except that products by CUTLASS are in CUDA C++."""
        maps, cutlass = self.compiler != "load_inline", self.backend == "cutlass"
        dialect = "cuda" if cutlass else self.backend
        return Device(self.target, dialect, self.chip, self.batch_invariant, maps, self.bounded_waits, cutlass)


@dataclass(frozen=True)
class CallFacts:
    """Holds what a graph is lowered for: the sizes and the memory of one call.

    Attributes:
        environment: a value for every symbol (size or numeric argument) of the graph; its guards hold for them.
        memory: strides and alignment of every input.
        out: for each result, the memory of the caller's ``out=`` tensor; None where jitgen allocates the result.
    """

    environment: Mapping[str, Any]
    memory: Sequence[Memory]
    out: Sequence[Memory | None] = ()

    @property
    def caller_output(self) -> bool:
        """Returns whether the caller passes ``out=`` for some result."""
        return any(memory is not None for memory in self.out)


@dataclass(frozen=True)
class Partitioned:
    """Holds a graph partitioned into kernels.

    Attributes:
        program: the kernels and their buffers.
        guards: the conditions on sizes under which the program is valid: the trace's, and those that partitioning
            added.
        dialect: of its kernels.
        preferred: why this is not the dialect of the route's own backend; empty where it is.
    """

    program: Program
    guards: tuple[Guard, ...]
    dialect: str
    preferred: str = ""

    def applies_to(self, facts: CallFacts, device: Device) -> bool:
        """Returns whether partitioning again, for a call of these sizes and inputs, would give this program.

        A request key must not depend on which calls a process made before. So a program is reused only where it follows
        from the guards, from the families' recorded decisions and from how the inputs lie that they asked about; one
        that depends on the strides of the call it was made for otherwise is never reused.
        """
        program, environment = self.program, facts.environment
        return (
            program.general
            and self.dialect == device.dialect
            and not (facts.caller_output and program.returns_temporaries)
            and all(guard.holds(dict(environment)) for guard in self.guards)
            and all(question.at(facts.memory, environment) == answer for question, answer in program.lines)
            and all(
                registry.decision(family, question.at(environment), device) == decision
                for family, question, decision in program.decisions
            )
        )


def partition(graph: Graph, facts: CallFacts, device: Device) -> Partitioned:
    """Divides ``graph`` into kernels; each belongs to one family."""
    from jitgen.families.partition import program_of  # decorating a function does not need it

    guards = Guards(facts.environment, graph.guards)
    written = [None if memory is None else memory.view for memory in facts.out]
    program = program_of(graph, guards.decide, facts.environment, facts.memory, device, written)
    return Partitioned(program, tuple(guards), device.dialect)


@dataclass(frozen=True)
class LaidOut:
    """Describes the buffers of one call.

    Attributes:
        memories: strides and alignment of every buffer; results and temporaries as they will be allocated.
        layouts: for each kernel, one per region: the facts about strides that decide the source.
        geometries: for each kernel, one per region: the sizes and strides that a launch passes to it.
        aliases: for each output, its sizes and strides where it is an alias of another buffer, else None.
        read_elsewhere: for each result that the caller allocates, the inputs whose memory it must not be.
    """

    memories: tuple[Memory, ...]
    layouts: tuple[tuple[Any, ...], ...]
    geometries: tuple[tuple[Any, ...], ...]
    aliases: tuple[Strided | None, ...]
    read_elsewhere: tuple[frozenset[int], ...] = ()


def lay_out(program: Program, facts: CallFacts, device: Device) -> LaidOut:
    """Computes the memory of every buffer of ``program``, and the layouts and geometries of its kernels.

    Raises:
        NotViewable: no strides describe a view at these strides of its input, and the program has no copy there.
        UnsupportedError: elements of an argument that is updated in place share memory.
    """
    call, environment = call_of(program, facts, device), facts.environment
    memories = call.buffers
    resolved = [registry.family_of(kernel).layout(kernel, call) for kernel in program.kernels]
    aliases = tuple(
        None if isinstance(output, int) else locate(output.movements, memories[output.input].view, environment)
        for output in program.outputs
    )
    layouts, geometries = (tuple(pair[index] for pair in resolved) for index in (0, 1))
    owned = [position for position, memory in enumerate(facts.out) if memory is not None]
    elsewhere = tuple(read_elsewhere(program, environment, memories, position) for position in owned)
    return LaidOut(tuple(memories), layouts, geometries, aliases, elsewhere)


def call_of(program: Program, facts: CallFacts, device: Device) -> Call:
    """Returns the sizes of a call, and the memory of every buffer of ``program``."""
    return Call(facts.environment, _memories(program, facts), device.is_gpu)


def _memories(program: Program, facts: CallFacts) -> list[Memory]:
    environment, out = facts.environment, facts.out
    inputs = [m.view for m in facts.memory]
    memories = list(facts.memory)
    for buffer in program.temporaries:
        sizes = symbols.evaluated(buffer.shape, environment)
        memories.append(Memory(Strided(sizes, output_strides(sizes, ()))))
    updated = {position: index for index, position in program.mutated}
    for position, buffer in enumerate(program.results):
        sizes = symbols.evaluated(buffer.shape, environment)
        owned = out[position] if position < len(out) else None
        if position in updated:
            owned = facts.memory[updated[position]]
            overlap.refuse_repeated(program.name, updated[position], owned.view.sizes, owned.view.strides)
        like = ordered_like(sizes, buffer.contiguous, buffer.channels_last, inputs)
        memories.append(owned or Memory(Strided(sizes, output_strides(sizes, like))))
    return memories


def schedule(kernel: Kernel, layouts: tuple[Any, ...], geometries: tuple[Any, ...], device: Device) -> Choice:
    """Chooses the schedule of ``kernel``: the one of its family's candidates that was measured or estimated to be the
    best."""
    family = registry.family_of(kernel)
    return family.choose(family.problem(kernel, layouts, geometries, device), device)


@dataclass(frozen=True)
class Lowered:
    """Holds a graph lowered for the sizes and strides of one call, and for one route.

    Attributes:
        graph: the traced graph, with the guards that partitioning added.
        partitioned: the graph's partition into kernels, which calls of other sizes may reuse.
        program: the kernels of this call: those of ``partitioned``, except where its family rewrote a kernel.
        route: backend, compiler and target.
        laid_out: strides and alignment of the buffers of this call.
        choices: the schedule of each kernel. Graph, kernels, layouts, choices and route make the request key.
        environment: a value for every symbol of the graph.
        caller_output: whether the caller passes ``out=`` for some result.
    """

    graph: Graph
    partitioned: Partitioned
    program: Program
    route: Route
    laid_out: LaidOut
    choices: tuple[Choice, ...]
    environment: Mapping[str, Any] = field(repr=False, compare=False)
    caller_output: bool = False

    @property
    def memories(self) -> tuple[Memory, ...]:
        return self.laid_out.memories

    @property
    def layouts(self) -> tuple[tuple[Any, ...], ...]:
        return self.laid_out.layouts

    @functools.cached_property
    def schedules(self) -> tuple[Any, ...]:
        """Returns the schedule of each kernel."""
        return tuple(choice.schedule for choice in self.choices)

    @functools.cached_property
    def key(self) -> str:
        """Returns the request key. It is the same on another machine, in another directory and under another user."""
        return digest(self.ingredients)

    @functools.cached_property
    def ingredients(self) -> dict[str, Any]:
        """Returns the facts of which the request key is the digest."""
        device = self.route.device
        debug = {"bounded_waits": True} if self.route.bounded_waits else {}
        return debug | {
            "schema": SCHEMA,
            "code": code_digest(),
            "families": [(kernel.family, registry.family_of(kernel).fingerprint()) for kernel in self.program.kernels],
            "graph": graphs.to_json(self.graph),
            # What families made of the graph, which a family outside jitgen has a say in as well.
            "kernels": [kernel.digest for kernel in self.program.kernels],
            "layouts": plain(self.layouts),
            "schedules": plain(self.schedules),
            "tuned": [choice.row for choice in self.choices],
            "route": [self.route.backend, self.route.compiler, self.route.target.kind, self.route.target.arch],
            "chip": device.model.digest if device.is_gpu else None,
            "facts": numeric_facts(),
        }

    @property
    def is_empty(self) -> bool:
        """Returns whether no kernel has an element to compute: such a call launches no kernel and needs none
        compiled."""
        return not any(self.work(number).elements for number in range(len(self.program.kernels)))

    @functools.cached_property
    def settled(self) -> tuple[Any, ...]:
        """Returns the schedule of each kernel with what the sizes of this call decide; see ``Family.settle``."""
        kernels = zip(self.program.kernels, self.laid_out.geometries, self.schedules, strict=True)
        device = self.route.device
        return tuple(
            registry.family_of(k).settle(k, geometries, schedule, device) for k, geometries, schedule in kernels
        )

    def launch(self, number: int) -> LaunchShape:
        """Returns the grid, block and the like of a launch of kernel ``number``."""
        family, kernel, layouts, geometries, _ = self._kernel(number)
        return family.launch(kernel, layouts, geometries, self.settled[number], self.route.device)

    def arguments(self, number: int) -> Arguments:
        """Returns the arguments of a launch of kernel ``number``."""
        family, kernel, layouts, geometries, _ = self._kernel(number)
        return family.arguments(kernel, layouts, geometries, self.settled[number], self.route.device)

    def work(self, number: int) -> Work:
        """Counts the elements computed, bytes moved and operations done by a launch of kernel ``number``."""
        family, kernel, _, geometries, schedule = self._kernel(number)
        return family.work(kernel, geometries, schedule)

    def render(self, number: int) -> tuple[KernelSource, Rendered]:
        """Renders kernel ``number``; returns its source and the template line that each of its lines came from."""
        family, kernel, layouts, _, schedule = self._kernel(number)
        return family.render(kernel, layouts, schedule, self.route.device, self.route.compiler)

    @functools.cached_property
    def balance(self) -> Balance:
        """Compares what the kernels of this call move and compute with the least that the graph needs."""
        launched = [work for number in range(len(self.program.kernels)) if (work := self.work(number)).elements]
        moved, flops = sum(work.moved for work in launched), sum(work.flops - work.addressing for work in launched)
        needed = least(self.graph, self.environment)
        return Balance(len(launched), moved, flops, needed.moved, needed.flops)

    def identity(self, number: int) -> str:
        """Digests all that the source of kernel ``number`` follows from; equal kernels of a program have one."""
        _, kernel, layouts, _, schedule = self._kernel(number)
        return digest([kernel.identity, plain(layouts), plain(schedule), plain(self.route)])

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """Returns for each kernel the number of the first one that is equal to it, whose source it has."""
        numbers = range(len(self.program.kernels))
        if len(numbers) == 1:  # an identity is a digest of the whole kernel
            return (0,)
        firsts: dict[str, int] = {}
        return tuple(firsts.setdefault(self.identity(number), number) for number in numbers)

    def explain(self, number: int) -> list[str]:
        """Explains kernel ``number`` in words: a title, then one line for each detail."""
        family, kernel, layouts, _, schedule = self._kernel(number)
        row = self.choices[number].row
        measured = [f"its schedule was measured to be the best: row {row[:12]} of the tuned choices"] if row else []
        return [*family.explain(kernel, layouts, schedule, self.route.device), *measured]

    def _kernel(self, number: int) -> tuple[Family, Kernel, tuple[Any, ...], tuple[Any, ...], Any]:
        kernel, laid_out = self.program.kernels[number], self.laid_out
        return (
            registry.family_of(kernel),
            kernel,
            laid_out.layouts[number],
            laid_out.geometries[number],
            self.schedules[number],
        )

    def __str__(self) -> str:
        """Describes the specialisation in words: inputs, target, guards."""
        from jitgen.ir.assumptions import assumptions

        inputs = ", ".join(graphs.described_inputs(self.graph, {}))
        guards = "; ".join(assumptions(self.graph.guards))
        return f"({inputs}) for {self.route.target} by {self.route.backend}" + (f" where {guards}" if guards else "")
