"""Finds the fastest schedule of every kernel of a manifest, by measuring those that it has on this machine.

::

    problems    kernels whose family has several candidates and tells problems apart by facts; each once
    prune       the candidates that the family's model estimates to be near the best, the model's choice first
    compile     each as a program of its own, in worker processes; all artifacts go to the store
    compare     what the program computes by each with what it does by the model's choice: others are failures
    time        the whole program by each, in turn, over rotating copies of its inputs (``trials``)
    keep        a winner that is faster than the model's choice beyond noise, as a row of ``<target>/<family>.json``

Every problem that was measured is a line of ``<target>/<family>.measured.jsonl`` beside the rows, with the seconds of
every candidate: a run that is interrupted goes on after them. A problem whose program could not be timed by the model's
choice is a failure, and tried again by the next run. Nothing on a serving path measures anything: it reads the
rows (``schedule/tuned.py``), whose digest is a part of the request key.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jitgen._version import __version__
from jitgen.compilers import bounds
from jitgen.deploy import manifest as manifests
from jitgen.deploy import manifest_schema, row_variants, shared_files, trials, work
from jitgen.deploy.manifest import Entry
from jitgen.deploy.trials import Program, TimeIsOverError, Timer
from jitgen.errors import CacheError, JitgenError
from jitgen.families import registry
from jitgen.lowering import Lowered, Route
from jitgen.schedule import tuned
from jitgen.schedule.tuned import Row
from jitgen.spec import Target
from jitgen.store.default import default_store

MOST_CANDIDATES = 16
"""Candidates of a problem that are measured at most, the cheapest by the model."""
WORTH_TRYING = 1.6
"""A candidate that the model estimates to take so many times as long as its choice is not measured, unless it is one of
the first ``LEAST_CANDIDATES``: the estimates of few may be coarse."""
LEAST_CANDIDATES = 4
MARGIN = 0.03
"""A row must save this share of the time of the model's choice, so that noise writes none."""
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
    """

    entry: Entry
    route: Route
    family: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...] = field(repr=False)
    costs: tuple[float, ...]
    candidates: int

    @property
    def identity(self) -> str:
        """Returns what tells it from other problems of its family and target."""
        row = self.rows[0]
        return json.dumps([row.chip, row.dialect, self.facts], sort_keys=True)

    def __str__(self) -> str:
        told = {name: value for name, value in self.facts.items() if value and (name == "rows" or value != 1)}
        facts = _DIGEST.sub(r"\1", ", ".join(f"{name} {value}" for name, value in told.items()))
        return f"{self.entry['name']} ({self.family} for {self.route.target}: {facts})"


@dataclass(frozen=True)
class Measured:
    """Reports what was measured of one problem.

    Attributes:
        problem: the problem.
        seconds: of each of its rows; None where a candidate failed, whose reason is in ``failures``.
        winner: the row that was kept; None where the model's choice stays.
        gain: the share of the time of the model's choice that the winner saves; 0 without one.
    """

    problem: Problem
    seconds: tuple[float | None, ...]
    failures: tuple[str, ...]
    winner: Row | None
    gain: float

    @property
    def failed(self) -> bool:
        """Returns whether nothing is known of the problem: the model's choice could not be timed."""
        return self.seconds[0] is None


def problems_of(entries: Sequence[Entry], target: Target, chip: Any) -> Iterator[Problem]:
    """Yields the problems of ``entries`` for ``target``, each once, in the order of the entries."""
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        for problem in _problems_of(entry, target, chip):
            if (problem.family, problem.identity) not in seen:
                seen.add((problem.family, problem.identity))
                yield problem


def _problems_of(entry: Entry, target: Target, chip: Any) -> Iterator[Problem]:
    """Yields the problems of ``entry`` at the recorded sizes and for the other numbers of rows that it stands for; none
    where its backend does not serve ``target``, or has no kernel of it."""
    name = entry["name"]
    try:
        route = work.route_of(entry, target, chip)
        variants = manifest_schema.contained(name, row_variants.variants, entry, route.device)
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
    rows = tuple(tuned.row_of(device.model.name, device.dialect, facts, candidate) for candidate in tried)
    return Problem(entry, lowered.route, family.name, facts, rows, tuple(costs[c] for c in tried), len(candidates))


def tune(
    problems: Sequence[Problem],
    output: Path,
    device: torch.device,
    seconds: float,
    jobs: int | None = None,
    progress: Callable[[Measured, int, int], None] | None = None,
) -> list[Measured]:
    """Measures ``problems`` on ``device`` and writes winners to ``output``, until ``seconds`` are over: then the
    compile or the timing in hand ends, and its problem is left to the next run.

    Args:
        output: a directory as ``JITGEN_TUNED`` names one. What it has of other problems stays; problems that were
            measured before are left out.
        jobs: worker processes that compile, all problems ahead; 1 for this process, which compiles the candidates of a
            problem before it times them; None for as many workers as the machine takes.
        progress: called for each problem when it is measured, with how many are and how many there are.

    Raises:
        CacheError: what is in ``output`` cannot be read, or it cannot be written; before anything is measured.
    """
    ends = time.monotonic() + seconds
    waiting = [problem for problem in problems if problem.identity not in measured_before(output, problem)]
    for path, problem in {_paths(output, problem)[0]: problem for problem in waiting}.items():
        with shared_files.locked(path):
            _rows_before(path, problem)
    store, done = default_store(), list[Measured]()
    location, families = work.location_of(store, shared_directory=True), work.families_outside()
    tasks = [[_task(problem, row, location, families) for row in problem.rows] for problem in waiting]
    with _builder(jobs, ends) as build, contextlib.suppress(TimeIsOverError):
        builds = map(build, tasks) if jobs == 1 else [build(tasks_of_problem) for tasks_of_problem in tasks]
        for number, (problem, futures) in enumerate(zip(waiting, builds, strict=False)):
            if time.monotonic() >= ends or not _built_in_time(futures, ends):
                break
            result = _measured(problem, [_failure(future) for future in futures], device, ends)
            _keep(output, result, device)
            done.append(result)
            if progress is not None:
                progress(result, number + 1, len(waiting))
    return done


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
    try:
        for _ in as_completed(futures, timeout=max(0.0, ends - time.monotonic())):
            pass
    except TimeoutError:
        return False
    return True


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


# ------------------------------------------------------------------------------------------------------------- files


def _paths(output: Path, problem: Problem) -> tuple[Path, Path]:
    """Returns the file of rows and the file of measurements."""
    directory = output / problem.route.target.arch
    return directory / f"{problem.family}.json", directory / f"{problem.family}.measured.jsonl"


def measured_before(output: Path, problem: Problem) -> set[str]:
    """Returns the identities of the problems of this family and target that ``output`` has measurements of."""
    _, path = _paths(output, problem)
    if not path.is_file():
        return set()
    try:
        return {_identity(number, line) for number, line in enumerate(_whole_lines(path.read_text()), 1)}
    except (OSError, ValueError) as error:
        raise CacheError(f"{path} has no measurements of jitgen tune: {error}; remove the line, or the file") from error


def _identity(number: int, line: str) -> str:
    """Returns the identity of the problem of a line of measurements.

    Raises:
        ValueError: it is another line.
    """
    try:
        return str(json.loads(line)["problem"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line {number}: {error}") from error


def _whole_lines(text: str) -> list[str]:
    """Returns the lines of ``text`` that end: a process that was killed may have left a part of one."""
    return text[: text.rfind("\n") + 1].splitlines()


def _keep(output: Path, result: Measured, device: torch.device) -> None:
    """Adds ``result`` to the measurements and, if it has a winner, to the rows; nothing of one that failed."""
    if result.failed:
        return
    path, measurements = _paths(output, result.problem)
    candidates = [
        {"schedule": row.as_json["schedule"], "seconds": seconds, "cost": cost}
        for row, seconds, cost in zip(result.problem.rows, result.seconds, result.problem.costs, strict=True)
    ]
    line = {"problem": result.problem.identity, "device": _device_name(device), "candidates": candidates}
    with shared_files.locked(path):  # of both files
        if result.winner is not None:
            _add_row(path, result, device)
        before = _whole_lines(measurements.read_text()) if measurements.is_file() else []
        shared_files.replace(measurements, "".join(f"{line}\n" for line in (*before, json.dumps(line))))


def _add_row(path: Path, result: Measured, device: torch.device) -> None:
    """Replaces the row of the problem in ``path``, whose lock is held, or adds one."""
    problem, winner = result.problem, result.winner
    assert winner is not None
    content = _rows_before(path, problem)
    seconds = result.seconds[problem.rows.index(winner)]
    measured = {
        "seconds": seconds,
        "seconds_of_the_model": result.seconds[0],
        "source": f"jitgen tune {__version__} on {_device_name(device)}",
    }
    own = winner.as_json
    others = [row for row in content["rows"] if any(row[name] != own[name] for name in ("chip", "dialect", "problem"))]
    content["rows"] = [*others, {**own, "measured": measured}]
    shared_files.replace(path, json.dumps(content, indent=1) + "\n")


def _rows_before(path: Path, problem: Problem) -> dict[str, Any]:
    """Returns the content of ``path``, whose lock is held, or that of a file without rows.

    Raises:
        CacheError: it is a file of another form, to which nothing is added.
    """
    target = problem.route.target.arch
    if not path.is_file():
        return {"schema": tuned.SCHEMA, "target": target, "family": problem.family, "rows": []}
    tuned.read(path, target, problem.family)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
