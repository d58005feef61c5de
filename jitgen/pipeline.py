"""The path of a call, on one screen: trace, request key, plan, launch; on a miss also lower, render, compile, store.

::

    specialize   arguments -> Specialization      trace once per dtype, rank, and guarded fact
    lower        Specialization -> Lowered        program, layouts, schedules: what a plan is keyed by
    fetch        Lowered -> kernels               from memory, from the store, or
    build          render -> compile -> store       (never in strict mode)

Everything above ``fetch`` is plain Python over frozen values: no Jinja, no compiler, no device. ``api.py`` is the only
caller; ``runtime/launcher.py`` is what it hands the result to.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitgen import debug, events, families, settings
from jitgen.compile import routes
from jitgen.errors import CacheMissError, CompileError, UnsupportedError
from jitgen.families.layout import LaunchArguments, Memory, locate, output_strides
from jitgen.ir import graph as graphs
from jitgen.ir import split, symbols
from jitgen.ir.contractions import Decision, Prologue
from jitgen.ir.cut import program_of
from jitgen.ir.graph import Graph, Guard
from jitgen.ir.program import Kernel, Program
from jitgen.ir.views import NotViewable, Strided
from jitgen.spec import SCHEMA, KernelSource, Target, artifact_key, digest, e4m3fn_saturates
from jitgen.store import Store, StoredArtifact
from jitgen.trace.guards import Guards

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered


# ------------------------------------------------------------------------------------------------------- lowering


@dataclass(frozen=True)
class Route:
    """How kernels are made: backend, compiler and target."""

    backend: str
    compiler: str
    target: Target

    @property
    def tiled(self) -> bool:
        """Whether a launch is a grid of tiles."""
        return self.target.kind != "cpu"


@dataclass(frozen=True)
class Lowered:
    """A graph made concrete for one call's strides, for one route.

    Attributes:
        graph: with every guard that lowering added.
        cut: how the graph was cut, for calls of other sizes too.
        program: the kernels and buffers of this call: those of ``cut``, or these with products split along K.
        layouts, schedules: for each kernel; with the graph and the route they make the request key.
        geometries: for each kernel: this call's sizes and strides.
        memories: for each buffer: where it lies, results and temporaries as they will be allocated.
        aliases: for each output that is a view of an input, its strided memory.
        given: whether the results' memory is the caller's.
    """

    graph: Graph
    cut: Cut
    program: Program
    route: Route
    layouts: tuple[tuple[Any, ...], ...]
    schedules: tuple[Any, ...]
    geometries: tuple[tuple[Any, ...], ...]
    memories: tuple[Memory, ...]
    aliases: tuple[Strided | None, ...]
    given: bool = False

    @functools.cached_property
    def key(self) -> str:
        """The request key: the same on another machine, in another directory, under another user."""
        return digest(
            {
                "schema": SCHEMA,
                "code": code_digest(),
                "graph": graphs.to_json(self.graph),
                "layouts": [[_plain(layout) for layout in kernel] for kernel in self.layouts],
                "schedules": [_plain(schedule) for schedule in self.schedules],
                "route": [self.route.backend, self.route.compiler, self.route.target.kind, self.route.target.arch],
                "facts": numeric_facts(),
            }
        )

    @property
    def is_empty(self) -> bool:
        """Whether no kernel has an element to compute, so that a call launches nothing and needs none."""
        return not any(self.arguments(number).elements for number in range(len(self.program.kernels)))

    def arguments(self, kernel: int) -> LaunchArguments:
        return families.of(self.program.kernels[kernel]).launch_arguments(
            self.program.kernels[kernel],
            self.layouts[kernel],
            self.geometries[kernel],
            self.schedules[kernel],
            self.route.tiled,
        )

    def render(self, kernel: int) -> tuple[KernelSource, Rendered]:
        return families.of(self.program.kernels[kernel]).source(
            self.program.kernels[kernel],
            self.layouts[kernel],
            self.schedules[kernel],
            self.route.backend,
            self.route.compiler,
            self.route.target,
        )


def _plain(value: Any) -> Any:
    """``value`` in lists, where it is a dataclass or a tuple."""
    if dataclasses.is_dataclass(value):
        return [_plain(part) for part in vars(value).values()]
    return list(value) if isinstance(value, tuple) else value


def numeric_facts() -> dict[str, bool]:
    """What of the installed torch decides results."""
    return {"e4m3fn_saturates": e4m3fn_saturates()}


@dataclass(frozen=True)
class Cut:
    """A graph cut into kernels, and the guards under which it is: the trace's, and what cutting decided."""

    program: Program
    guards: tuple[Guard, ...]

    def serves(self, environment: Mapping[str, Any], given: bool, prologue: Callable[[Prologue], Decision]) -> bool:
        """Whether a call of these sizes would be cut alike.

        A request key must be the same in every process, whatever calls were before this one. So only what follows from
        the guards is shared between calls; what was cut for the strides of one call serves that call alone.
        """
        program = self.program
        return (
            program.general
            and not (given and program.returns_temporaries)
            and all(guard.holds(dict(environment)) for guard in self.guards)
            and program.decides_alike(prologue, environment)
        )


def lower(
    graph: Graph,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    route: Route,
    out: Sequence[Memory | None] = (),
    known: Sequence[Cut] = (),
) -> Lowered:
    """Cut ``graph`` into kernels and lay them out for one call.

    Args:
        environment: a value for every symbol; the graph's guards hold.
        memory: of every input.
        out: of results the caller gives; None where jitgen allocates.
        known: how the graph was cut for other calls.
    """
    given = any(place is not None for place in out)
    prologue = functools.partial(families.prologue, target=route.target, backend=route.backend)

    def anew() -> Cut:
        guards = Guards(environment, graph.guards)
        views = [place.view for place in memory]
        blocks = families.row_blocks(route.target, route.backend)
        program = program_of(
            graph, guards.decide, environment, views, prologue=prologue, given=given, row_blocks=blocks
        )
        return Cut(program, tuple(guards))

    cut = next((earlier for earlier in known if earlier.serves(environment, given, prologue)), None) or anew()
    try:
        laid_out = _lay_out(cut.program, environment, memory, out, route.tiled)
    except NotViewable:
        cut = anew()
        laid_out = _lay_out(cut.program, environment, memory, out, route.tiled)
    program, schedules = cut.program, _schedules(cut.program, laid_out, route)
    parts = [getattr(schedule, "parts", 1) for schedule in schedules]
    if max(parts, default=1) > 1:
        program = split.split(program, parts)
        laid_out = _lay_out(program, environment, memory, out, route.tiled)
        schedules = _schedules(program, laid_out, route)
        again = [getattr(schedule, "parts", 1) for schedule in schedules]
        assert [count for count in again if count > 1] == [count for count in parts if count > 1]
    memories, layouts, geometries, aliases = laid_out
    graph = replace(graph, guards=cut.guards)
    return Lowered(graph, cut, program, route, layouts, schedules, geometries, memories, aliases, given)


def _schedules(program: Program, laid_out: LaidOut, route: Route) -> tuple[Any, ...]:
    _, layouts, geometries, _ = laid_out
    return tuple(
        families.of(kernel).schedule(kernel, layout, geometry, route.target, route.backend)
        for kernel, layout, geometry in zip(program.kernels, layouts, geometries, strict=True)
    )


LaidOut = tuple[
    tuple[Memory, ...], tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...], tuple[Strided | None, ...]
]
"""Memories, layouts, geometries and aliases, as ``Lowered`` has them."""


def _lay_out(
    program: Program,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    out: Sequence[Memory | None],
    accesses: bool,
) -> LaidOut:
    inputs = [m.view for m in memory]
    memories = list(memory)
    for buffer in program.temporaries:
        sizes = tuple(symbols.evaluate(size, environment) for size in buffer.shape)
        memories.append(Memory(Strided(sizes, output_strides(sizes, ()))))
    updated = {position: index for index, position in program.mutated}
    for position, buffer in enumerate(program.results):
        sizes = tuple(symbols.evaluate(size, environment) for size in buffer.shape)
        given = out[position] if position < len(out) else None
        if position in updated:
            given = memory[updated[position]]
            if any(size > 1 and not step for size, step in zip(given.view.sizes, given.view.strides, strict=True)):
                raise UnsupportedError(
                    f"{program.name}: argument {updated[position]} is updated in place, but several of its elements "
                    "share memory (an expanded tensor); clone it first"
                )
        memories.append(given or Memory(Strided(sizes, output_strides(sizes, () if buffer.contiguous else inputs))))
    resolved = [families.of(kernel).resolve(kernel, environment, memories, accesses) for kernel in program.kernels]
    aliases = tuple(
        None if isinstance(output, int) else locate(output.movements, memories[output.input].view, environment)
        for output in program.outputs
    )
    return (
        tuple(memories),
        tuple(layout for layout, _ in resolved),
        tuple(geometry for _, geometry in resolved),
        aliases,
    )


# --------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class BuiltKernel:
    """A compiled kernel and where it came from.

    Attributes:
        kernel: what it computes.
        artifact: its files in the store: source, binary, ``meta.json``.
        origin: ``"compiled"`` by this process, or ``"store"``.
    """

    kernel: Kernel
    artifact: StoredArtifact
    origin: str

    def __repr__(self) -> str:
        return f"BuiltKernel({self.name}, key={self.key[:12]}, origin={self.origin!r})"

    @property
    def name(self) -> str:
        """Its entry symbol."""
        return str(self.artifact.meta["entry"])

    @property
    def key(self) -> str:
        """Its artifact key."""
        return self.artifact.key


def fetch(lowered: Lowered, store: Store) -> tuple[BuiltKernel, ...]:
    """The compiled kernels of ``lowered``: from the store, else built and stored."""
    debug.log(2, f"plan {lowered.key[:12]}: {describe(lowered)}")
    debug.log(4, lambda: json.dumps(graphs.to_json(lowered.graph), indent=1))
    found = _from_store(lowered, store)
    if found is not None:
        debug.log(1, f"from the store: {', '.join(kernel.name for kernel in found) or 'nothing to run'}")
        return found
    if settings.is_strict():
        raise CacheMissError(
            f"{lowered.graph.name}: no kernel in {store.root} for {describe(lowered)}\n"
            f"  strict mode compiles nothing; prewarm this specialisation, or see `jitgen cache why {lowered.key}`"
        )
    with store.single_flight(lowered.key):
        return _from_store(lowered, store) or build(lowered, store)


def _from_store(lowered: Lowered, store: Store) -> tuple[BuiltKernel, ...] | None:
    plan = store.get_plan(lowered.key)
    if plan is None or not _toolchains_match(plan, lowered.route):
        return None
    artifacts = [store.get_artifact(key) for key in plan["artifacts"]]
    if any(artifact is None for artifact in artifacts):
        return None
    return tuple(
        BuiltKernel(kernel, artifact, "store")  # type: ignore[arg-type]
        for kernel, artifact in zip(lowered.program.kernels, artifacts, strict=True)
    )


def _toolchains_match(plan: Mapping[str, Any], route: Route) -> bool:
    """Whether this machine's toolchain would make the same; one that is absent, and strict serving, may not ask."""
    if settings.is_strict():
        return True
    here = routes.toolchain(route.backend, route.compiler)
    return here is None or str(here) in plan["toolchains"] or not plan["artifacts"]


def build(lowered: Lowered, store: Store) -> tuple[BuiltKernel, ...]:
    """Render, compile and store every kernel of ``lowered``, and then the plan that names them."""
    built = []
    compiler = routes.module(lowered.route.backend, lowered.route.compiler)
    for number, kernel in enumerate(lowered.program.kernels):
        source, rendered = lowered.render(number)
        source = routes.prepare(source)
        known = _known_artifact(source, store)
        if known is not None:
            debug.log(1, f"{source.name}: another specialisation's kernel is the same: {known.key}")
            built.append(BuiltKernel(kernel, known, "store"))
            continue
        started = time.perf_counter()
        try:
            artifact = compiler.compile(source)
        except CompileError as error:
            raise rendered.explain(error, keep_source(source)) from None
        seconds = time.perf_counter() - started
        stored = store.put_artifact(artifact)
        events.publish(events.CompileEvent(source.name, str(source.target), source.compiler, artifact.key, seconds))
        debug.log(
            1, f"compiled {source.name} for {source.target} by {source.compiler} in {seconds:.3f} s: {artifact.key}"
        )
        debug.log(3, source.text)
        built.append(BuiltKernel(kernel, stored, "compiled"))
    plan = {
        "name": lowered.graph.name,
        "artifacts": [kernel.artifact.key for kernel in built],
        "toolchains": sorted({str(kernel.artifact.meta["toolchain"]) for kernel in built}),
        "target": str(lowered.route.target),
        "backend": lowered.route.backend,
        "compiler": lowered.route.compiler,
        "specialization": describe(lowered),
    }
    store.put_plan(lowered.key, plan)
    return tuple(built)


def _known_artifact(source: KernelSource, store: Store) -> StoredArtifact | None:
    """The artifact of exactly this source, where another plan's kernel made it."""
    tools = routes.toolchain_of(source)
    return store.get_artifact(artifact_key(source, tools)) if tools is not None else None


def keep_source(source: KernelSource) -> str:
    """Where a source that does not compile is kept for reading."""
    directory = Path(tempfile.mkdtemp(prefix="jitgen-failed-"))
    path = directory / f"kernel{ {'cpp': '.cpp', 'cuda': '.cu', 'triton': '.py'}[source.language] }"
    path.write_text(source.text)
    return str(path)


def describe(lowered: Lowered) -> str:
    """The specialisation in words: inputs, guards, target."""
    inputs = ", ".join(graphs.described_inputs(lowered.graph, {}))
    guards = "; ".join(map(str, lowered.graph.guards))
    return f"({inputs}) for {lowered.route.target} by {lowered.route.backend}" + (f" where {guards}" if guards else "")


# ------------------------------------------------------------------------------------------------- code and store


@functools.cache
def code_digest() -> str:
    """sha256 over jitgen's own code and templates: whatever may change what a request generates."""
    from jitgen._data import templates_directory

    package = Path(__file__).parent
    total = hashlib.sha256()
    for root, pattern in ((package, "*.py"), (package / "compile", "*.hpp"), (templates_directory(), "*")):
        for path in sorted(root.rglob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not name.startswith(_NOT_CODE) and "__pycache__" not in name:
                total.update(f"{name}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


_NOT_CODE = ("cli/", "bench/", "_data/", "store/", "__main__")
"""Parts of the package that have no say in what is generated."""


_stores: dict[Any, Store] = {}


def default_store() -> Store:
    """The store the settings name; where it cannot be written, a temporary one in front of it, with a warning."""
    wanted = (settings.get("JITGEN_CACHE_DIR"), settings.get("JITGEN_CACHE_PATH"))
    store = _stores.get(wanted)
    if store is None:
        store = Store.open()
        if not store.writable and not settings.is_strict():
            warnings.warn(
                f"the store {store.root} cannot be written: what is compiled now is kept for this process only. "
                "Set JITGEN_CACHE_DIR to a directory you own",
                stacklevel=2,
            )
            store = Store.open(tempfile.mkdtemp(prefix="jitgen-store-"), layers=[store.root, *store.layers])
        _stores[wanted] = store
    return store
