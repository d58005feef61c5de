"""Building what a manifest holds, for targets that this machine need not have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen import pipeline
from jitgen.compile import routes
from jitgen.deploy import manifest as manifests
from jitgen.deploy import manifest_schema, row_variants
from jitgen.deploy.manifest import Entry
from jitgen.errors import CompileError, JitgenError, UnsupportedError
from jitgen.lowering import Route
from jitgen.spec import Target
from jitgen.store import Store
from jitgen.store.default import default_store


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
        CacheError: the manifest is not what ``record`` writes; nothing was built from it.
        JitgenError: it names no specialisation for some target, or anything is missing from the store afterwards; the
            message lists what, and the report is its ``report``.
    """
    from concurrent.futures import ThreadPoolExecutor

    where = store or default_store()
    parsed = [Target.parse(target) for target in targets]
    wanted: list[tuple[Entry, Route]] = []
    unusable: list[Prewarmed] = []
    for entry in manifest_schema.read(manifest):
        for target in parsed:
            found = _wanted(entry, target)
            if isinstance(found, Prewarmed):
                unusable.append(found)
            else:
                wanted += found
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        done = list(pool.map(lambda one: _prewarm_one(one[0], one[1], where), wanted))
    report = PrewarmReport((*unusable, *done))
    failed = [entry for entry in report.entries if entry.origin == "failed"]
    served = {entry.target for entry in report.entries if entry.origin != "skipped"}
    idle = [target for target in map(str, parsed) if target not in served]
    if failed or idle:
        parts = [f"{entry.name} for {entry.target}: {entry.detail}" for entry in failed]
        parts += [f"nothing in {manifest} is for {target}" for target in idle]
        error = JitgenError("prewarm is incomplete:\n  " + "\n  ".join(parts))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def _wanted(entry: Entry, target: Target) -> list[tuple[Entry, Route]] | Prewarmed:
    """What has to be built of ``entry`` for ``target``; why nothing can be, as its row of the report."""
    name = entry["name"]
    try:
        route = _route(entry, target)
    except UnsupportedError as error:
        return Prewarmed(name, str(target), "", "skipped", str(error))
    try:
        variants = manifest_schema.contained(name, row_variants.variants, entry, route.device)
    except (CompileError, UnsupportedError) as error:
        return Prewarmed(name, str(target), "", "failed", str(error))
    return [(variant, route) for variant in variants]


def _prewarm_one(entry: Entry, route: Route, store: Store) -> Prewarmed:
    name, target = entry["name"], route.target
    try:
        lowered = manifest_schema.contained(name, manifests.relower, entry, route)
        kernels = manifest_schema.contained(name, pipeline.fetch, lowered, store)
    except (CompileError, UnsupportedError) as error:
        return Prewarmed(name, str(target), "", "failed", str(error))
    if store.get_plan(lowered.key) is None:
        return Prewarmed(name, str(target), lowered.key, "failed", "it is not in the store after it was written")
    origin = "compiled" if any(kernel.origin == "compiled" for kernel in kernels) else "store"
    return Prewarmed(name, str(target), lowered.key, origin)


def _route(entry: Entry, target: Target) -> Route:
    """What ``target`` takes of an entry; UnsupportedError where its function's backend does not serve that."""
    backend = routes.backend_for(entry["backend"], target.kind)
    compiler = entry["compiler"] or routes.default_compiler(backend)
    routes.check(backend, compiler, target)
    return Route(backend, compiler, target)
