"""Builds what a manifest holds, for targets that this machine need not have.

::

    tasks       every entry, and its other numbers of rows, for every target: one task each (``work``)
    shard       of n build machines each takes every n-th task
    build       in this process, in worker processes (``workers``), or by the caller's executor
    verify      every entry is read back from the store, and loaded where this machine can
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, replace
from typing import Any

from jitgen import events
from jitgen.compilers import bounds
from jitgen.deploy import catalog, manifest_schema, row_variants, work
from jitgen.deploy import manifest as manifests
from jitgen.deploy.manifest import Entry
from jitgen.errors import CompileError, JitgenError, UnsupportedError
from jitgen.ir import graph as graphs
from jitgen.spec import Target
from jitgen.store import Store
from jitgen.store.default import default_store


@dataclass(frozen=True)
class Prewarmed:
    """Reports what became of one specialisation for one target.

    Attributes:
        name: the function's.
        key: the request key; empty where there is none.
        origin: ``"compiled"`` or ``"store"``; ``"skipped"`` or ``"failed"`` with the reason as ``detail``.
        signature: the function and its inputs, such as ``"mlp(bfloat16[16, 4096], int4 g128[14336, 4096])"``.
        seconds: that building it took, or finding it.
    """

    name: str
    target: str
    key: str
    origin: str
    detail: str = ""
    signature: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class PrewarmReport:
    """Reports what ``prewarm`` did.

    Attributes:
        entries: one for each specialisation and target.
    """

    entries: tuple[Prewarmed, ...]

    def count(self, origin: str) -> int:
        return sum(entry.origin == origin for entry in self.entries)

    def __str__(self) -> str:
        return ", ".join(f"{self.count(origin)} {origin}" for origin in ("compiled", "store", "skipped", "failed"))


Progress = Callable[[Prewarmed, int, int], None]
"""``(entry, how many are done, how many there are)``, called once for each, in the order in which they are done."""


def prewarm(
    manifest: str | os.PathLike[str],
    targets: Sequence[str | Target],
    jobs: int | None = 1,
    store: Store | None = None,
    *,
    shard: tuple[int, int] = (1, 1),
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> PrewarmReport:
    """Puts every specialisation of ``manifest`` into the store, for every one of ``targets``. Needs no GPU.

    Args:
        manifest: a file that ``record`` wrote, or the name of a manifest that jitgen ships, such as ``"llama-3-8b"``.
        targets: such as ``["sm_90a", "x86-64-v4"]``; an entry whose function asks for a backend by name is skipped
            for targets which that backend does not serve.
        jobs: kernels compiled at a time: 1 in this process, else in so many worker processes, but no more than there
            are processors and memory for; None for as many as that.
        store: where to; the default store if None.
        shard: ``(i, n)`` with 1 <= i <= n: only the i-th of n shares, which together are everything.
        executor: what runs the builds instead: any ``concurrent.futures.Executor``, such as Dask's
            ``client.get_executor()``. Where the store has a remote, each worker builds into its own default store and
            shares what it built; where it has none, workers must see the store's directory under the same path.
        progress: called for each entry when it is done.

    Raises:
        CacheError: the manifest is not what ``record`` writes; nothing was built from it.
        UnsupportedError: ``targets`` is no list of targets.
        JitgenError: it names no specialisation for some target, or anything is missing from the store afterwards; the
            message lists what, and the report is its ``report``.
    """
    where = store or default_store()
    parsed = _parsed(targets)
    entries = manifest_schema.read(catalog.find(manifest))
    here = executor is None and jobs == 1
    families = [] if here else work.families_outside()
    location = work.location_of(where, shared_directory=executor is None or not where.remote)
    plan = [planned for entry in entries for planned in _plan(entry, parsed, location, families)]
    index, count = shard
    if not 1 <= index <= count:
        raise ValueError(f"shard {index}/{count}: expected i/n with 1 <= i <= n")
    chosen = plan[index - 1 :: count]
    done: dict[int, Prewarmed] = {}
    for number, entry in _results(chosen, jobs, executor):
        done[number] = _verified(entry, where)
        if progress is not None:
            progress(done[number], len(done), len(chosen))
    report = PrewarmReport(tuple(done[number] for number in range(len(chosen))))
    failed = [entry for entry in report.entries if entry.origin == "failed"]
    served = {entry.target for entry, _ in plan if entry.origin != "skipped"}
    idle = [target for target in map(str, parsed) if target not in served]
    if failed or idle:
        lines = _failures(failed)
        lines += [f"nothing in {manifest} is for {target}" for target in idle]
        error = JitgenError("prewarm is incomplete:\n  " + "\n  ".join(lines))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def _parsed(targets: Sequence[str | Target]) -> list[Target]:
    """Parses the names of targets.

    Raises:
        UnsupportedError: they are no list of targets, or an empty one.
    """
    if isinstance(targets, (str, Target)):
        raise UnsupportedError(f"targets is {str(targets)!r}, and no list of targets: pass targets=[{str(targets)!r}]")
    if not isinstance(targets, Iterable):
        raise UnsupportedError(f"targets is {targets!r:.80}, and no list of targets: pass such as ['sm_90a', 'cpu']")
    parsed = [Target.parse(target) for target in targets]
    if not parsed:
        raise UnsupportedError("targets is empty: name what kernels are for, such as ['sm_90a', 'cpu']")
    return parsed


def _failures(failed: Sequence[Prewarmed]) -> list[str]:
    """Lists what failed and why: of many with the same reason the first, and how many others there were."""
    alike: dict[str, list[Prewarmed]] = {}
    for entry in failed:
        alike.setdefault(entry.detail.partition("\n")[0], []).append(entry)
    return [
        f"{first.signature or first.name} for {first.target}: {first.detail}"
        + (f"\n  and {len(others)} more failed for the same reason" if others else "")
        for first, *others in alike.values()
    ]


Planned = tuple[Prewarmed, work.Task | None]
"""A build and its task; without a task, the result is known already."""


def _plan(entry: Entry, targets: Sequence[Target], location: Any, families: Sequence[str]) -> Iterator[Planned]:
    """Yields everything that a recorded call stands for, for every target."""
    name = entry["name"]
    for target in targets:
        planned = Prewarmed(name, str(target), "", "")
        try:
            route = work.route_of(entry, target)
        except UnsupportedError as problem:
            yield replace(planned, origin="skipped", detail=str(problem)), None
            continue
        try:
            device = route.device
            if route.alternative is not None:
                device = manifest_schema.contained(name, manifests.relower, entry, route).route.device
            variants = manifest_schema.contained(name, row_variants.variants, entry, device)
            left_out = manifest_schema.contained(name, row_variants.combinations_left_out, entry, device)
            fixed = manifest_schema.contained(name, row_variants.fixed_by_numbers, entry, variants, device)
            signatures = [manifest_schema.contained(name, signature_of, variant) for variant in variants]
        except (CompileError, UnsupportedError) as problem:
            yield replace(planned, origin="failed", detail=str(problem)), None
            continue
        for variant, signature in zip(variants, signatures, strict=True):
            yield replace(planned, signature=signature), work.task_of(variant, route, location, families)
        if left_out:
            why = f"{left_out} combinations of the buckets of its sizes: each was varied alone; record what is called"
            yield replace(planned, origin="skipped", detail=why), None
        if fixed:
            why = (
                f"the size {' and the size '.join(fixed)} of other calls: arguments that are numbers set it (a0 is the "
            )
            why += "first), and only their recorded values fit the sizes of tensors; record what is called"
            yield replace(planned, origin="skipped", detail=why), None


def _results(
    planned: Sequence[Planned], jobs: int | None, executor: Executor | None
) -> Iterator[tuple[int, Prewarmed]]:
    """Yields the result of each build, with its index, in the order in which they end."""
    tasks = {}
    for index, (entry, task) in enumerate(planned):
        if task is None:
            yield index, entry
        else:
            tasks[index] = task
    count = min(bounds.workers(jobs), len(tasks))
    if executor is None and (jobs == 1 or count <= 1):
        for index, task in tasks.items():
            yield index, _with_outcome(planned[index][0], work.build(task))
        return
    from jitgen.compilers.workers import WorkerProcesses

    pool = executor or WorkerProcesses(count, bounds.WORKER_BYTES)
    futures: dict[Future[work.Outcome], int] = {pool.submit(work.build, task): index for index, task in tasks.items()}
    try:
        for future in as_completed(futures):
            index = futures[future]
            yield index, _with_outcome(planned[index][0], _outcome_of(future))
    finally:
        for future in futures:
            future.cancel()
        if executor is None:
            pool.shutdown(cancel_futures=True)


def _outcome_of(future: Future[work.Outcome]) -> work.Outcome:
    try:
        outcome = future.result()
    except (Exception, CancelledError) as error:  # of the executor: a worker that died, say
        detail = f"{type(error).__name__}: {error}"
        return {"key": "", "origin": "failed", "detail": detail, "seconds": 0.0}
    if outcome["process"] != work.PROCESS:
        for fields in outcome["events"]:
            events.publish(events.CompileEvent(**fields))
    return outcome


def _with_outcome(entry: Prewarmed, outcome: work.Outcome) -> Prewarmed:
    return replace(entry, **{name: outcome[name] for name in ("key", "origin", "detail", "seconds")})


def _verified(entry: Prewarmed, store: Store) -> Prewarmed:
    """Returns ``entry``, failed if it was built and cannot be loaded from ``store``."""
    if entry.origin in ("compiled", "store"):
        problem = work.why_unusable(store, entry.key)
        if problem is not None:
            return replace(entry, origin="failed", detail=problem)
    return entry


def signature_of(entry: Entry) -> str:
    """Returns the function of an entry and its inputs at the recorded sizes."""
    graph = graphs.from_json(entry["graph"])
    return f"{entry['name']}({', '.join(graphs.described_inputs(graph, entry['environment']))})"
