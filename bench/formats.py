"""Products with weights of every format, compared with int4 of the same shape, at random sizes.

Time should follow the bytes of a weight: formats of 2 bits are then faster than int4, those of 4 bits as fast, and
formats of 3, 5 and 6 bits between their neighbours. Rows of x are drawn from two ranges, ``FEW`` (reading weights is
the limit) and ``MANY`` (arithmetic is), each with sizes of its own. All formats of a size are timed in alternation.
``summary`` condenses a run. It stops after ``SECONDS``, and says what it left out.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import jitgen
from bench.measurement import Bench, Measurement
from bench.products import GROUP, MAX_COPIES, Product, linear, product_error
from bench.sizes import log_uniform
from bench.timing import Call, medians
from jitgen.quant.formats import FORMATS, find
from jitgen.quant.qtensor import QTensor
from jitgen.spec import dtype_name

BASE = "int4"
"""The format that others are compared with."""
FEW, MANY = "few rows", "many rows"
ROWS = {"cuda": {FEW: (1, 16), MANY: (256, 2048)}, "cpu": {FEW: (1, 1), MANY: (16, 64)}}
"""The least and the most rows of x, by device and range."""
WEIGHTS = {"cuda": (1.05e8, 2.0e8), "cpu": (8e6, 1.6e7)}
"""The least and the most elements of a weight. On a GPU a weight of int4 takes 50 MB at least."""
SIZES = 2
"""Sizes that are drawn for each range of rows."""
SECONDS = 90.0
"""After so many seconds no further size begins."""
NAMES = (*FORMATS, "uint4.floatzeros")


def draw(source: random.Random, device: str, rows: str) -> tuple[int, int, int]:
    """(M, N, K) of one size; N is a multiple of 8 and K of ``GROUP``."""
    least, most = ROWS[device][rows]
    count = round(log_uniform(source, least, most))
    weights = log_uniform(source, *WEIGHTS[device])
    length = GROUP * round(log_uniform(source, 1024, weights / 2048) / GROUP)
    return count, 8 * math.ceil(weights / length / 8), length


def run(bench: Bench) -> Iterator[Measurement]:
    """Two sizes of each range of rows, drawn with ``bench.seed``."""
    source, started = random.Random(bench.seed), time.monotonic()
    sizes = [(rows, draw(source, bench.device, rows)) for _ in range(SIZES) for rows in ROWS[bench.device]]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    with torch.no_grad():
        for rows, size in sizes:
            for backend in bench.backends:
                if time.monotonic() - started > SECONDS:
                    print(f"formats: {rows} {size} on {backend} left out after {SECONDS:.0f} s", file=sys.stderr)
                else:
                    yield from measure(NAMES, rows, size, dtype, backend, bench)


def measure(
    names: Sequence[str], rows: str, size: tuple[int, int, int], dtype: torch.dtype, backend: str, bench: Bench
) -> Iterator[Measurement]:
    """One measurement for each of the formats ``names``; ``BASE`` is timed even if it is not among them."""
    count, columns, length = size
    device = torch.device(bench.device)
    every = {name: Product(name, linear, 1, name, (columns, length), dtype) for name in dict.fromkeys((BASE, *names))}
    x = torch.randn(count, length, dtype=dtype, device=device)
    dense = torch.randn(columns, length, dtype=dtype, device=device) * 0.02
    function = jitgen.jit(backend=backend)(linear)
    weights: dict[str, list[Any]] = {name: [quantized(dense, name)] for name in every}
    del dense
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda copies: function.lower(x, copies[0]).compile(), weights.values()))
    subjects: dict[str, Sequence[Call]] = {}
    errors = {}
    out = torch.empty(count, columns, dtype=dtype, device=device)
    for name, product in every.items():
        copies = weights[name]
        function(x, copies[0])  # converts the weight to the layout that the backend reads
        needed = -(-4 * bench.elements // max(1, product.bytes(0)))
        copies += [copies[0].clone() for _ in range(max(1, min(MAX_COPIES, needed) - 1))]
        own = [copy.detach() for copy in copies]
        plan = function.bind(x, own[0])
        out.fill_(float("nan"))
        plan(x, own[0], out=out)
        errors[name] = product_error(product.function, x, own[:1], out)
        subjects[name] = [partial(plan, x, copy, out=out) for copy in own]
    seconds = medians(subjects, bench.device, bench.budget)
    for name in names:
        yield Measurement(
            group="formats",
            name=f"{name}, {rows}",
            device=bench.device,
            backend=backend,
            dtype=dtype_name(dtype),
            shape=size,
            seconds={"jitgen": seconds[name], BASE: seconds[BASE]},
            error=errors[name],
            moved=every[name].bytes(count),
            flops=2 * count * columns * length,
        )


def quantized(dense: torch.Tensor, name: str) -> QTensor:
    """``dense`` in a format, in the groups of the format or of ``GROUP`` columns."""
    return jitgen.quantize(dense, name, find(name).group_size or GROUP, method="absmax")


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """For each backend, range of rows and format: the geometric mean of its time divided by int4's, and the sizes."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for found in measurements:
        if found.group == "formats":
            name, rows = found.name.split(", ")
            ratio = found.seconds["jitgen"] / found.seconds[BASE]
            times.setdefault((found.backend, rows, name), []).append(ratio)
    return [
        f"{backend}, {rows}: {name} takes {statistics.geometric_mean(ratios):.2f} of {BASE}'s time "
        f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        for (backend, rows, name), ratios in sorted(times.items())
    ]
