"""Takes a call from a traced graph and its sizes to compiled kernels.

::

    lower(graph, sizes, strides) -> Lowered     what to compile; no compiler, no device, no disk
        partition   kernels: every family in turn claims the regions of the graph that it computes
        rewritten   kernels that do better as several at these sizes become several (split-K)
        lay_out     the strides and alignment of every buffer, results and temporaries included
        schedule    for each kernel, the best of its family's candidates (tile sizes, warps, ...): as it was
                    measured, if it was, else the cheapest by a model

    fetch(Lowered, store) -> BuiltKernels       by the request key, a digest of all that ``lower`` decided
        hit         the stored plan names one artifact for each kernel: nothing is rendered or compiled
        miss        build, or CacheMissError in strict mode

    build(Lowered, store) -> BuiltKernels       for each distinct kernel:
        render      template -> source text
        compile     source text -> cubin, hsaco or shared object
        store       the artifact, under its artifact key; after the last kernel, the plan that names them all

Neighbours: ``call/`` makes the graph from the arguments of a call, and the launcher from the compiled kernels. It
remembers the launcher, so a warm call does not come here. ``lowering.py`` holds the functions that ``lower`` calls,
``families/family.py`` says what a family answers, ``compilers/routes.py`` lists the compilers, ``store/`` is the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jitgen import console, events, misses, mistakes, scratch, settings
from jitgen.compilers import routes
from jitgen.errors import CacheMissError, CompileError, CompileWarning, JitgenError
from jitgen.families.rewrites import rewritten
from jitgen.ir import graph as graphs
from jitgen.ir.graph import Graph
from jitgen.ir.nodes import DEQUANTIZE
from jitgen.ir.program import Kernel
from jitgen.ir.views import Memory, NotViewable
from jitgen.lowering import CallFacts, Lowered, Partitioned, Route, call_of, lay_out, partition, schedule
from jitgen.spec import Artifact, KernelSource, artifact_key
from jitgen.store import Store, StoredArtifact

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.compilers.together import Compiled


def lower(
    graph: Graph,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    route: Route,
    out: Sequence[Memory | None] = (),
    known: Sequence[Partitioned] = (),
) -> Lowered:
    """Lowers ``graph`` for one call.

    Args:
        environment, memory, out: the sizes and the memory of the call, as ``CallFacts`` has them.
        route: backend, compiler and target. Its alternative is taken for a graph of which the backend lacks a kernel.
        known: how the graph was partitioned for earlier calls; the first that applies to this call is used.

    Raises:
        InternalError: there is a mistake in jitgen; see ``mistakes.py``.
    """

    facts = CallFacts(environment, memory, out)

    def fails(smaller: Graph) -> bool:
        try:
            _lower(smaller, CallFacts(environment, memory), route, ())
        except JitgenError:
            return False
        except Exception:
            return True
        return False

    with mistakes.reported(graph, "plan kernels for", fails):
        return _lower_by_either(graph, facts, route, known)


def _lower_by_either(graph: Graph, facts: CallFacts, route: Route, known: Sequence[Partitioned]) -> Lowered:
    """Lowers ``graph`` by ``route``, or by its alternative where that has a kernel that the route lacks."""
    lowered = _lower(graph, facts, route, known)
    other = route.alternative
    if other is None or not any(decision.lacks for _, _, decision in lowered.program.decisions):
        return lowered
    if DEQUANTIZE in graphs.kinds_of(graph.results):
        return lowered  # the layout of a quantised weight is that of the route's own backend
    by_other = _lower(graph, facts, other, known)
    for _, question, decision in lowered.program.decisions:
        if decision.lacks and any(q == question and d.fused for _, q, d in by_other.program.decisions):
            return replace(by_other, partitioned=replace(by_other.partitioned, preferred=decision.why))
    return lowered


def _lower(graph: Graph, facts: CallFacts, route: Route, known: Sequence[Partitioned]) -> Lowered:
    """Lowers ``graph`` by ``route`` itself."""
    for earlier in known:
        if earlier.applies_to(facts, route.device):
            try:
                return _lower_partitioned(graph, earlier, facts, route)
            except NotViewable:  # a reshape needs a copy at these strides; it needed none in the earlier calls
                break
    return _lower_partitioned(graph, partition(graph, facts, route.device), facts, route)


def _lower_partitioned(graph: Graph, partitioned: Partitioned, facts: CallFacts, route: Route) -> Lowered:
    device = route.device
    program = rewritten(partitioned.program, call_of(partitioned.program, facts, device), device)
    laid_out = lay_out(program, facts, device)
    choices = tuple(
        schedule(kernel, layouts, geometries, device)
        for kernel, layouts, geometries in zip(program.kernels, laid_out.layouts, laid_out.geometries, strict=True)
    )
    guarded = replace(graph, guards=partitioned.guards)
    return Lowered(guarded, partitioned, program, route, laid_out, choices, facts.environment, facts.caller_output)


def fetch(lowered: Lowered, store: Store, remedy: Callable[[], str | None] | None = None) -> tuple[BuiltKernel, ...]:
    """Returns the compiled kernels of ``lowered``: loaded from the store, or built and stored.

    Args:
        remedy: returns the command that would have built them, for a message; called where nothing may be compiled.

    Raises:
        CacheMissError: the store lacks one of them, and strict mode or ``freeze`` forbids compiling.
        CompileError: a source does not render or compile.
    """
    console.log(2, f"plan {lowered.key[:12]}: {lowered}")
    console.log(4, lambda: json.dumps(graphs.to_json(lowered.graph), indent=1))
    kernels = _from_store(lowered, store)
    if kernels is not None:
        console.log(1, f"from the store: {', '.join(kernel.name for kernel in kernels) or 'nothing to run'}")
        for kernel in kernels:
            _logged(kernel)
        _hold(lowered, kernels, store)
        return kernels
    if settings.is_strict():
        raise CacheMissError(f"{misses.described(lowered, store, remedy)}\n  nothing is compiled in strict mode")
    if settings.frozen():
        console.warn(f"compiled after freeze: {misses.described(lowered, store, remedy)}", CompileWarning, stacklevel=2)
    console.log(1, lambda: f"a miss: {misses.described(lowered, store)}")
    from jitgen import progress  # what only loads kernels need not have it

    with (
        progress.line(f"compiling {lowered.graph.name} for {lowered.route.target}") as say,
        store.single_flight(lowered.key) as flight,
    ):
        # Another process may have built the same kernels while this one waited. If that process hangs, what it has
        # begun is its own to publish.
        kernels = _from_store(lowered, store) or build(lowered, store, publish=flight.may_publish, say=say)
    _hold(lowered, kernels, store)
    return kernels


def _from_store(lowered: Lowered, store: Store) -> tuple[BuiltKernel, ...] | None:
    """Loads the kernels that the stored plan of ``lowered`` names; None if the plan or one of its artifacts is
    missing."""
    plan = store.get_plan(lowered.key)
    if plan is None or not _names_kernels(plan, lowered) or not _toolchains_match(plan, lowered.route):
        return None
    artifacts = [store.get_artifact(key) for key in plan["artifacts"]]
    if any(artifact is None for artifact in artifacts):
        return None
    return tuple(
        BuiltKernel(kernel, artifact, "store")  # type: ignore[arg-type]
        for kernel, artifact in zip(lowered.program.kernels, artifacts, strict=True)
    )


def _names_kernels(plan: Mapping[str, Any], lowered: Lowered) -> bool:
    """Returns whether a plan names an artifact for each kernel of ``lowered``. One that somebody sealed by hand may
    not."""
    return len(plan["artifacts"]) == len(lowered.program.kernels) and isinstance(plan.get("toolchains"), list)


def _hold(lowered: Lowered, kernels: Sequence[BuiltKernel], store: Store) -> None:
    """Keeps the store from removing what this process uses."""
    store.hold(lowered.key, *(kernel.key for kernel in kernels))


def _toolchains_match(plan: Mapping[str, Any], route: Route) -> bool:
    """Returns whether the plan's artifacts were built by the toolchain of this machine.

    True without a comparison in strict mode and where this machine has no toolchain: neither could compile a kernel
    again, so the stored artifacts are used as they are.
    """
    if settings.is_strict():
        return True
    here = routes.toolchain(route.backend, route.compiler)
    return here is None or str(here) in plan["toolchains"] or not plan["artifacts"]


def build(
    lowered: Lowered, store: Store, *, publish: bool = True, say: Callable[[str], None] = lambda text: None
) -> tuple[BuiltKernel, ...]:
    """Renders, compiles and stores every kernel of ``lowered``, and then the plan that names them.

    Args:
        publish: whether other processes are to find them; the store may be unable to tell them even so.
        say: is told how far it has come.
    """
    kernels = lowered.program.kernels
    made = _build_kernels(lowered, sorted(set(lowered.firsts)), store, publish, say)
    built = [replace(made[first], kernel=kernel) for first, kernel in zip(lowered.firsts, kernels, strict=True)]
    plan = {
        "name": lowered.graph.name,
        "artifacts": [kernel.artifact.key for kernel in built],
        "toolchains": sorted({str(kernel.artifact.meta["toolchain"]) for kernel in built}),
        "target": str(lowered.route.target),
        "backend": lowered.route.backend,
        "compiler": lowered.route.compiler,
        "specialization": str(lowered),
        "ingredients": misses.ingredients(lowered),
    }
    store.keep_plan(lowered.key, plan, publish=publish)
    return tuple(built)


def _build_kernels(
    lowered: Lowered, numbers: Sequence[int], store: Store, publish: bool, say: Callable[[str], None]
) -> dict[int, BuiltKernel]:
    """Renders the kernels of these numbers; compiles and stores those of which the store has no equal one."""
    from jitgen.compilers import together

    made: dict[int, BuiltKernel] = {}
    missing: dict[str, list[tuple[int, KernelSource, Rendered]]] = {}
    for number in numbers:
        with mistakes.reported(lowered.graph, "generate a kernel for"):
            source, rendered = lowered.render(number)
        source = routes.prepare(source)  # with the compiler's own flags, which are part of the artifact key
        known = _known_artifact(source, store)
        if known is None:
            missing.setdefault(source.name, []).append((number, source, rendered))
        else:
            console.log(1, f"{source.described}: the store has an equal kernel: {known.key}")
            made[number] = _logged(BuiltKernel(lowered.program.kernels[number], known, "store"))
    alike = [*missing.values()]
    for index, compiled in together.compile_all([source for (_, source, _), *_ in alike]):
        (number, source, rendered), *_ = alike[index]
        if isinstance(compiled.result, CompileError):
            error = compiled.result
            raise rendered.explain(error, error.path or write_failed_source(source)) from None
        stored = _kept(lowered.program.kernels[number].name, source, compiled, store, publish)
        for number, _, _ in alike[index]:
            made[number] = _logged(BuiltKernel(lowered.program.kernels[number], stored, "compiled"))
        say(f"{len(made)} of {len(numbers)} kernels")
    return made


def _kept(name: str, source: KernelSource, compiled: Compiled, store: Store, publish: bool) -> StoredArtifact:
    """Stores what was compiled, and tells of it."""
    artifact, seconds, target = compiled.result, compiled.seconds, str(source.target)
    assert isinstance(artifact, Artifact)
    stored = store.keep_artifact(artifact, publish=publish)
    events.publish(events.CompileEvent(name, source.name, target, source.compiler, artifact.key, seconds))
    console.log(1, f"compiled {source.described} for {target} by {source.compiler} in {seconds:.3f} s: {artifact.key}")
    return stored


def _logged(kernel: BuiltKernel) -> BuiltKernel:
    console.log(3, lambda: kernel.source)
    return kernel


@dataclass(frozen=True)
class BuiltKernel:
    """Describes a compiled kernel and where it came from.

    Attributes:
        kernel: the kernel as the program describes it.
        artifact: its entry in the store: source, binary and ``meta.json``.
        origin: ``"compiled"`` where this process compiled it, ``"store"`` where it was found in the store.
    """

    kernel: Kernel
    artifact: StoredArtifact
    origin: str

    def __repr__(self) -> str:
        return f"BuiltKernel({self.name}, entry={self.entry}, key={self.key[:12]}, origin={self.origin!r})"

    @property
    def name(self) -> str:
        """Returns the kernel's name in its function."""
        return self.kernel.name

    @property
    def entry(self) -> str:
        """Returns its symbol in the binary, which is what profilers show; equal kernels have the same."""
        return str(self.artifact.meta["entry"])

    @property
    def key(self) -> str:
        """Returns the artifact key."""
        return self.artifact.key

    @property
    def source(self) -> str:
        """Returns the generated source, as the store has it."""
        (name,) = (name for name in self.artifact.files if name in ("kernel.cpp", "kernel.cu", "kernel.py"))
        return self.artifact.text(name)


def _known_artifact(source: KernelSource, store: Store) -> StoredArtifact | None:
    """Returns the stored artifact of exactly this source, if an equal kernel of any plan was compiled."""
    tools = routes.toolchain_of(source)
    return store.get_artifact(artifact_key(source, tools)) if tools is not None else None


def write_failed_source(source: KernelSource) -> str | None:
    """Writes a source that does not compile to a temporary directory, for the user to read; returns its path, if it
    could."""
    name = f"kernel{ {'cpp': '.cpp', 'cuda': '.cu', 'triton': '.py'}[source.language] }"
    return scratch.keep(name, source.text)
