"""Times row kernels in CUDA C++ with other numbers of threads than the rule's (``RowProblem.threads``).

::

    python -m bench.row_timings timings.json --seed 32001 --shapes 60

Sizes are drawn as ``jitgen bench sweep reductions`` draws them, of rows that one block holds. A line of the output is
``[function, dtype, rows, columns, threads, the schedule, microseconds]``; the rule's own has threads 0, eager torch -1.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench import reductions
from bench.measurement import relative_error
from bench.prebuild import compile_each
from bench.records import write_rows
from bench.rows import Reduction
from bench.streaming import retaining
from bench.timing import medians
from jitgen.families.rows.reduction.cuda_problem import RowProblem
from jitgen.spec import dtype_name

TARGET = "sm_90a"
LONGEST = 8192
CACHED_BYTES = 2**27


@contextmanager
def forced(threads: int) -> Iterator[None]:
    """Within this context a block has so many threads for each row; 0 leaves it to the rule."""
    rule: Any = RowProblem
    before = rule.threads
    if threads:
        rule.threads = property(lambda self: threads)
    try:
        yield
    finally:
        rule.threads = before


def drawn(source: random.Random) -> tuple[Reduction, int, int, torch.dtype]:
    while True:
        reduction, rows, columns, dtype = reductions.draw(source, "cuda")
        if 4 <= columns <= LONGEST and rows * columns <= 2**26:
            return reduction, rows, columns, dtype


def lowered(reduction: Reduction, rows: int, columns: int, dtype: torch.dtype) -> Any:
    specs = reductions.specs_of(reduction, rows, columns, dtype)
    return jitgen.jit(backend="cuda")(reduction.function).lower(*specs, target=TARGET)


def described(reduction: Reduction, rows: int, columns: int, dtype: torch.dtype) -> tuple[int, str]:
    """Returns the threads of a row, and the schedule, by the rule or by ``forced``."""
    schedule = lowered(reduction, rows, columns, dtype).lowered.schedules[0]
    return getattr(schedule, "threads", 0) * getattr(schedule, "cluster", 1), repr(schedule)


def compiled(name: str, rows: int, columns: int, dtype: torch.dtype, threads: int) -> str:
    reduction = next(each for each in reductions.DRAWN if each.name == name)
    try:
        with forced(threads):
            lowered(reduction, rows, columns, dtype).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=32001)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="after which no further case is begun")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    started, source = time.time(), random.Random(options.seed)
    cases, jobs = [drawn(source) for _ in range(options.shapes)], []
    for case in cases:
        own, _ = described(*case)
        threads_of: dict[str, int] = {described(*case)[1]: 0}
        for threads in (own // 4, own // 2, own, 2 * own, 4 * own, 8 * own):
            if 4 <= threads <= 512 and "cluster=1," in next(iter(threads_of)):
                with forced(threads):
                    text = described(*case)[1]
                if "cluster=1," in text:  # what would take a cluster has no form with other threads
                    threads_of.setdefault(text, threads)
        jobs.append((case, {threads: text for text, threads in threads_of.items()}))
    every = [(case[0].name, *case[1:], threads) for case, found in jobs for threads in found]
    print(f"{len(cases)} cases, {len(every)} timings after {time.time() - started:.1f} s", flush=True)
    if options.dry:
        return
    compile_each(compiled, every)
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    results: list[Any] = []
    for (reduction, rows, columns, dtype), found in jobs:
        if time.time() - started > options.seconds:
            break
        moved = 2 * rows * columns * dtype.itemsize
        count = max(2, min(16, CACHED_BYTES // moved))
        sets = [reduction.case(columns, rows).inputs(0, dtype, "cuda") for _ in range(count)]
        exact: Any = reduction.function(*(each.double() for each in sets[0]))
        subjects: dict[str, Any] = {}
        for threads in found:
            with forced(threads):
                plan = jitgen.jit(backend="cuda")(reduction.function).bind(*sets[0])
                out = torch.full(exact.shape, math.nan, dtype=dtype, device="cuda")
                plan(*sets[0], out=out)
            error = relative_error(out, exact)
            if not error < 0.01:
                print("WRONG", reduction.name, rows, columns, dtype, threads, error, flush=True)
            outs = [torch.empty_like(out) for _ in sets]
            subjects[str(threads)] = [partial(plan, *each, out=to) for each, to in zip(sets, outs, strict=True)]
        subjects["-1"] = retaining([partial(reduction.eager, *each, torch.empty_like(out)) for each in sets])
        for name, seconds in medians(subjects, "cuda", 0.1).items():
            text = found.get(int(name), "")
            results.append([reduction.name, dtype_name(dtype), rows, columns, int(name), text, round(seconds * 1e6, 3)])
        write_rows(options.output, results)
    print(f"{len(results)} timings after {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
