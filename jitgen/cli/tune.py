"""Measures schedules on this machine, and keeps those that are faster than what the model chooses: ``jitgen tune``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitgen.cli.show import json_option, print_json, print_table, say
from jitgen.cli.source import arguments_option, load_function, lower

if TYPE_CHECKING:
    from jitgen.deploy.tune import Measured, Problem, Waiting

INTERRUPTED = 130
"""The exit code after an interrupt, as shells have it."""


@click.command()
@click.argument("manifest", metavar="[MANIFEST | FILE_OR_MODULE:FUNCTION]", required=False)
@arguments_option
@click.option("--model", help="A manifest that jitgen ships, such as llama-3-8b.")
@click.option("--target", help="Whose schedules: this machine's GPU [default], or cpu. Only --dry-run takes another's.")
@click.option("--family", "families", multiple=True, help="Such as gemm; give it again for another [default: all].")
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
    from jitgen.deploy import catalog, manifest_schema, measurements
    from jitgen.deploy import tune as tuning
    from jitgen.errors import JitgenError
    from jitgen.families import registry
    from jitgen.spec import Target

    known = [family.name for family in registry.FAMILIES]
    if unknown := [family for family in families if family not in known]:
        raise click.UsageError(f"no family is called {unknown[0]!r}; there are {', '.join(known)}")
    if not math.isfinite(seconds):
        raise click.UsageError(f"--seconds {seconds} is no budget: give a finite number")
    if (manifest is None) == (model is None):
        raise click.UsageError("name a manifest or a function, such as model.py:gate, or a shipped manifest by --model")
    here = _here()
    parsed = Target.parse(target) if target else here[0][0]
    own = [(chip, device) for one, chip, device in here if one == parsed]
    if not own and not dry_run:
        targets = " and ".join(str(one) for one, *_ in here)
        raise click.UsageError(f"this machine measures schedules for {targets}, and not for {parsed}; use --dry-run")
    chip, device = own[0] if own else (None, here[0][2])
    if texts or (manifest is not None and ":" in manifest):
        entries = [_entry_of(manifest, texts, str(parsed))]
    else:
        entries = list(manifest_schema.read(catalog.find(manifest or model or "")))
    problems = list(tuning.problems_of(entries, parsed, chip))
    problems = [problem for problem in problems if not families or problem.family in families]
    if not problems:
        say(
            f"no kernel of {manifest or model} has several schedules for {parsed}: there is nothing to measure",
            err=True,
        )
    directory = output or Path(settings.get("JITGEN_TUNED") or "jitgen-tuned")
    ahead = tuning.waiting(problems, directory, device)
    if dry_run:
        _list(problems, ahead, as_json)
        return
    before = len(problems) - len(ahead)
    if stale := sum(one.is_stale for one in ahead):
        say(f"{stale} problems were measured by other code, with another compiler or elsewhere: again", err=True)
    done: list[Measured] = []

    def tell(result: Measured, number: int, total: int) -> None:
        done.append(result)
        if not as_json:
            _tell(result, number, total)

    def answer(reason: str) -> None:
        if as_json:
            facts = {"output": str(directory), "problems": len(problems), "measured_before": before}
            left = [{"problem": str(one.problem), "needs": one.needs or None} for one in _left(ahead, done)]
            print_json({**facts, "measured": list(map(_facts, done)), "left": left, "ended_by": reason})

    started = time.monotonic()
    try:
        tuning.tune(problems, directory, device, seconds, jobs, tell)
    except KeyboardInterrupt:
        answer("interrupt")
        say(f"interrupted; {directory} has what was measured, and the next run goes on after it", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except JitgenError:
        answer("error")
        if done:
            say(f"{directory} has what was measured before the last problem; the next run goes on after it", err=True)
        raise
    ahead = left = _left(tuning.waiting(problems, directory, device), done)
    slow = [one.needs for one in left if one.needs > seconds]
    is_over = bool(slow) or time.monotonic() >= started + seconds
    answer("" if not left else "seconds" if is_over else "another run")
    if not as_json:
        reason = f"--seconds {seconds:g} were over" if is_over else "another run measures them"
        say(_summary(len(problems), before, done, len(left), reason, directory), err=True)
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
