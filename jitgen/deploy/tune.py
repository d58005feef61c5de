"""Finds the fastest schedule of every kernel of a manifest, by measuring those that it has on this machine.

::

    problems    kernels whose family has several candidates and tells problems apart by facts; each once
    prune       the candidates that the family's model estimates to be near the best, the model's choice first
    compile     each as a program of its own, in worker processes; all artifacts go to the store
    compare     what the program computes by each with what it does by the model's choice: others are failures
    time        the whole program by each, in turn, over rotating copies of its inputs (``trials``)
    keep        a winner that is faster than the model's choice beyond noise, as a row of ``<target>/<family>.json``

Every problem that was measured is a line of ``<target>/<family>.measured.jsonl`` beside the rows, with the seconds of
every candidate (``measurements``): a run that is interrupted goes on after them. A problem whose program could not be
timed by the model's choice is a failure, and tried again by the next run. One whose timings take longer than a run has
is noted with what it needs, so that others come first. Nothing on a serving path measures anything: it reads the rows
(``schedule/tuned.py``), whose digest is a part of the request key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jitgen._version import __version__
from jitgen.compilers import bounds, routes
from jitgen.deploy import manifest as manifests
from jitgen.deploy import manifest_schema, own_integers, row_variants, trial_inputs, trials, work
from jitgen.deploy.manifest import Entry
from jitgen.deploy.measurements import Files, Origin, cpu_model
from jitgen.deploy.trials import Program, TimeIsOverError, Timer
from jitgen.errors import JitgenError
from jitgen.families import registry
from jitgen.fingerprint import code_digest, without_comments
from jitgen.lowering import Lowered, Route
from jitgen.schedule import tuned
from jitgen.schedule.tuned import Row
from jitgen.spec import Target, digest
from jitgen.store.default import default_store

MOST_CANDIDATES = 16
"""Candidates of a problem that are measured at most, the cheapest by the model."""
WORTH_TRYING = 1.6
"""A candidate that the model estimates to take so many times as long as its choice is not measured, unless it is one of
the first ``LEAST_CANDIDATES``: the estimates of few may be coarse."""
LEAST_CANDIDATES = 4
PROBED_BYTES = 2**16
"""Bytes that the store must have room for; a kernel takes as many, or some times as many."""
MARGIN = 0.03
"""A row must save this share of the time of the model's choice, so that noise writes none."""
NEEDS_MORE = 1.1
"""Times the seconds that did not suffice for a problem, its next run needs at least."""
FINALISTS = 3
"""Candidates that are compared with the model's choice once more, in turn with it."""

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
"""Matches a sha256; 12 of its digits tell it from others."""


@dataclass(frozen=True)
class Problem:
    """Describes a kernel whose schedule is measured.

    Attributes:
        entry: the specialisation that it is a kernel of.
        route: how it is made.
        family: the name of its family.
        facts: what measured rows tell it by.
        rows: a row for each candidate that is measured, that of the model's choice first.
        costs: of these by the family's model, in its unit.
        candidates: how many there are in all.
        pruned: the rows and costs of the others, which are measured only where one of them was kept before.
    """

    entry: Entry
    route: Route
    family: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...] = field(repr=False)
    costs: tuple[float, ...]
    candidates: int
    pruned: tuple[tuple[Row, float], ...] = field(default=(), repr=False)

    @property
    def identity(self) -> str:
        """Returns what tells it from other problems of its family and target, and from what was measured with other
        integers (``own_integers``)."""
        row, integers = self.rows[0], self.entry.get("integers")
        stated = [digest(integers)] if integers else []
        return json.dumps([row.chip, row.dialect, self.facts, *stated], sort_keys=True)

    def __str__(self) -> str:
        told = [
            name if value is True else f"{name} {value}"
            for name, value in self.facts.items()
            if value is True or (value and (name == "rows" or value != 1))
        ]
        facts = _DIGEST.sub(r"\1", ", ".join(told))
        return f"{self.entry['name']} ({self.family} for {self.route.target}: {facts})"


@dataclass(frozen=True)
class Measured:
    """Reports what was measured of one problem.

    Attributes:
        problem: the problem.
        seconds: of each of its rows; None where a candidate failed, whose reason is in ``failures``.
        winner: the row that was kept; None where the model's choice stays.
        gain: the share of the time of the model's choice that the winner saves; 0 without one.
        row_gone: whether a row of an earlier measurement went, as there is no winner now.
    """

    problem: Problem
    seconds: tuple[float | None, ...]
    failures: tuple[str, ...]
    winner: Row | None
    gain: float
    row_gone: bool = False

    @property
    def failed(self) -> bool:
        """Returns whether nothing is known of the problem: the model's choice could not be timed."""
        return self.seconds[0] is None


@dataclass(frozen=True)
class Waiting:
    """Describes a problem that is still to be measured.

    Attributes:
        problem: the problem.
        needs: the seconds that a run needs for it, by an estimate, where those of an earlier run did not suffice for
            its timings; else 0.
        is_stale: whether it was measured by other code, by another compiler or on another device.
    """

    problem: Problem
    needs: float
    is_stale: bool


def problems_of(entries: Sequence[Entry], target: Target, chip: Any) -> Iterator[Problem]:
    """Yields the problems of ``entries`` for ``target``, each once, in the order of the entries."""
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        for problem in _problems_of(entry, target, chip):
            name = problem.family, json.dumps([problem.rows[0].dialect, problem.facts], sort_keys=True)
            if name not in seen:
                seen.add(name)
                yield problem


def _problems_of(entry: Entry, target: Target, chip: Any) -> Iterator[Problem]:
    """Yields the problems of ``entry`` at the recorded sizes and for the other numbers of rows that it stands for,
    unless a user's kernel runs in it, which may take sizes to be equal that no guard ties: with one of them changed it
    could leave its tensors. There are none where its backend does not serve ``target``, or has no kernel of it."""
    name, is_fixed = entry["name"], own_integers.has_own_kernels(entry)
    if entry.get("enlarged"):
        return
    try:
        route = work.route_of(entry, target, chip)
        variants = [entry] if is_fixed else manifest_schema.contained(name, row_variants.variants, entry, route.device)
    except JitgenError:
        return
    for variant in variants:
        try:
            lowered = manifest_schema.contained(name, manifests.relower, variant, route)
        except JitgenError:
            continue
        for number in range(len(lowered.program.kernels)):
            problem = _problem(variant, lowered, number)
            if problem is not None:
                yield problem


def _problem(entry: Entry, lowered: Lowered, number: int) -> Problem | None:
    """Returns the problem of kernel ``number``; None if there is nothing to choose, or nothing to compute."""
    kernel, device = lowered.program.kernels[number], lowered.route.device
    family = registry.family_of(kernel)
    if not lowered.work(number).elements:
        return None
    described = family.problem(kernel, lowered.layouts[number], lowered.laid_out.geometries[number], device)
    candidates = list(dict.fromkeys(family.candidates(described, device)))
    facts = family.facts(described, device) if len(candidates) > 1 else None
    if facts is None:
        return None
    costs = {candidate: family.cost(described, candidate, device) for candidate in candidates}
    chosen = sorted(candidates, key=costs.__getitem__)  # of equals the first, as the model takes it
    most = WORTH_TRYING * costs[chosen[0]]
    near = [c for number, c in enumerate(chosen) if number < LEAST_CANDIDATES or costs[c] <= most]
    tried = near[:MOST_CANDIDATES]
    rows = {c: tuned.row_of(device.measured_as, device.dialect, facts, c) for c in chosen}
    pruned = tuple((rows[c], costs[c]) for c in chosen if c not in set(tried))
    measured, estimates = tuple(rows[c] for c in tried), tuple(costs[c] for c in tried)
    return Problem(entry, lowered.route, family.name, facts, measured, estimates, len(candidates), pruned)


def waiting(problems: Sequence[Problem], output: Path, device: torch.device) -> list[Waiting]:
    """Returns the problems that ``output`` has no measurements of by this device, code and compiler; those last whose
    timings did not end in an earlier run, the quickest of them first.

    Raises:
        CacheError: what is in ``output`` cannot be read.
    """
    files = {_files(output, problem): problem for problem in problems}
    known = {one: one.known(origin_of(problem, device)) for one, problem in files.items()}
    lines = {one: {line["problem"] for line in one.read()} for one in files}
    there: list[Waiting] = []
    for problem in problems:
        one, identity = _files(output, problem), problem.identity
        if identity not in known[one][0]:
            needs = known[one][1].get(identity, 0.0)
            there.append(Waiting(problem, needs, not needs and identity in lines[one]))
    return sorted(there, key=lambda one: one.needs)


def tune(
    problems: Sequence[Problem],
    output: Path,
    device: torch.device,
    seconds: float,
    jobs: int | None = None,
    progress: Callable[[Measured, int, int], None] | None = None,
) -> list[Measured]:
    """Measures ``problems`` on ``device`` and writes winners to ``output``, until ``seconds`` are over: then the
    compile or the timing in hand ends, and its problem is left to the next run. One whose timings did not end comes
    last there, and is not begun where it needs more seconds than there are (``Waiting.needs``).

    Args:
        output: a directory as ``JITGEN_TUNED`` names one, which other runs may write to at once. What it has of other
            problems stays; problems that were measured before are left out (``waiting``).
        jobs: worker processes that compile; 1 for this process; None for as many as the machine takes. Where a GPU is
            measured they compile all problems ahead; on a CPU, which they would keep busy, one problem at a time.
        progress: called for each problem when it is measured, with how many are and how many there are.

    Raises:
        CacheError: what is in ``output`` cannot be read, or it or the store cannot be written: before anything is
            measured, or, where a disk is full by then, after ``progress`` was told of what was.
    """
    ends = time.monotonic() + seconds
    ahead = waiting(problems, output, device)
    for files in {_files(output, one.problem) for one in ahead}:
        files.check()
    store, done = default_store(), list[Measured]()
    if ahead and not store.remote:
        with store.writing(), tempfile.TemporaryFile(dir=store.root) as probe:
            probe.write(bytes(PROBED_BYTES))
    ahead = [_with_its_row(one, output) for one in ahead if one.needs <= seconds]
    location, families = work.location_of(store, shared_directory=True), work.families_outside()
    tasks = [[_task(one.problem, row, location, families) for row in one.problem.rows] for one in ahead]
    with _builder(jobs, ends) as build, contextlib.suppress(TimeIsOverError):
        lazily = jobs == 1 or device.type == "cpu"
        builds = map(build, tasks) if lazily else [build(tasks_of_problem) for tasks_of_problem in tasks]
        for number, (one, futures) in enumerate(zip(ahead, builds, strict=False)):
            if time.monotonic() >= ends or not _built_in_time(futures, ends):
                break
            files = _files(output, one.problem)
            with files.claimed(one.problem.identity) as is_own:
                if not is_own or one.problem.identity in files.known(origin_of(one.problem, device))[0]:
                    continue  # another run measures it, or has by now
                result = _measured_or_noted(one.problem, futures, files, device, ends)
                try:
                    result = _kept(result, files, device)
                finally:
                    done.append(result)
                    if progress is not None:
                        progress(result, number + 1, len(ahead))
    return done


def _with_its_row(one: Waiting, output: Path) -> Waiting:
    """Returns ``one`` with the schedule of the row that ``output`` has of it among those that are measured, so that
    the row is judged again."""
    problem = one.problem
    row = _files(output, problem).row_of(problem.rows[0])
    again = [(other, cost) for other, cost in problem.pruned if row is not None and _names(row, other)]
    rows, costs = (tuple(column) for column in zip(*again, strict=True)) if again else ((), ())
    changed = dataclasses.replace(problem, rows=(*problem.rows, *rows), costs=(*problem.costs, *costs))
    return dataclasses.replace(one, problem=changed)


def _names(row: Row, full: Row) -> bool:
    """Returns whether the schedules of ``full``, a row with all of their fields, are those of ``row``."""
    return len(row.schedules) == len(full.schedules) and any(
        all(
            one.mainloop == other.mainloop and one.fields.items() <= other.fields.items()
            for one, other in zip(order, full.schedules, strict=True)
        )
        for order in itertools.permutations(row.schedules)
    )


def _measured_or_noted(
    problem: Problem, futures: Sequence[Future[work.Outcome]], files: Files, device: torch.device, ends: float
) -> Measured:
    """Returns what was measured of ``problem``.

    Raises:
        TimeIsOverError: the time is ``ends``; what the problem needs is noted.
    """
    started = time.monotonic()
    try:
        return _measured(problem, [_failure(future) for future in futures], device, ends)
    except TimeIsOverError as error:
        needs = max(error.needs, NEEDS_MORE * (ends - started))
        origin = origin_of(problem, device).as_json
        files.postpone(problem.identity, {"problem": problem.identity, "origin": origin, "needs": needs})
        raise


def _kept(result: Measured, files: Files, device: torch.device) -> Measured:
    """Writes ``result`` to the measurements and its winner to the rows; nothing of one that failed."""
    if result.failed:
        return result
    problem, winner, origin = result.problem, result.winner, origin_of(result.problem, device)
    candidates = [
        {"schedule": row.as_json["schedule"], "seconds": seconds, "cost": cost}
        for row, seconds, cost in zip(problem.rows, result.seconds, problem.costs, strict=True)
    ]
    line = {"problem": problem.identity, "origin": origin.as_json, "candidates": candidates}
    measured = None
    if winner is not None:
        seconds = result.seconds[problem.rows.index(winner)]
        source = f"jitgen tune {__version__} on {origin.device}"
        facts = {"seconds": seconds, "seconds_of_the_model": result.seconds[0], "source": source}
        measured = {**winner.as_json, "measured": facts}
    gone = files.keep(problem.identity, line, problem.rows[0], measured)
    return dataclasses.replace(result, row_gone=gone)


def _files(output: Path, problem: Problem) -> Files:
    return Files(output, problem.route.target.arch, problem.family)


@contextlib.contextmanager
def _builder(jobs: int | None, ends: float) -> Iterator[Callable[[Sequence[work.Task]], list[Future[work.Outcome]]]]:
    """Provides a function that builds tasks: in worker processes, which end with the context, or in this one, where it
    begins none after ``ends`` and raises TimeIsOverError."""
    from jitgen.compilers.workers import WorkerProcesses

    if jobs == 1:
        yield lambda tasks: [_built(task, ends) for task in tasks]
        return
    pool, submitted = WorkerProcesses(max(1, bounds.workers(jobs)), bounds.WORKER_BYTES), list[Future[work.Outcome]]()

    def build(tasks: Sequence[work.Task]) -> list[Future[work.Outcome]]:
        futures = [pool.submit(work.build, task) for task in tasks]
        submitted.extend(futures)
        return futures

    try:
        yield build
    finally:
        for future in submitted:
            future.cancel()
        pool.shutdown(cancel_futures=True)


def _built(task: work.Task, ends: float) -> Future[work.Outcome]:
    if time.monotonic() >= ends:
        raise TimeIsOverError
    future = Future[work.Outcome]()
    future.set_result(work.build(task))
    return future


def _task(problem: Problem, row: Row, location: Mapping[str, Any], families: Sequence[str]) -> work.Task:
    chip = problem.route.chip
    trial = {"chip": chip.name if chip is not None else None, "trial": [problem.family, row.as_json]}
    return {**work.task_of(problem.entry, problem.route, location, families), **trial}


def _built_in_time(futures: Sequence[Future[work.Outcome]], ends: float) -> bool:
    """Returns whether the builds of one problem end before ``ends``, for which it waits."""
    return not wait(futures, max(0.0, ends - time.monotonic())).not_done


def _failure(future: Future[work.Outcome]) -> str:
    """Returns why a build failed; empty if it did not."""
    try:
        outcome = future.result()
    except Exception as error:  # a worker that died, say
        return f"{type(error).__name__}: {error}"
    return str(outcome["detail"]) if outcome["origin"] == "failed" else ""


def _measured(problem: Problem, failures: Sequence[str], device: torch.device, ends: float) -> Measured:
    """Times the candidates of ``problem`` that were built and compute what the model's choice does, and compares the
    best with that in turn.

    Raises:
        TimeIsOverError: the time is ``ends``.
    """
    reasons, seconds = list(failures), list[float | None]([None] * len(problem.rows))
    try:
        program = Program(problem.entry, problem.route, device, ends)
    except Exception as error:
        return Measured(problem, tuple(seconds), (f"{type(error).__name__}: {error}",), None, 0.0)
    program.expects(len(problem.rows) * trials.ROUNDS + min(1 + FINALISTS, len(problem.rows)) * trials.CAREFUL_ROUNDS)
    timers: dict[int, Timer] = {}
    expected: list[torch.Tensor] | None = None
    for number, row in enumerate(problem.rows):
        if reasons[number]:
            continue
        try:
            with tuned.trying(problem.family, problem.route.target.arch, row):
                calls = program.calls()
            results = program.results(calls)
            expected = results if number == 0 else expected
            reasons[number] = "" if expected is None else trials.difference(results, expected)
            if not reasons[number]:
                timers[number] = program.timer(calls)
        except TimeIsOverError:
            raise
        except Exception as error:
            reasons[number] = f"{type(error).__name__}: {error}"
    for number, values in program.rounds(timers).items():
        seconds[number] = values.median
    winner, gain = None, 0.0
    if 0 in timers and len(timers) > 1:
        others = sorted((number for number in timers if number), key=lambda number: seconds[number] or 0.0)
        finals = program.rounds({number: timers[number] for number in (0, *others[:FINALISTS])}, careful=True)
        best = min((number for number in finals if number), key=lambda number: finals[number].median)
        gain = 1 - finals[best].median / finals[0].median
        if gain > MARGIN and finals[best].upper < finals[0].lower:
            winner = problem.rows[best]
        for number, values in finals.items():
            seconds[number] = values.median
    return Measured(problem, tuple(seconds), tuple(filter(None, reasons)), winner, gain if winner else 0.0)


def origin_of(problem: Problem, device: torch.device) -> Origin:
    """Returns what measures ``problem`` here: the device, the code that generates and measures, and the compiler."""
    route = problem.route
    outside = {family.name: family.fingerprint() for family in registry.FAMILIES}[problem.family]
    tools = str(routes.toolchain(route.backend, route.compiler))
    return Origin(_device_name(device), digest([code_digest(), _measuring_code(), outside, tools]))


@functools.cache
def _measuring_code() -> str:
    """Returns the digest of what measures, which has no say in what is generated."""
    modules = (__file__, trials.__file__, trial_inputs.__file__, own_integers.__file__)
    return digest([without_comments(Path(module).read_text(encoding="utf-8")) for module in modules])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads"
