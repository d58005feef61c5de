"""Builds one kernel of a prewarm, as a function of plain data: what a worker process, or another machine, is given.

``build`` takes JSON and returns JSON, so that any ``concurrent.futures.Executor`` can carry it: ``prewarm`` calls it in
its own process, in worker processes (``workers``), or in those of an executor that the caller has.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from jitgen import events, pipeline
from jitgen.compilers import routes, together
from jitgen.deploy import manifest as manifests
from jitgen.deploy import manifest_schema
from jitgen.deploy.manifest import Entry
from jitgen.errors import JitgenError, UnsupportedError
from jitgen.families import registry
from jitgen.lowering import Route
from jitgen.runtime import cpu
from jitgen.schedule import chips, tuned
from jitgen.spec import Target, runs_here
from jitgen.store import Store, StoredArtifact
from jitgen.store.default import default_store

Task = Mapping[str, Any]
"""``entry``: of a manifest; ``route``: names of backend, compiler and target; ``store``: see ``location_of``;
``families``: modules of families outside jitgen. A task of ``tune`` also has the ``chip`` and, as ``trial``, the name
of a family and the row of the schedule that is tried."""

Outcome = Mapping[str, Any]
"""``key``: the request key; ``origin`` and ``detail`` as in ``prewarm.Prewarmed``; ``seconds``; ``events``: the fields
of each ``CompileEvent``; ``process``: ``PROCESS`` where it was built."""

PROCESS = uuid.uuid4().hex
"""The identity of this process among those of all machines. Its own subscribers hear of what it compiles without being
told again."""

_ELF = b"\x7fELF"


def route_of(entry: Entry, target: Target, chip: Any = None) -> Route:
    """Returns the route that ``target`` takes for an entry; UnsupportedError if the function's backend does not serve
    it."""
    backend = routes.backend_for(entry["backend"], target.kind)
    compiler = entry["compiler"] or routes.default_compiler(backend)
    routes.check(backend, compiler, target)
    automatic = entry["backend"] == "auto" and entry["compiler"] is None
    return Route(backend, compiler, target, chip, entry.get("batch_invariant", False), automatic)


def task_of(entry: Entry, route: Route, location: Mapping[str, Any], families: Sequence[str]) -> Task:
    """Returns the task that builds ``entry`` by ``route``, in the store at ``location``."""
    names = [route.backend, route.compiler, str(route.target), route.batch_invariant, route.automatic]
    return {"entry": entry, "route": names, "store": location, "families": list(families)}


def location_of(store: Store, *, shared_directory: bool) -> dict[str, Any]:
    """Returns where a worker builds, so that ``store`` has it afterwards.

    Args:
        shared_directory: whether the worker sees the directory of ``store`` under the same path. A worker that does
            not builds into a store of its own, and shares what it built through the remote.
    """
    root = str(store.root) if shared_directory else None
    return {"root": root, "layers": list(map(str, store.layers)) if root else [], "remote": store.remote}


def build(task: Task) -> Outcome:
    """Puts the kernels of one task into its store, unless they are there. Whatever goes wrong is in the outcome."""
    started = time.perf_counter()
    outcome: dict[str, Any] = {"key": "", "origin": "failed", "detail": "", "events": [], "process": PROCESS}
    thread = threading.get_ident()

    def note(event: events.CompileEvent) -> None:
        if threading.get_ident() == thread:
            outcome["events"].append(dataclasses.asdict(event))

    unsubscribe = events.on_compile(note)
    try:
        for module in task["families"]:
            registry.register(importlib.import_module(module).FAMILY)
        backend, compiler, target, batch_invariant, automatic = task["route"]
        chip = chips.named(task["chip"]) if task.get("chip") else None
        route = Route(backend, compiler, Target.parse(target), chip, batch_invariant, automatic)
        store = _store_at(task["store"])
        name = task["entry"]["name"]
        with _trial(task, route.target.arch):
            lowered = manifest_schema.contained(name, manifests.relower, task["entry"], route)
        outcome["key"] = lowered.key
        with together.alone():  # there are as many builds at a time as was asked for
            kernels = manifest_schema.contained(name, pipeline.fetch, lowered, store)
        if store.remote and not store.share(lowered.key):
            outcome["detail"] = f"{store.remote} does not have it after it was written"
        elif lowered.key in store.memory.plans and not store.remote:
            outcome["detail"] = f"the store {store.root} cannot be written"
        else:
            outcome["origin"] = "compiled" if any(kernel.origin == "compiled" for kernel in kernels) else "store"
    except Exception as error:
        reason = str(error) if isinstance(error, JitgenError) else f"{type(error).__name__}: {error}"
        outcome["detail"] = reason or type(error).__name__
    finally:
        unsubscribe()
    return outcome | {"seconds": time.perf_counter() - started}


def _trial(task: Task, target: str) -> AbstractContextManager[None]:
    """Returns the context in which the schedule that ``task`` tries is taken."""
    if "trial" not in task:
        return nullcontext()
    family, row = task["trial"]
    return tuned.trying(family, target, tuned.row_from_json(row))


def why_unusable(store: Store, key: str) -> str | None:
    """Returns why the plan ``key`` and its artifacts cannot be loaded from ``store``; None if they can."""
    plan = store.get_plan(key)
    if plan is None:
        return "it is not in the store after it was written"
    for artifact_key in plan["artifacts"]:
        artifact = store.get_artifact(artifact_key)
        if artifact is None:
            return f"its artifact {artifact_key[:12]} is not in the store after it was written"
        problem = _why_not_loadable(artifact, Target.parse(plan["target"]), plan["compiler"])
        if problem is not None:
            return f"its artifact {artifact_key[:12]} does not load: {problem}"
    return None


def _why_not_loadable(artifact: StoredArtifact, target: Target, compiler: str) -> str | None:
    """Returns why a verified artifact cannot be loaded. A binary for another device is only looked at."""
    if artifact.binary.endswith(".py"):
        return None
    if not artifact.content.startswith(_ELF):
        return f"{artifact.binary} is no object file"
    if compiler == "host" and runs_here(target):
        try:
            cpu.load_packed(artifact.content, artifact.meta["entry"])
        except (OSError, JitgenError) as error:
            return str(error)
    return None


def _store_at(location: Mapping[str, Any]) -> Store:
    """Returns the store that ``location_of`` described; without a root, this process's own with the remote it names."""
    if location["root"] is None:
        own = default_store()
        return dataclasses.replace(own, remote=location["remote"] or own.remote)
    return Store(Path(location["root"]), tuple(map(Path, location["layers"])), location["remote"])


def families_outside() -> list[str]:
    """Returns the modules of families that were registered from outside jitgen.

    Raises:
        UnsupportedError: a worker would not find one of them.
    """
    modules = []
    for family in registry.FAMILIES:
        module = family.claim.__module__
        if module.partition(".")[0] == "jitgen":
            continue
        if getattr(importlib.import_module(module), "FAMILY", None) is not family:
            raise UnsupportedError(
                f"the family {family.name!r} cannot be found by a worker: export it as FAMILY of the module {module} "
                "that defines its claim"
            )
        modules.append(module)
    return modules[::-1]
