"""Tests on a GPU, none of which can block the others: a test that exceeds its time limit is killed and named.

::

    python tools/gpu_test.py                     # `make gpu-test`; writes docs/measured/device-tests-<card>.json
    python tools/gpu_test.py -- -k softmax       # arguments of pytest; a selection writes no record of its own accord
    python tools/gpu_test.py --directory OUT --commit 1a2b3c4    # where there is no git, and the record goes elsewhere
    python tools/gpu_test.py --continue          # what the last run has left out, added to its record

A process that waits for a kernel that never ends cannot stop it, and the kernel may keep the card from all other
processes. So the tests run in pytest-xdist's workers, and this process watches these (``tests/watched.py`` says what
each runs since when). It kills a worker whose test exceeds the limit, which frees the card; xdist names the test and
starts another worker. What the others run may have waited for the card, so their limits begin anew after each kill. At
the end each test that was killed runs again, alone and with twice the time, and is called a hang if it is killed again.
A hang runs a third time, with bounded waits (`JITGEN_DEBUG=5`), so that the kernel names the barrier at which it waits.

Exit status: 0 where every test passed or was skipped, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jitgen import settings
from tests.watched import CARDS, CASES_KILLED, FOLDER, ONLY
from tools import cards, device_record

CHECKOUT = Path(__file__).resolve().parents[1]
PATHS = ("tests/device", "tests/compile/test_load_inline.py", "tests/compile/test_load_inline_families.py")
"""Where tests are that need a GPU: every worker imports all of these, which takes it 10 s."""
MOST_WORKERS = 14
"""For each card: more share its memory and its time without a gain."""
TEST_SECONDS = 60.0
"""Limit of a test. The slowest compile 30 kernels of CUTLASS, which takes 30 s where no store has them."""
ALONE = 2.0
"""A test that runs again, alone, has so many times the limit: Inductor may take 80 s for a package."""
SECONDS = 480.0
"""Limit of the whole: less than the 10 minutes after which many machines with GPUs end a command."""
CASES = 2
"""Cases of a test that may be killed before its other cases are not run."""
SAME = ("gpu_code_digest", "commit", "card", "driver", "cuda", "nvrtc", "python", "torch", "triton", "system")
"""What a run has in common with the record that it continues."""
SPARE = 2
"""Processors that are left to those that compile."""
SLOWEST = 4 * MOST_WORKERS
"""Slow tests that a record names: the workers of the next run begin with them."""
IDLE_SECONDS = 60.0
"""After so many seconds without a test that runs, the run is ended: a process of it has died in a way unforeseen."""
RANK = ("passed", "skipped", "not run", "failed")
"""What a report may say of a test; of several the last in this order holds."""
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ \w+, )*\d+ \w+ in [\d.]+s.*?)(?: =+)?$", re.MULTILINE)


@dataclass
class Run:
    """What became of one run of pytest.

    Attributes:
        collected: all tests.
        outcomes: of each test that was reported: ``"passed"``, ``"failed"``, ``"skipped"`` or ``"not run"``.
        errors: what each that failed says.
        seconds: what each test took.
        killed: tests whose workers were killed, in order.
        interrupted: tests that ran when the run was ended.
        closing: pytest's last line; empty where the run was ended.
    """

    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    closing: str = ""


@dataclass(frozen=True)
class Limits:
    """Time limits, in seconds; see the constants of the same names."""

    test: float = TEST_SECONDS
    whole: float = SECONDS
    idle: float = IDLE_SECONDS
    cases: int = CASES


# ------------------------------------------------------------------------------------------------------- one run


def slowest_before() -> list[str]:
    """Names the tests that took longest in the newest records, the slowest first."""
    seconds: dict[str, float] = {}
    for path in device_record.DIRECTORY.glob("device-tests-*.json"):
        seconds |= json.loads(path.read_text(encoding="utf-8")).get("slowest", {})
    return sorted(seconds, key=lambda test: -seconds[test])


def run_pytest(
    arguments: Sequence[str],
    workers: int,
    limits: Limits,
    deadline: float,
    variables: Mapping[str, str] = MappingProxyType({}),
    only: Sequence[str] = (),
) -> Run:
    """Run pytest with ``workers`` processes until it ends, or until ``deadline`` on the monotonic clock.

    Where ``only`` names tests, the others are not run.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-test-") as temporary:
        folder = Path(temporary)
        (folder / "running").mkdir()
        (folder / "slowest").write_text("\n".join(slowest_before()))
        if only:
            (folder / ONLY).write_text("\n".join(only))
        environment = {**os.environ, FOLDER: temporary, CASES_KILLED: str(limits.cases), "PYTHONUNBUFFERED": "1"}
        environment |= {CARDS: ",".join(cards.visible()), **variables}
        paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "pytest", "-p", "tests.watched", "-p", "no:cacheprovider", "-n", str(workers)]
        command += ["--dist", "worksteal", "--max-worker-restart", "10000", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
        tail = bytearray()
        echo = threading.Thread(target=_echo, args=(process, tail), daemon=True)
        echo.start()
        interrupted: list[str] = []
        try:
            interrupted = _watch(process, folder, limits, deadline)
        finally:
            if process.poll() is None:
                kill(process.pid)
                process.wait()
        echo.join(timeout=5)
        run = _result(folder, tail.decode(errors="replace"))
        run.interrupted = interrupted
        return run


def _echo(process: subprocess.Popen[bytes], tail: bytearray) -> None:
    """Pass on what pytest writes, and keep the end of it."""
    assert process.stdout is not None
    while chunk := os.read(process.stdout.fileno(), 65536):
        os.write(sys.stdout.fileno(), chunk)
        tail += chunk
        del tail[:-65536]


def _watch(process: subprocess.Popen[bytes], folder: Path, limits: Limits, deadline: float) -> list[str]:
    """Kill what exceeds its limit until the run ends or must end; the tests that run then."""
    fresh = last_seen = time.monotonic()
    killed: set[tuple[int, float]] = set()
    while process.poll() is None:
        time.sleep(0.1)
        now = time.monotonic()
        running = [each for each in _running(folder) if (each[0], each[1]) not in killed]
        last_seen = now if running else last_seen
        exceeded = [each for each in running if now - max(each[1], fresh) > limits.test]
        for pid, began, test in exceeded:
            say(f"{test} has run for {now - began:.0f} s: its process is killed")
            with (folder / "killed").open("a") as file:
                file.write(f"{test}\n")
            killed.add((pid, began))
            kill(pid)
            (folder / "running" / str(pid)).unlink(missing_ok=True)
        if exceeded:
            fresh = last_seen = time.monotonic()  # what the others run may have waited for the card
        if now > deadline or now - last_seen > limits.idle:
            why = f"{limits.whole:.0f} s are over" if now > deadline else f"no test ran for {limits.idle:.0f} s"
            say(f"{why}: the run is ended")
            return [test for _, _, test in running]
    return []


def _running(folder: Path) -> Iterator[tuple[int, float, str]]:
    """(process, when it began, test) of each worker that runs a test."""
    for path in (folder / "running").glob("[0-9]*"):
        try:
            began, _, test = path.read_text().partition(" ")
        except FileNotFoundError:
            continue
        if _is_alive(int(path.name)):
            yield int(path.name), float(began), test
        else:
            path.unlink(missing_ok=True)


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process and its parent; None where it is gone."""
    try:
        # After the name in parentheses, which may have any characters: state, parent.
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return state, int(parent)


def _is_alive(pid: int) -> bool:
    """Whether a process is there and is not one that has ended and whose parent has not noticed."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def kill(pid: int) -> None:
    """End a process and those that it has started, at once: they may hold a part of the card too."""
    children: dict[int, list[int]] = {}
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        if (stat := _stat(process)) is not None:
            children.setdefault(stat[1], []).append(process)
    ending = [pid]
    for process in ending:
        ending += children.get(process, [])
    for process in ending:
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _result(folder: Path, output: str) -> Run:
    run = Run()
    for name, lines in (("collected", run.collected), ("killed", run.killed)):
        if (folder / name).exists():
            lines += (folder / name).read_text().splitlines()
    reports = (folder / "reports").read_text().splitlines() if (folder / "reports").exists() else []
    outcomes: dict[str, str] = {}
    for report in map(json.loads, reports):
        test, outcome = report["test"], report["outcome"]
        outcomes[test] = max(
            outcomes.get(test, "passed"), outcome, key=("passed", "skipped", "not run", "failed").index
        )
        run.seconds[test] = run.seconds.get(test, 0.0) + report["seconds"]
        if outcome == "failed":
            run.errors[test] = report["error"]
        if report["when"] not in ("setup", "call"):  # the last report, or that of a worker that has died
            run.outcomes[test] = outcomes[test]
    closing = CLOSING.findall(re.sub(r"\x1b\[[\d;]*m", "", output))
    run.closing = closing[-1] if closing else ""
    return run


# ----------------------------------------------------------------------------------------------------- the whole


def run_all(
    options: Sequence[str], paths: Sequence[str], workers: int, limits: Limits, only: Sequence[str] = ()
) -> dict[str, Any]:
    """All tests of ``paths``, or ``only`` some, and then each that was killed again, alone; what the record says."""
    began = time.monotonic()
    deadline = began + limits.whole
    first = run_pytest([*options, *paths], workers, limits, deadline, only=only)
    hangs = sorted(set(first.killed))
    # After a case that hangs, the other cases of its test are not run again.
    once = Limits(ALONE * limits.test, limits.whole, limits.idle, cases=1)
    alone = Run()
    if hangs and time.monotonic() < deadline:
        say(f"{len(hangs)} tests were killed; each runs again, alone")
        alone = run_pytest([*options, *hangs], 1, once, deadline)
    bounded = Run()
    if alone.killed and time.monotonic() < deadline:
        say("what hangs runs with bounded waits, by which a kernel names the barrier at which it waits")
        debug = {"JITGEN_DEBUG": str(settings.BOUNDED_WAITS)}
        bounded = run_pytest([*options, *alone.killed], 1, once, deadline, debug)
    ended_alone = {test: found for test, found in alone.outcomes.items() if test not in alone.killed}
    outcomes = dict.fromkeys(first.collected, "not run") | first.outcomes
    outcomes |= dict.fromkeys(hangs, "hangs") | dict.fromkeys(alone.interrupted, "not run")
    outcomes |= {test: found for test, found in ended_alone.items() if found != "not run"}
    names = {kind: sorted(test for test, found in outcomes.items() if found == kind) for kind in set(outcomes.values())}
    slowest = sorted(first.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    errors = {**first.errors, **alone.errors}
    return {
        "cards": len(cards.visible()),
        "closing": [run.closing for run in (first, alone) if run.closing],
        **{kind.replace(" ", "_"): len(names.get(kind, ())) for kind in ("passed", "skipped", "failed", "not run")},
        "hangs": names.get("hangs", []),
        "waits": {test: told.strip()[:300] for test, told in bounded.errors.items() if test not in bounded.killed},
        "killed_once": [test for test in hangs if outcomes[test] != "hangs"],
        "failures": {test: errors[test].strip()[:300] for test in names.get("failed", ())},
        "interrupted": sorted({*first.interrupted, *alone.interrupted}),
        "left_out": names.get("not run", []),
        "slowest": {test: round(seconds, 1) for test, seconds in slowest},
        "seconds": round(time.monotonic() - began, 1),
        "workers": workers,
        "seconds_of_a_test": limits.test,
        "debug": settings.get("JITGEN_DEBUG"),
    }


def continued(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the record that a run continues, which ends the program where the two have not the same in common."""
    if not path.exists():
        sys.exit(f"there is no {path}, which --continue would add to: run without it")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    differs = [name for name in SAME if record[name] != facts[name]]
    if differs:
        told = ", ".join(f"{name} was {record[name]} and is {facts[name]}" for name in differs)
        sys.exit(f"{path} is of another run ({told}): run without --continue")
    if not record["left_out"]:
        sys.exit(f"{path} has left nothing out: there is nothing to continue")
    return record


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says of two runs, the second of which ran what the first had left out."""
    sums = ("passed", "skipped", "failed", "seconds", "closing")
    slowest = sorted((before["slowest"] | after["slowest"]).items(), key=lambda item: -item[1])
    return {
        **after,
        **{name: before[name] + after[name] for name in sums},
        **{name: sorted({*before[name], *after[name]}) for name in ("hangs", "killed_once")},
        **{name: before[name] | after[name] for name in ("waits", "failures")},
        "slowest": dict(slowest[:SLOWEST]),
        "runs": before.get("runs", 1) + 1,
    }


def say(text: str) -> None:
    print(f"\ngpu-test: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    workers = cards.workers(MOST_WORKERS, SPARE)
    parser.add_argument("--workers", type=int, default=workers, help="processes (default: %(default)s)")
    parser.add_argument("--marks", default="gpu and not slow", help="pytest's -m (default: %(default)s)")
    parser.add_argument("--test-seconds", type=float, default=TEST_SECONDS, help="limit of a test")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of all")
    add = "run what the record has left out when its time was over, and add to it"
    parser.add_argument("--continue", dest="continues", action="store_true", help=add)
    device_record.add_options(parser)
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="of pytest, such as -k softmax")
    options = parser.parse_args()
    arguments = options.arguments
    named = [each for each in arguments if each.startswith("tests/")]
    others = [each for each in arguments if each not in named]
    os.chdir(CHECKOUT)
    facts = device_record.facts(options.commit)  # before the tests: one of them may leave a card that does not answer
    limits = Limits(options.test_seconds, options.seconds)
    path = device_record.path_of("tests", facts["card"] or "", options.directory)
    before = continued(path, facts) if options.continues else None
    only = before["left_out"] if before else ()
    result = run_all(["-m", options.marks, *others], named or PATHS, options.workers, limits, only)
    result = joined(before, result) if before else result
    for kind in ("hangs", "waits", "interrupted", "failures", "left_out"):
        for test in result[kind]:
            told = result[kind][test] if isinstance(result[kind], Mapping) else ""
            print(f"{kind}: {test}{told and f': {told}'}")
    counts = ", ".join(
        f"{result[kind]} {kind.replace('_', ' ')}" for kind in ("passed", "failed", "skipped", "not_run")
    )
    say(f"{counts}, {len(result['hangs'])} hang, in {result['seconds']} s")
    command = shlex.join(["make", os.environ.get("MAKECMDGOALS") or "gpu-test", *arguments])
    whole = not arguments and options.marks == parser.get_default("marks")
    if whole or options.directory is not None:
        device_record.write("tests", facts | {"command": command} | result, options.directory)
    return int(bool(result["hangs"] or result["failed"] or result["not_run"] or not result["closing"]))


if __name__ == "__main__":
    sys.exit(main())
