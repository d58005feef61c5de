"""Random programs on a GPU, their results and their gradients, in the CUDA and in the Triton dialect.

::

    python tools/gpu_programs.py                                  # 2,000 of each; 9 minutes at most
    python tools/gpu_programs.py --first-seed 2000 --backends triton
    python tools/gpu_programs.py --seeds 17,240 --backends cuda   # these again, with what is wrong
    python tools/gpu_programs.py --checks routing,routing-gradients --programs 200
    python tools/gpu_programs.py --add OUT/device-programs-h100.json    # add a record to that of docs/measured

A seed is a program (``tests/programs.py``), for the checks of routing a mixture of experts
(``tests/routing_programs.py``). It is right, refused by name and line, or a failure: wrong, another error, or without
an end. A failure is shown with the fewest statements that fail, a mixture with its arguments. Compiling on the host
takes most of the time, and all processors share it. A process in which a program takes too long is killed, and another
one goes on.

The record is ``docs/measured/device-programs-<card>.json``: the seeds, and what became of them. Where one is there that
was made with the same GPU code, the new runs are added to it.

Exit status: 0 where no program failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import cards, device_record, gpu_code, processes
from tools.processes import Finished, Job

PROGRAMS = 2000
SECONDS = 540.0
SILENCE = 60.0
"""Seconds that a program may take, or a process to start."""
CHUNK = 50
"""Programs of one process: it takes 6 s to start."""
WORKERS = 14
"""For each card."""
CHECKS = ("results", "gradients")
ROUTING_CHECKS = ("routing", "routing-gradients")
FAILURES = ("wrong", "crash", "hang")


# ----------------------------------------------------------------------------------------------- within a process


def inside(backend: str, device: str, checks: Sequence[str], seeds: Sequence[int]) -> int:
    """Try the programs of ``seeds``, and write a line of JSON before and after each check of each."""
    import jitgen
    from tests import routing_programs
    from tests.program_gradients import gradient_verdict
    from tests.programs import Program, Verdict, draw, verdict

    def judge(program: Any, check: str) -> Verdict:
        if check in ROUTING_CHECKS:
            gradients = check == ROUTING_CHECKS[1]
            return routing_programs.judged(program, jitgen.jit(backend=backend), gradients, device)
        judged: Callable[..., Verdict] = {"results": verdict, "gradients": gradient_verdict}[check]
        return judged(program, jitgen.jit(program.function(), backend=backend))

    def shortest(program: Program, check: str) -> Program:
        """``program`` without the statements that it can do without and fail in the same way."""
        wanted, _ = judge(program, check)
        for number in reversed(range(program.text.count("\n") - 2)):
            say(shortening=number)
            shorter = program.without(number)
            try:
                if shorter is not None and judge(shorter, check)[0] == wanted:
                    program = shorter
            except Exception as error:  # what eager torch refuses is no shorter program
                say(error=str(error)[:100])
        return program

    for seed in seeds:
        for check in checks:
            routes = check in ROUTING_CHECKS
            program: Any = routing_programs.program(seed) if routes else draw(random.Random(seed).choice).on(device)
            say(seed=seed, check=check, text=repr(program) if routes else program.text)
            kind, found = judge(program, check)
            shown = program if routes or kind not in FAILURES else shortest(program, check)
            found_of = {"found": found[:500], "program": repr(shown)} if kind in FAILURES else {}
            say(seed=seed, check=check, kind=kind, **found_of)
            if kind == "crash" and _context_is_lost():
                return 1
    return 0


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def _context_is_lost() -> bool:
    from tests.watched import context_is_lost

    return context_is_lost()


# --------------------------------------------------------------------------------------------------- over processes


def job(backend: str, device: str, checks: Sequence[str], seeds: Sequence[int]) -> Job:
    command = [sys.executable, "-m", "tools.gpu_programs", "--inside", device, "--backends", backend]
    command += ["--checks", ",".join(checks), "--seeds", ",".join(map(str, seeds))]
    paths = [str(gpu_code.CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Job(backend, command, SILENCE, {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"})


def told(finished: Finished) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What a process has said of its programs, and which it had begun when it ended."""
    rows: list[dict[str, Any]] = []
    begun: dict[str, Any] | None = None
    for line in finished.lines:
        try:
            each = json.loads(line)
        except ValueError:  # a warning of another library
            continue
        if isinstance(each, dict) and "kind" in each:
            rows.append(each)
            begun = None
        elif isinstance(each, dict) and "text" in each:
            begun = each
    return rows, begun


def run(
    backend: str, device: str, checks: Sequence[str], seeds: Sequence[int], workers: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """What became of each check of each seed, as processes end; nothing of those for which no time was left."""
    waiting: queue.Queue[Job] = queue.Queue()
    size = max(1, min(CHUNK, -(-len(seeds) // workers)))
    for start in range(0, len(seeds), size):
        waiting.put(job(backend, device, checks, seeds[start : start + size]))
    for finished in processes.run(waiting, workers, deadline):
        rows, begun = told(finished)
        yield from rows
        if time.monotonic() >= deadline:
            continue
        mine = [int(seed) for seed in finished.job.command[-1].split(",")]
        done = rows[-1]["seed"] if rows else None
        if begun is not None:  # it hangs, or has taken its process with it
            kind = "hang" if finished.status is None else "crash"
            last = "; ".join(finished.lines[-2:])[-300:]
            found = f"killed after {SILENCE:.0f} s" if kind == "hang" else f"exit status {finished.status}: {last}"
            yield {**begun, "kind": kind, "found": found, "program": begun["text"]}
            done = begun["seed"]
        elif finished.status != 0 and done is None:
            yield {"seed": mine[0], "check": checks[0], "kind": "crash", "found": "; ".join(finished.lines[-3:])[-500:]}
            done = mine[0]
        rest = mine[mine.index(done) + 1 :] if done is not None else []
        if finished.status != 0 and rest:
            waiting.put(job(backend, device, checks, rest))


def summary(backend: str, check: str, seeds: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a record."""
    kinds = Counter(row["kind"] for row in rows)
    failures = [row for row in rows if row["kind"] in FAILURES]
    return {
        "backend": backend,
        "check": check,
        "first_seed": min(seeds),
        "last_seed": max(seeds),
        "programs": len(rows),
        "left_out": len(seeds) - len(rows),
        **dict(sorted(kinds.items())),
        "failures": sorted(failures, key=lambda row: row["seed"]),
    }


def merged(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """``record`` with the runs of the one at ``path``, if that was made with the same GPU code."""
    if not path.exists():
        return record
    earlier = json.loads(path.read_text())
    same = earlier["gpu_code_digest"] == record["gpu_code_digest"]
    return record | {"runs": [*(earlier["runs"] if same else ()), *record["runs"]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="seeds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", help="these alone, separated by commas")
    parser.add_argument("--backends", default="cuda,triton", help="separated by commas (default: %(default)s)")
    every = ", ".join((*CHECKS, *ROUTING_CHECKS))
    parser.add_argument("--checks", default=",".join(CHECKS), help=f"of {every}, separated by commas")
    parser.add_argument("--workers", type=int, default=cards.workers(WORKERS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of all (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cpu: for --backends cpp; no record is written")
    parser.add_argument("--add", type=Path, help="add the runs of this record to that of docs/measured, and end")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    device_record.add_options(parser)
    options = parser.parse_args()
    checks, backends = options.checks.split(","), options.backends.split(",")
    if options.add is not None:
        record = json.loads(options.add.read_text())
        path = device_record.path_of("programs", record["card"], options.directory)
        device_record.write("programs", merged(record, path), options.directory)
        return 0
    chosen = range(options.first_seed, options.first_seed + options.programs)
    seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else list(chosen)
    if options.inside is not None:
        return inside(*backends, options.inside, checks, seeds)
    os.chdir(gpu_code.CHECKOUT)
    began, runs = time.monotonic(), []
    facts = device_record.facts(options.commit)
    with tempfile.TemporaryDirectory(prefix="gpu-programs-") as store:
        os.environ["JITGEN_CACHE_DIR"] = store
        for number, backend in enumerate(backends):
            share = (began + options.seconds - time.monotonic()) / (len(backends) - number)
            rows = []
            for row in run(backend, options.device, checks, seeds, options.workers, time.monotonic() + share):
                rows.append(row)
                if row["kind"] in FAILURES:
                    print(f"{backend}, {row['check']}, seed {row['seed']}: {row['kind']}: {row['found']}", flush=True)
                    print(row.get("program", ""), flush=True)
            for check in checks:
                found = summary(backend, check, seeds, [row for row in rows if row["check"] == check])
                runs.append(found)
                print(", ".join(f"{name} {value}" for name, value in found.items() if name != "failures"), flush=True)
    seconds = round(time.monotonic() - began, 1)
    record = facts | {"command": " ".join(["python", *sys.argv]), "seconds": seconds, "runs": runs}
    if options.device == "cuda" and facts["card"] is not None and not options.seeds:
        path = device_record.path_of("programs", facts["card"], options.directory)
        device_record.write("programs", merged(record, path), options.directory)
    return int(any(each["failures"] for each in runs))


if __name__ == "__main__":
    sys.exit(main())
