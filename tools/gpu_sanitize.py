"""compute-sanitizer's tools over small computations of every family, in the CUDA and in the Triton dialect.

::

    python tools/gpu_sanitize.py         # `make gpu-sanitize`; writes docs/measured/device-sanitizer-<card>.json
    python tools/gpu_sanitize.py --tools memcheck --cases 'gemm wgmma' --backends cuda

First every case (``tests/sanitized.py``) runs without a tool: its kernels are compiled, and its results are compared
with float64. Then it runs under memcheck, racecheck, synccheck and initcheck, each time in a process of its own with a
time limit. A control comes first: a kernel with an error for each tool, which the tool has to find, since a filter of
names that matches nothing finds nothing either.

Exit status: 0 where no tool has found an error and no result is wrong, 1 where one has, 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import cards, device_record, gpu_code, processes
from tools.processes import Finished, Job

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
BARE = "none"
"""In place of a tool: the case alone."""
CONTROL = "control"
"""The case that every tool has to find an error in."""
SILENCE = 100.0
"""Seconds without a line of output, after which a process is taken to hang: a line is one problem."""
SECONDS = 540.0
WORKERS = 12
"""For each card."""
RACECHECK = "-DJITGEN_RACECHECK"
"""What makes ``barrier.cuh`` order accesses in ways that racecheck sees."""
FOUND = 9
"""Exit status of compute-sanitizer where it has found an error."""
SUMMARY = re.compile(r"^=+ ((?:RACECHECK|ERROR) SUMMARY: .*)$", re.MULTILINE)
RIGHT = re.compile(r"^0 of \d+ results are wrong$", re.MULTILINE)
"""What a case writes at its end."""
NO_ERROR = re.compile(r"SUMMARY: 0 (?:errors|hazards)")
FIRST_PORT, PORTS = 20000, 16
DETAILS = 12
"""Lines of a tool that a record keeps where it has found something."""


def sanitizer() -> str | None:
    """The program, from the path or from a toolkit."""
    places = [None, *(str(Path(root) / "bin") for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root)]
    return next(filter(None, (shutil.which("compute-sanitizer", path=place) for place in places)), None)


def job(program: str | None, tool: str, backend: str, case: str, number: int = 0) -> Job:
    """A case under a tool. Jobs of different numbers have ports of their own, by which a tool talks to its process."""
    command = [sys.executable, "-m", "tools.gpu_sanitize", "--inside", tool, "--backends", backend, "--cases", case]
    if tool != BARE:
        assert program is not None
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", "--print-limit", "20"]
        options += ["--port", str(FIRST_PORT + PORTS * number), "--max-connections", str(PORTS)]
        if tool != "initcheck":  # which has to see the kernels of torch that write what ours read
            options += ["--kernel-name", "kns=jitgen"]
        command = [program, *options, *command]
    paths = [str(gpu_code.CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["JITGEN_DEBUG"] = "0"  # a tool slows a kernel down, and a wait that is bounded would be over
    environment["JITGEN_NVRTCFLAGS"] = " ".join(["-lineinfo", *([RACECHECK] if tool == "racecheck" else [])])
    return Job(f"{tool}, {case}, {backend}", command, SILENCE, environment)


def judged(finished: Finished) -> dict[str, Any]:
    """The row of a record: the tool's closing line, and whether that is what it has to be."""
    tool, case, backend = finished.job.name.split(", ")
    output = "\n".join(finished.lines)
    summary = SUMMARY.findall(output)
    closing = summary[-1] if summary else (finished.lines[-1] if finished.lines else "")
    clean = finished.status == 0 and bool(RIGHT.search(output)) and (tool == BARE or bool(NO_ERROR.search(closing)))
    if case == CONTROL:
        clean = bool(summary) and not NO_ERROR.search(closing) and finished.status == FOUND
        closing = closing if clean else f"the error of the control was not found: {closing}"
    if finished.status is None:
        closing = f"killed after {finished.seconds:.0f} s; the last line: {closing}"
    row = {"tool": tool, "case": case, "backend": backend, "clean": clean, "closing": closing}
    if not clean:
        told = [line for line in finished.lines if line.startswith("===") or "wrong" in line or "Error" in line]
        row["details"] = [*told[:DETAILS], f"exit status {finished.status}; the last:", *finished.lines[-DETAILS:]]
    return row | {"seconds": round(finished.seconds, 1)}


def run(jobs: Sequence[Job], workers: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The rows of the jobs as they end; those for which no time was left have one, too."""
    waiting: queue.Queue[Job] = queue.Queue()
    for each in jobs:
        waiting.put(each)
    for finished in processes.run(waiting, workers, deadline):
        row = judged(finished)
        print(f"{'ok  ' if row['clean'] else 'FAIL'} {finished.job.name}: {row['closing']}", flush=True)
        yield row
    while not waiting.empty():
        tool, case, backend = waiting.get().name.split(", ")
        yield {"tool": tool, "case": case, "backend": backend, "clean": False, "closing": "not run: no time was left"}


def inside(tool: str, backend: str, case: str) -> int:
    """Run a case in this process, which a tool may watch."""
    from tests import sanitized

    if case == CONTROL:
        from tests import sanitized_control

        sanitized_control.run(tool, backend)
        return 0
    wrong = 0
    for number, problem in enumerate(each for each in sanitized.PROBLEMS if each.case == case):
        mistakes = list(problem.mistakes(backend))
        wrong += bool(mistakes)
        told = f"wrong: {'; '.join(mistakes)}" if mistakes else "right"
        print(f"problem {number}, {problem.shapes}: {told}", flush=True)
    print(f"{wrong} of {number + 1} results are wrong")
    return int(wrong > 0)


def main() -> int:
    from tests import sanitized

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--cases", default=",".join(sanitized.CASES), help="separated by commas (default: all)")
    parser.add_argument("--backends", default=",".join(sanitized.BACKENDS), help="separated by commas")
    parser.add_argument("--workers", type=int, default=cards.workers(WORKERS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of all (default: %(default)s)")
    parser.add_argument("--inside", choices=(*TOOLS, BARE), help=argparse.SUPPRESS)
    device_record.add_options(parser)
    options = parser.parse_args()
    if options.inside is not None:
        return inside(options.inside, options.backends, options.cases)
    os.chdir(gpu_code.CHECKOUT)
    began, program, facts = time.monotonic(), sanitizer(), device_record.facts(options.commit)
    if program is None or facts["card"] is None:
        print("no compute-sanitizer here" if program is None else "no CUDA device here", file=sys.stderr)
        return 2
    tools, cases, backends = (text.split(",") for text in (options.tools, options.cases, options.backends))
    unknown = [name for name in cases if name not in sanitized.CASES] + [name for name in tools if name not in TOOLS]
    if unknown:
        parser.error(f"no {', '.join(unknown)}; cases are {', '.join(sanitized.CASES)}; tools are {', '.join(TOOLS)}")
    with tempfile.TemporaryDirectory(prefix="gpu-sanitize-") as store:
        os.environ["JITGEN_CACHE_DIR"] = store
        deadline = began + options.seconds
        bare = [job(program, BARE, backend, case) for case in cases for backend in backends]
        rows = list(run(bare, options.workers, deadline))
        broken = {(row["case"], row["backend"]) for row in rows if row["closing"].startswith("killed")}
        controls = [*((tool, "cuda") for tool in tools), *([("memcheck", "triton")] if "memcheck" in tools else [])]
        watched = [job(program, tool, backend, CONTROL, at) for at, (tool, backend) in enumerate(controls)]
        for case, backend in ((case, backend) for case in cases for backend in backends):
            if (case, backend) not in broken:  # what hangs alone would hang again
                watched += [job(program, tool, backend, case, len(watched) + at) for at, tool in enumerate(tools)]
        rows += run(watched, options.workers, deadline)
    failed = [row for row in rows if not row["clean"]]
    seconds = round(time.monotonic() - began, 1)
    print(f"{len(rows) - len(failed)} of {len(rows)} runs are clean, in {seconds} s")
    record = {"command": " ".join(["python", *sys.argv]), "seconds": seconds, "clean": not failed, "runs": rows}
    if options.directory is not None or not [name for name in sanitized.CASES if name not in cases]:
        device_record.write("sanitizer", facts | record, options.directory)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
