"""Measures schedules on this machine, and keeps those that are faster than what the model chooses: ``jitgen tune``."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitgen.cli.show import json_option, print_json, print_table, say
from jitgen.cli.source import arguments_option, load_function, lower

if TYPE_CHECKING:
    from jitgen.deploy.manifest import Entry
    from jitgen.deploy.tune import Measured, Problem, Waiting
    from jitgen.spec import Target

INTERRUPTED = 130
"""The exit code after an interrupt, as shells have it."""


def _integers(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Parses ``lengths=1..4096`` and ``start=7`` as ``{"lengths": (1, 4096), "start": (7, 7)}``."""
    ranges = {}
    for text in texts:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d{1,19})(?:\s*\.\.\s*(-?\d{1,19}))?\s*", text)
        if not match or int(match[2]) > int(match[3] or match[2]):
            raise click.BadParameter(f"{text!r} is no name with a value, or the least and the largest: lengths=1..4096")
        ranges[match[1]] = int(match[2]), int(match[3] or match[2])
    return ranges


@click.command()
@click.argument("manifest", metavar="[MANIFEST | FILE_OR_MODULE:FUNCTION]", required=False)
@arguments_option
@click.option("--model", help="A manifest that jitgen ships, such as llama-3-8b.")
@click.option("--target", help="Whose schedules: this machine's GPU [default], or cpu. Only --dry-run takes another's.")
@click.option("--family", "families", multiple=True, help="Such as gemm; give it again for another [default: all].")
@click.option(
    "--integers",
    multiple=True,
    metavar="NAME=LEAST..LARGEST",
    callback=_integers,
    help="What a parameter of a kernel of yours gets that points to integers, such as lengths=1..4096, or a value "
    "[default: what was recorded, else 0]. One for each.",
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes that compile [default: what fits].")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory of rows [default: JITGEN_TUNED, else jitgen-tuned].",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only list problems, how many candidates each has, how many it would measure, and whether it was measured.",
)
@json_option
def tune(
    manifest: str | None,
    texts: tuple[str, ...],
    model: str | None,
    target: str | None,
    families: tuple[str, ...],
    integers: dict[str, tuple[int, int]],
    seconds: float,
    jobs: int | None,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure the schedules of a manifest's kernels, and write the rows of those that win.

    MANIFEST is a file that `jitgen.record`, or a program under JITGEN_RECORD=PATH, wrote; in its place a FUNCTION is
    measured for the arguments that --arg gives. Problems that the output has measurements of, by the same code,
    compiler and device, are left out, so that a run can be interrupted. Point JITGEN_TUNED to the output to use it, in
    `jitgen prewarm` and in the program that serves.
    """
    from jitgen import settings
    from jitgen.deploy import tune as tuning
    from jitgen.families import registry

    known = [family.name for family in registry.FAMILIES]
    if unknown := [family for family in families if family not in known]:
        raise click.UsageError(f"no family is called {unknown[0]!r}; there are {', '.join(known)}")
    if not math.isfinite(seconds):
        raise click.UsageError(f"--seconds {seconds} is no budget: give a finite number")
    if (manifest is None) == (model is None):
        raise click.UsageError("name a manifest or a function, such as model.py:gate, or a shipped manifest by --model")
    parsed, chip, device = _measured(target, dry_run)
    entries = _with_integers(_entries(manifest, model, texts, parsed), integers)
    problems = list(tuning.problems_of(entries, parsed, chip))
    problems = [problem for problem in problems if not families or problem.family in families]
    if not problems:
        say(
            f"no kernel of {manifest or model} has several schedules for {parsed}: there is nothing to measure",
            err=True,
        )
    _tell_of_zeros(problems)
    directory = output or Path(settings.get("JITGEN_TUNED") or "jitgen-tuned")
    if dry_run:
        _list(problems, tuning.waiting(problems, directory, device), as_json)
    else:
        _Run(problems, directory, device, seconds, as_json).measure(jobs)


def _measured(target: str | None, dry_run: bool) -> tuple[Any, Any, Any]:
    """Returns the target whose schedules are measured, its chip, and the device; of a ``dry_run`` for another machine's
    target, a device of this machine without a chip."""
    from jitgen.spec import Target

    here = _here()
    parsed = Target.parse(target) if target else here[0][0]
    own = [one for one in here if one[0] == parsed]
    if not own and not dry_run:
        targets = " and ".join(str(one) for one, *_ in here)
        raise click.UsageError(f"this machine measures schedules for {targets}, and not for {parsed}; use --dry-run")
    return own[0] if own else (parsed, None, here[0][2])


def _entries(manifest: str | None, model: str | None, texts: tuple[str, ...], target: Target) -> list[Entry]:
    """Returns the entries of a manifest, or the one of a function."""
    from jitgen.deploy import catalog, manifest_schema

    if texts or (manifest is not None and ":" in manifest):
        return [_entry_of(manifest, texts, str(target))]
    return list(manifest_schema.read(catalog.find(manifest or model or "")))


def _with_integers(entries: list[Entry], ranges: dict[str, tuple[int, int]]) -> list[Entry]:
    """Returns ``entries`` with the ``ranges`` of parameters of kernels that users wrote."""
    from jitgen.deploy import own_integers
    from jitgen.ir import graph as graphs

    if not ranges:
        return entries
    read = [(entry, graphs.from_json(entry["graph"])) for entry in entries]
    known = sorted({name for _, graph in read for name, _ in own_integers.names(graph)})
    if unknown := [name for name in ranges if name not in known]:
        there = f"; there are {', '.join(known)}" if known else ""
        raise click.UsageError(f"no kernel of yours gets integers by a parameter {unknown[0]!r}{there}")
    return [own_integers.stated(entry, graph, ranges) for entry, graph in read]


def _tell_of_zeros(problems: Sequence[Problem]) -> None:
    """Says which parameters of kernels that users wrote get 0 because nobody has said what they are."""
    from jitgen.deploy import own_integers

    entries = {id(problem.entry): problem.entry for problem in problems}
    zeros = {(entry["name"], name) for entry in entries.values() for name in own_integers.undecided(entry)}
    for function, name in sorted(zeros):
        say(
            f"{function}: {name} is 0, as nobody recorded it, which may leave your kernel no work: say what it is, "
            f"such as --integers {name}=1..4096",
            err=True,
        )


class _Run:
    """Measures ``problems``, says what comes of each, and ends with the exit code of the command."""

    def __init__(self, problems: Sequence[Problem], directory: Path, device: Any, seconds: float, as_json: bool):
        from jitgen.deploy import tune as tuning

        self._tuning = tuning
        self._problems, self._directory, self._device = problems, directory, device
        self._seconds, self._as_json = seconds, as_json
        self._done: list[Measured] = []
        self._ahead = tuning.waiting(problems, directory, device)
        self._before = len(problems) - len(self._ahead)

    def measure(self, jobs: int | None) -> None:
        from jitgen.errors import JitgenError

        if stale := sum(one.is_stale for one in self._ahead):
            say(f"{stale} problems were measured by other code, with another compiler or elsewhere: again", err=True)
        started = time.monotonic()
        try:
            self._tuning.tune(self._problems, self._directory, self._device, self._seconds, jobs, self._tell)
        except KeyboardInterrupt:
            self._answer("interrupt", _left(self._ahead, self._done))
            there = f"{self._directory} has what was measured"
            say(f"interrupted; {there}, and the next run goes on after it", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except JitgenError:
            self._answer("error", _left(self._ahead, self._done))
            if self._done:
                there = f"{self._directory} has what was measured before the last problem"
                say(f"{there}; the next run goes on after it", err=True)
            raise
        self._end(time.monotonic() >= started + self._seconds)

    def _tell(self, result: Measured, number: int, total: int) -> None:
        self._done.append(result)
        if not self._as_json:
            _tell(result, number, total)

    def _answer(self, reason: str, left: Sequence[Waiting]) -> None:
        if not self._as_json:
            return
        counts = {"problems": len(self._problems), "measured_before": self._before}
        needed = [{"problem": str(one.problem), "needs": one.needs or None} for one in left]
        measured = list(map(_facts, self._done))
        print_json({"output": str(self._directory), **counts, "measured": measured, "left": needed, "ended_by": reason})

    def _end(self, is_late: bool) -> None:
        """Says what was measured and what is left, after a run that may have ended because it ``is_late``."""
        from jitgen.deploy import measurements

        done, directory, seconds = self._done, self._directory, self._seconds
        left = _left(self._tuning.waiting(self._problems, directory, self._device), done)
        slow = [one.needs for one in left if one.needs > seconds]
        is_over = bool(slow) or is_late
        self._answer("" if not left else "seconds" if is_over else "another run", left)
        if not self._as_json:
            reason = f"--seconds {seconds:g} were over" if is_over else "another run measures them"
            say(_summary(len(self._problems), self._before, done, len(left), reason, directory), err=True)
        if slow:
            budget = measurements.rounded_up(max(slow))
            say(f"{len(slow)} of these need more than --seconds {seconds:g}: give --seconds {budget:g}", err=True)
        if any(result.failed for result in done) or (not done and 0 < len(left) == len(slow)):
            raise click.exceptions.Exit(1)


def _left(ahead: Sequence[Waiting], done: Sequence[Measured]) -> list[Waiting]:
    """Returns what of ``ahead`` was not measured; what failed was."""
    tried = {(result.problem.family, result.problem.identity) for result in done}
    return [one for one in ahead if (one.problem.family, one.problem.identity) not in tried]


def _summary(problems: int, before: int, done: Sequence[Measured], left: int, reason: str, output: Path) -> str:
    failed = sum(result.failed for result in done)
    failures = f", {failed} failed" if failed else ""
    failures += f", {left} left for another run: {reason}" if left else ""
    winners, gone = sum(result.winner is not None for result in done), sum(result.row_gone for result in done)
    rows = f"{winners} rows kept in {output}" + (f", {gone} gone that win no more" if gone else "")
    return f"{problems - left - failed} of {problems} problems measured, {before} of them before{failures}; {rows}"


def _entry_of(function: str | None, texts: tuple[str, ...], target: str) -> Any:
    """Returns the entry that a manifest would have of a call of ``function`` with the arguments of ``--arg``."""
    from jitgen.deploy import manifest as manifests

    if function is None:
        raise click.UsageError("--arg gives the arguments of a function: name one, such as model.py:gate")
    lowered = lower(load_function(function), texts, target, None).lowered
    memory = lowered.memories[: len(lowered.program.inputs)]
    route = lowered.route
    requested = "auto" if route.automatic else route.backend
    return manifests.entry_of(lowered.graph, lowered, lowered.environment, memory, (requested, None))


def _here() -> list[tuple[Any, Any, Any]]:
    """Returns the targets, chips and devices that this machine measures on: its GPU, if it has one, and its CPU."""
    import torch

    from jitgen.schedule import chips
    from jitgen.spec import host_target

    host = (host_target(), None, torch.device("cpu"))
    if not torch.cuda.is_available():
        return [host]
    from jitgen.runtime import cuda

    index = torch.cuda.current_device()
    target = cuda.target_of(index)
    chip = chips.of_device(target, cuda.name_of(index), cuda.multiprocessors(index))
    return [(target, chip, torch.device("cuda", index)), host]


def _list(problems: list[Problem], ahead: Sequence[Waiting], as_json: bool) -> None:
    needs = {(one.problem.family, one.problem.identity): one.needs for one in ahead}
    facts = []
    for problem in problems:
        name = (problem.family, problem.identity)
        sizes = {"candidates": problem.candidates, "tried": len(problem.rows)}
        state = {"measured": name not in needs, "needs": needs.get(name) or None}
        facts.append({"problem": str(problem), **sizes, **state})
    if as_json:
        print_json({"problems": facts})
        return
    rows = [(str(f["problem"]), str(f["candidates"]), str(f["tried"]), "yes" if f["measured"] else "") for f in facts]
    columns = ("problem", "candidates", "to measure", "measured before")
    print_table(columns, rows)
    count = sum(len(problem.rows) for problem in problems)
    say(f"{len(problems)} problems, {count} candidates to measure; columns: {', '.join(columns)}", err=True)


def _tell(result: Measured, done: int, total: int) -> None:
    model = result.seconds[0]
    times = f"{model * 1e6:.1f} us by the model's choice" if model is not None else "the model's choice failed"
    gain = f", {result.gain:.1%} less by {result.winner}" if result.winner is not None else ""
    gain += ", and the row that it had goes" if result.row_gone else ""
    failed = f", {len(result.failures)} failed: {result.failures[0].partition(chr(10))[0]}" if result.failures else ""
    say(f"[{done:{len(str(total))}}/{total}] {result.problem}: {times}{gain}{failed}", err=True)


def _facts(result: Measured) -> dict[str, Any]:
    return {
        "problem": str(result.problem),
        "seconds": list(result.seconds),
        "schedules": [row.as_json["schedule"] for row in result.problem.rows],
        "kept": result.winner.as_json["schedule"] if result.winner is not None else None,
        "gain": result.gain,
        "row_gone": result.row_gone,
        "failures": list(result.failures),
    }
