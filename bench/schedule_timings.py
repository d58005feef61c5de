"""Times schedules that a rule could choose, through whole calls: what the models of Triton's products and of the
``simt`` mainloop are fitted to.

::

    python -m bench.schedule_timings timings.json --seed 31001 --shapes 10 --kinds "triton int4" "triton dense" simt

For each kind sizes are drawn as ``jitgen bench sweep`` draws them. Every tile of ``TILES`` that suits the rows is
forced on the product, with some numbers of ranges of K, compiled ahead in as many processes as there are cores, and
timed in a CUDA graph over rotating copies of the weights, with the second kernel where K is split. Each result is
compared with float64, and a wrong one is reported. A line of the output is ``[kind, rows, columns, length, the
schedule's class, its fields, microseconds]``; torch's product has the kind ``cublas``.

Neighbour: ``gemm_timings.py``, which times candidates that one source has for several launches.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import relative_error
from bench.prebuild import compile_each
from bench.products import linear
from bench.records import write_rows
from bench.sizes import log_uniform, side
from bench.timing import graph_seconds
from jitgen.families.gemm.mainloops import Simt, TritonSlices, TritonTokens, TritonWeights
from jitgen.families.gemm.schedule import ROW_BUCKETS, bucket
from jitgen.families.gemm.schedules import cuda, triton

KINDS = {
    "triton int4": ("triton", torch.bfloat16, "int4", 8192),
    "triton dense": ("triton", torch.bfloat16, None, 8192),
    "simt": ("cuda", torch.float32, None, 4096),
}
"""The backend, the dtype of x, the format of the weights, and the most rows."""
MOST_WEIGHTS = {"triton int4": 3e8, "triton dense": 3e8, "simt": 6e7}
MOST_PRODUCTS = {"triton int4": 1e12, "triton dense": 1e12, "simt": 5e10}
LEAST_ROWS = {"simt": 9}
SPLITS = (1, 2, 3, 4, 6, 8)
TARGET = "sm_90a"
COPIED_BYTES = 2**28
"""Bytes after which a copy of the weights is certainly not in the second-level cache any more."""


def drawn(source: random.Random, kind: str) -> tuple[int, int, int]:
    """(rows, columns, length); each bucket of rows is as likely as another."""
    least, most = LEAST_ROWS.get(kind, 1), KINDS[kind][-1]
    while True:
        ends = (0, *(end for end in ROW_BUCKETS if end > least or least == 1), most)
        number = source.randrange(len(ends) - 1)
        low = max(least, ends[number] + 1)
        rows = int(log_uniform(source, low, ends[number + 1] + 1))
        columns, length = side(source, 16), side(source, 128)
        if columns * length <= MOST_WEIGHTS[kind] and rows * columns * length <= MOST_PRODUCTS[kind]:
            return rows, columns, length


def tiles(kind: str, rows: int) -> Sequence[Any]:
    """The tiles to time for a bucket of ``rows``."""
    if kind == "simt":
        shapes = (
            *((64, 64, 16, 4), (64, 64, 32, 4), (64, 128, 32, 4), (64, 128, 16, 4), (128, 128, 8, 8), (128, 64, 16, 4)),
            *((128, 64, 8, 4), (128, 128, 16, 8), (256, 128, 8, 8), (256, 128, 16, 8)),
        )
        return [Simt(*shape) for shape in shapes if shape[0] <= 4 * rows]
    weights, tokens = partial(TritonWeights, raster=8), partial(TritonTokens, raster=8)
    if kind == "triton int4":
        few: list[Any] = [TritonSlices(rows, n, 128, warps, 3) for n, warps in ((16, 4), (16, 8), (32, 4), (32, 8))]
        few += [weights(rows, 64, 128, 4, 3)] * (rows == 16)
        middle: list[Any] = [
            weights(64, *rest) for rest in ((64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 3), (128, 64, 8, 4))
        ]
        many: list[Any] = [
            weights(128, *rest) for rest in ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 128, 4, 3))
        ]
        many += [weights(128, 128, 128, 8, 3)]
        many += [weights(256, 128, 64, 8, 3), weights(256, 64, 64, 8, 3)] * (rows > 192)
    else:
        few = [TritonSlices(rows, n, 64, warps, 4) for n, warps in ((16, 4), (16, 8), (32, 4), (32, 8))]
        few += [weights(rows, n, k, 4, 5) for n, k in ((64, 128), (128, 64))] * (rows >= 8)
        middle = [weights(64, *rest) for rest in ((64, 128, 4, 5), (128, 64, 4, 5))]
        middle += [tokens(64, *rest) for rest in ((64, 64, 4, 5), (128, 64, 4, 4), (256, 64, 8, 3))]
        many = [tokens(128, *rest) for rest in ((128, 64, 8, 4), (128, 64, 4, 4), (64, 64, 4, 4), (256, 64, 8, 3))]
        many += [tokens(128, 256, 64, 8, 4)]
        many += [tokens(256, *rest) for rest in ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 8, 4))] * (rows > 192)
    return few if rows <= 16 else middle if rows <= 64 else [*many, *middle] if rows <= 512 else many


def variants(kind: str, rows: int, columns: int, length: int) -> Iterator[Any]:
    """The schedules to time: the rule's (None), and each tile without splits and with the numbers of them that about
    fill the device."""
    yield None
    for tile in tiles(kind, bucket(rows)):
        yield tile
        blocks = -(-bucket(rows) // tile.block_m) * -(-columns // tile.block_n)
        iterations = length // tile.block_k
        for room in (132, 264, 528) if bucket(rows) <= 16 else (132, 264):
            splits = max((each for each in SPLITS if each * blocks <= room and iterations >= 4 * each), default=1)
            if splits > 1:
                name = "cluster_k_splits" if kind == "simt" else "k_splits"
                yield dataclasses.replace(tile, **{name: splits if kind != "simt" else 1 << (splits.bit_length() - 1)})


@contextmanager
def forced(schedule: Any) -> Iterator[None]:
    """Within this context every product has this schedule; None leaves it to the rule."""
    if schedule is None:
        yield
        return
    rule: Any = cuda if isinstance(schedule, Simt) else triton

    def fitted(problem: Any) -> list[Any]:
        made = dataclasses.replace(schedule, wide=problem.wide)
        if rule is cuda:
            return cuda._within_shared_memory([cuda._with_stages_that_fit(made, problem)], problem.target.shared_bytes)
        return [triton._fitted_to_target(made, problem)]

    before, rule.candidates = rule.candidates, fitted
    try:
        yield
    finally:
        rule.candidates = before


def function_of(kind: str) -> Any:
    return jitgen.jit(backend=KINDS[kind][0])(linear)


def compiled(kind: str, rows: int, columns: int, length: int, schedule: Any) -> str:
    """Compiles the kernels of one schedule into the store; what went wrong, or nothing."""
    _, dtype, format, _ = KINDS[kind]
    x = jitgen.TensorSpec((rows, length), dtype)
    w = jitgen.TensorSpec((columns, length), dtype, format=format, group_size=128 if format else None)
    try:
        with forced(schedule):
            function_of(kind).lower(x, w, target=TARGET).compile()
    except Exception as error:  # reported, and the schedule left out
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=31001)
    parser.add_argument("--shapes", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds", type=float, default=100, help="after which no further problem is begun")
    parser.add_argument("--dry", action="store_true", help="only count what would be timed")
    options = parser.parse_args()
    started, source = time.time(), random.Random(options.seed)
    problems = [(kind, *drawn(source, kind)) for _ in range(options.shapes) for kind in options.kinds]
    jobs = {problem: list(dict.fromkeys(variants(*problem))) for problem in problems}
    every = [(*problem, schedule) for problem, schedules in jobs.items() for schedule in schedules]
    # One call for each source: which sizes are multiples of 16 is all of them that a source depends on.
    sources = {(kind, bucket(m), n % 16, k % 128, repr(each)): (kind, m, n, k, each) for kind, m, n, k, each in every}
    print(f"{len(problems)} problems, {len(every)} timings, about {len(sources)} sources", flush=True)
    if options.dry:
        return
    compile_each(compiled, list(sources.values()))
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    results: list[Any] = []
    with torch.no_grad():
        for problem, schedules in jobs.items():
            if time.time() - started > options.seconds:
                break
            results += _timed(problem, schedules)
            write_rows(options.output, results)
    print(f"{len(results)} timings after {time.time() - started:.1f} s")


def _timed(problem: tuple[str, int, int, int], schedules: Sequence[Any]) -> Iterator[Any]:
    kind, rows, columns, length = problem
    _, dtype, format, _ = KINDS[kind]
    dense = (torch.randn(columns, length, device="cuda") * 0.02).to(dtype)
    weight: Any = jitgen.quantize(dense, format, 128) if format else dense
    size = columns * length * (0.53 if format else dtype.itemsize)
    weights = [weight, *(weight.clone() for _ in range(max(1, min(15, int(COPIED_BYTES // size)))))]
    x = torch.randn(rows, length, device="cuda").to(dtype)
    exact = x.double() @ (weight.dequantize(torch.float64) if format else weight.double())[:256].T
    for schedule in schedules:
        try:
            with forced(schedule):
                function = function_of(kind)
                for each in weights:
                    function(x, each)
                plan = function.bind(x, weights[0])
                out = torch.full((rows, columns), math.nan, dtype=dtype, device="cuda")
                plan(x, weights[0], out=out)
            error = relative_error(out[:, :256], exact)
            if not error < 0.02:
                print("WRONG", problem, schedule, error, flush=True)
            microseconds = graph_seconds([partial(plan, x, each, out=out) for each in weights]) * 1e6
        except Exception as error:
            print("not timed", problem, schedule, f"{type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        fields = {} if schedule is None else dataclasses.asdict(schedule)
        yield [*problem, "rule" if schedule is None else type(schedule).__name__, fields, round(microseconds, 3)]
    peers = [dense, *(dense.clone() for _ in range(max(1, min(7, COPIED_BYTES // max(1, dense.nbytes)))))]
    microseconds = graph_seconds([partial(F.linear, x, each) for each in peers]) * 1e6
    yield ["cublas", *problem[1:], kind, {}, round(microseconds, 3)]


if __name__ == "__main__":
    main()
