"""Recording which specialisations a program meets, and building them elsewhere, before it is deployed.

A manifest is JSON and self-contained: each entry holds a function's graph (``ir/graph.py``), the sizes, strides and
alignments of its tensors, and the backend the user asked for, mostly ``"auto"``. It names no device, no target and no
layout of quantised weights, and needs none of the user's code: what was recorded on a laptop's CPU is built for a GPU
on a machine that has none, and the kernels are the very ones, under the very keys, that the deployed program asks for.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitgen import pipeline, row_buckets, settings, weights
from jitgen.compile import routes
from jitgen.errors import CompileError, JitgenError, UnsupportedError
from jitgen.families.layout import Memory
from jitgen.ir import graph as graphs
from jitgen.ir.graph import Graph
from jitgen.ir.views import Strided
from jitgen.pipeline import Lowered, Route
from jitgen.spec import SCHEMA, Target, digest
from jitgen.store import Store
from jitgen.trace.guards import Guards
from jitgen.weight_layouts import relaid

# ------------------------------------------------------------------------------------------------------- recording

_lock = threading.Lock()
_recorders: list[dict[str, Any]] = []


def recording() -> bool:
    """Whether anybody is: specialisations are to be told then, by ``note``."""
    path = settings.get("JITGEN_RECORD")
    if path and not any(recorder.get("path") == path for recorder in _recorders):
        _record_until_exit(path)
    return bool(_recorders)


def note(
    graph: Graph,
    lowered: Lowered,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    requested: tuple[str, str | None],
) -> None:
    """Tell whoever is recording of a specialisation.

    Args:
        graph: as it was traced, without what lowering for this machine added.
        lowered: for this machine.
        environment: a value for every symbol. memory: of every input.
        requested: backend, possibly ``"auto"``, and compiler, if one was asked for.
    """
    inputs = len(lowered.program.inputs)
    given = lowered.memories[inputs + len(lowered.program.temporaries) :] if lowered.given else ()
    portable = relaid(graph, environment, memory, "portable")
    entry = {
        "name": graph.name,
        "graph": graphs.to_json(portable.graph),
        "environment": dict(portable.environment),
        "inputs": [_memory_to_json(place) for place in portable.memory],
        "results": [_memory_to_json(place) for place in given],
        "backend": requested[0],
        "compiler": requested[1],
        "layouts": digest([[list(map(str, vars(part).values())) for part in kernel] for kernel in lowered.layouts]),
    }
    with _lock:
        for recorder in _recorders:
            recorder["entries"].setdefault(_identity(entry), entry)


def _identity(entry: Mapping[str, Any]) -> str:
    return digest([entry[part] for part in ("graph", "layouts", "backend", "compiler")])


def _memory_to_json(memory: Memory) -> dict[str, Any]:
    view = memory.view
    return {"sizes": list(view.sizes), "strides": list(view.strides), "alignment": memory.alignment}


def _memory_from_json(data: Mapping[str, Any]) -> Memory:
    return Memory(Strided(tuple(data["sizes"]), tuple(data["strides"])), data["alignment"])


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within this context every specialisation met is written to the manifest ``path`` (merged with one already there).

    Specialisations bound before the context are met again only when a new signature or layout comes; start recording
    before the first call. Also ``JITGEN_RECORD=path`` for a whole process.
    """
    recorder: dict[str, Any] = {"path": os.fspath(path), "entries": {}}
    with _lock:
        _recorders.append(recorder)
    try:
        yield
    finally:
        with _lock:
            _recorders.remove(recorder)
        _write(recorder)


def _record_until_exit(path: str) -> None:
    recorder: dict[str, Any] = {"path": path, "entries": {}}
    with _lock:
        _recorders.append(recorder)
    atexit.register(_write, recorder)


def _write(recorder: Mapping[str, Any]) -> None:
    path = Path(recorder["path"])
    entries = dict(recorder["entries"])
    if path.exists():
        for entry in _read(path):
            entries.setdefault(_identity(entry), entry)
    content = {"schema": SCHEMA, "entries": [entries[identity] for identity in sorted(entries)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        json.dump(content, file, indent=1)
    os.replace(temporary, path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise JitgenError(f"{path} is a manifest of schema {content['schema']}; this jitgen reads {SCHEMA}")
        return content["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JitgenError(f"{path} is not a readable manifest: {error}; record it again") from None


# -------------------------------------------------------------------------------------------------------- prewarming


@dataclass(frozen=True)
class Prewarmed:
    """One specialisation for one target.

    ``origin`` is ``"compiled"`` or ``"store"``; ``"skipped"`` or ``"failed"`` with the reason as ``detail``.
    """

    name: str
    target: str
    key: str
    origin: str
    detail: str = ""


@dataclass(frozen=True)
class PrewarmReport:
    """What ``prewarm`` did.

    Attributes:
        entries: one for each specialisation and target.
    """

    entries: tuple[Prewarmed, ...]

    def count(self, origin: str) -> int:
        return sum(entry.origin == origin for entry in self.entries)

    def __str__(self) -> str:
        return ", ".join(f"{self.count(origin)} {origin}" for origin in ("compiled", "store", "skipped", "failed"))


def prewarm(
    manifest: str | os.PathLike[str], targets: Sequence[str | Target], jobs: int = 1, store: Store | None = None
) -> PrewarmReport:
    """Put every specialisation of ``manifest`` into the store, for every one of ``targets``. Needs no GPU.

    Args:
        manifest: a file that ``record`` wrote.
        targets: such as ``["sm_90a", "x86-64-v4"]``; an entry whose function asks for a backend by name is skipped
            for targets which that backend does not serve.
        jobs: kernels compiled at a time.
        store: where to; the default store if None.

    Raises:
        JitgenError: the manifest is unreadable, names no specialisation for some target, or anything is missing from
            the store afterwards; the message lists what, and the report is its ``report``.
    """
    from concurrent.futures import ThreadPoolExecutor

    where = store or pipeline.default_store()
    wanted = [
        (variant, Target.parse(target))
        for entry in _read(Path(manifest))
        for variant in row_buckets.variants(entry)
        for target in targets
    ]
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        done = list(pool.map(lambda pair: _prewarm_one(pair[0], pair[1], where), wanted))
    report = PrewarmReport(tuple(done))
    failed = [entry for entry in report.entries if entry.origin == "failed"]
    served = {entry.target for entry in report.entries if entry.origin != "skipped"}
    idle = [target for target in map(str, map(Target.parse, targets)) if target not in served]
    if failed or idle:
        parts = [f"{entry.name} for {entry.target}: {entry.detail}" for entry in failed]
        parts += [f"nothing in {manifest} is for {target}" for target in idle]
        error = JitgenError("prewarm is incomplete:\n  " + "\n  ".join(parts))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def _prewarm_one(entry: Mapping[str, Any], target: Target, store: Store) -> Prewarmed:
    name = entry["name"]
    try:
        route = _route(entry, target)
    except UnsupportedError as error:
        return Prewarmed(name, str(target), "", "skipped", str(error))
    try:
        lowered = relower(entry, route)
        kernels = pipeline.fetch(lowered, store)
    except (CompileError, UnsupportedError) as error:
        return Prewarmed(name, str(target), "", "failed", str(error))
    if store.get_plan(lowered.key) is None:
        return Prewarmed(name, str(target), lowered.key, "failed", "it is not in the store after it was written")
    origin = "compiled" if any(kernel.origin == "compiled" for kernel in kernels) else "store"
    return Prewarmed(name, str(target), lowered.key, origin)


def _route(entry: Mapping[str, Any], target: Target) -> Route:
    """What ``target`` takes of an entry; UnsupportedError where its function's backend does not serve that."""
    backend = routes.backend_for(entry["backend"], target.kind)
    compiler = entry["compiler"] or routes.default_compiler(backend)
    routes.check(backend, compiler, target)
    return Route(backend, compiler, target)


def relower(entry: Mapping[str, Any], route: Route) -> Lowered:
    """A recorded specialisation, lowered as a process on that target would."""
    memory = [_memory_from_json(place) for place in entry["inputs"]]
    results = [_memory_from_json(place) for place in entry["results"]]
    found = relaid(graphs.from_json(entry["graph"]), entry["environment"], memory, weights.LAYOUTS[route.backend])
    guards = Guards(found.environment)
    for guard in found.graph.guards:
        guards.value(guard.expr)
    return pipeline.lower(found.graph, guards, found.memory, route, results)
