"""Recording which specialisations a program meets, and building them elsewhere, before it is deployed.

A manifest is JSON and self-contained: each entry holds a function's graph (``ir/graph.py``), the sizes, strides and
alignments of its tensors, and the backend. It names no device and no target and needs none of the user's code, so a
build machine without a GPU makes the very kernels, under the very keys, that the deployed program will ask for.
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

from jitgen import pipeline, row_buckets, settings
from jitgen.compile import routes
from jitgen.errors import CompileError, JitgenError, UnsupportedError
from jitgen.families.layout import Memory
from jitgen.ir import graph as graphs
from jitgen.ir.views import Strided
from jitgen.pipeline import Lowered, Route
from jitgen.spec import SCHEMA, Target, digest
from jitgen.store import Store
from jitgen.trace.guards import Guards

# ------------------------------------------------------------------------------------------------------- recording

_lock = threading.Lock()
_recorders: list[dict[str, Any]] = []


def note(name: str, lowered: Lowered, environment: Mapping[str, Any], memory: Sequence[Memory]) -> None:
    """Tell whoever is recording that a specialisation was met."""
    path = settings.get("JITGEN_RECORD")
    if path and not any(recorder.get("path") == path for recorder in _recorders):
        _record_until_exit(path)
    if not _recorders:
        return
    inputs = len(lowered.program.inputs)
    given = lowered.memories[inputs + len(lowered.program.temporaries) :] if lowered.given else ()
    entry = {
        "name": name,
        "graph": graphs.to_json(lowered.graph),
        "environment": dict(environment),
        "inputs": [_memory_to_json(place) for place in memory],
        "results": [_memory_to_json(place) for place in given],
        "backend": lowered.route.backend,
        "compiler": lowered.route.compiler,
        "kind": "cpu" if lowered.route.target.kind == "cpu" else "gpu",
        "layouts": digest([[list(map(str, vars(part).values())) for part in kernel] for kernel in lowered.layouts]),
    }
    identity = digest([entry["graph"], entry["layouts"], entry["backend"], entry["compiler"], entry["kind"]])
    with _lock:
        for recorder in _recorders:
            recorder["entries"].setdefault(identity, entry)


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
            identity = digest([entry[part] for part in ("graph", "layouts", "backend", "compiler", "kind")])
            entries.setdefault(identity, entry)
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
        targets: such as ``["sm_90a", "x86-64-v4"]``; an entry recorded on a GPU is skipped for CPU targets and the
            other way round.
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
    kind = "cpu" if target.kind == "cpu" else "gpu"
    if kind != entry["kind"]:
        return Prewarmed(name, str(target), "", "skipped", f"recorded on a {entry['kind']}")
    try:
        lowered = relower(entry, target)
        kernels = pipeline.fetch(lowered, store)
    except (CompileError, UnsupportedError) as error:
        return Prewarmed(name, str(target), "", "failed", str(error))
    if store.get_plan(lowered.key) is None:
        return Prewarmed(name, str(target), lowered.key, "failed", "it is not in the store after it was written")
    origin = "compiled" if any(kernel.origin == "compiled" for kernel in kernels) else "store"
    return Prewarmed(name, str(target), lowered.key, origin)


def relower(entry: Mapping[str, Any], target: Target) -> Lowered:
    """A recorded specialisation, lowered for ``target``."""
    routes.check(entry["backend"], entry["compiler"], target)
    graph = graphs.from_json(entry["graph"])
    guards = Guards(entry["environment"])
    for guard in graph.guards:
        guards.value(guard.expr)
    memory = [_memory_from_json(place) for place in entry["inputs"]]
    results = [_memory_from_json(place) for place in entry["results"]]
    route = Route(entry["backend"], entry["compiler"], target)
    return pipeline.lower(graph, guards, memory, route, results)
