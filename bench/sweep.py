"""Matrix products of random sizes, so that no figure holds only for the sizes that something was tuned for.

The rows of x are drawn from 1 to 8192 on a logarithmic scale and are not rounded. N and K are drawn on a logarithmic
scale too, as multiples of 8, but K of a quantised weight as one of 128; half of them have a large odd factor, the
others are rounded to multiples of 256. Groups of quantised weights have 32, 64 or 128 columns. ``summary`` condenses a
sweep: jitgen's speed beside the best peer's, by rows.

On a GPU the kernels of all cases are built ahead in parallel processes (``prebuild.py``), and a peer that takes
``PATIENCE`` times as long as the fastest one is left out, which a case's notes say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

import jitgen
from bench.measurement import Bench, Measurement, condensed
from bench.prebuild import Build, gpu_target, prebuild
from bench.products import GROUP, Product, linear, measure
from bench.sizes import log_uniform, side

FORMATS: tuple[str | None, ...] = ("int4", None)
"""The weights of a sweep: W4A16, and dense ones of the activation's dtype."""
GROUP_SIZES = (32, 64, 128)
"""Columns that share a scale, of which each case draws one."""
MOST_ROWS = 8192
SIDES = {"cuda": (64, 60_000), "cpu": (64, 4096)}
"""The least and the most of N and K, by device."""
MOST_WEIGHTS = {"cuda": 3.5e8, "cpu": 1.2e7}
"""The most elements of a weight, so that copies of it fit in memory, and a sweep takes minutes."""
MOST_PRODUCTS = {"cuda": 2e12, "cpu": 4e9}
"""The most multiply-adds of a case."""
ROW_RANGES = ((1, 8), (9, 64), (1, 64), (65, 256), (257, MOST_ROWS))
"""The ranges of rows that a summary has lines for."""
PATIENCE = 4.0
"""See ``products.measure``."""
CACHES = 2
"""Copies of the weights take this many times the bytes of the last-level cache, which ``Bench.elements`` exceeds."""
WORST = 10


def draw(source: random.Random, device: str, unit: int = GROUP) -> tuple[int, int, int]:
    """(M, N, K) of one case, K a multiple of ``unit``."""
    while True:
        rows = int(log_uniform(source, 1, MOST_ROWS + 1))
        columns, length = (side(source, each, *SIDES[device]) for each in (8, unit))
        weights = columns * length
        if weights <= MOST_WEIGHTS[device] and rows * weights <= MOST_PRODUCTS[device]:
            return rows, columns, length


def cases(bench: Bench) -> Iterator[tuple[Product, int]]:
    """(product, rows of x): ``bench.cases`` of each of ``FORMATS``, drawn with ``bench.seed``."""
    source, groups = random.Random(bench.seed), random.Random(f"groups {bench.seed}")
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    for _ in range(bench.cases):
        for format in FORMATS:
            rows, columns, length = draw(source, bench.device, GROUP if format else 8)
            name = f"{columns}x{length} {format or 'dense'}"
            group = groups.choice(GROUP_SIZES) if format else GROUP
            yield (
                Product(f"{name} g{group}" if format else name, linear, 1, format, (columns, length), dtype, group),
                rows,
            )


def run(bench: Bench) -> Iterator[Measurement]:
    """The measurements of ``cases``."""
    drawn = list(cases(bench))
    if bench.device == "cuda":
        target = gpu_target()
        prebuild(
            Build(linear, _specs(product, rows), backend, target)
            for product, rows in drawn
            for backend in bench.backends
        )
    with torch.no_grad():
        for product, rows in drawn:
            yield from measure(product, (rows,), bench, "sweep", CACHES * bench.elements, PATIENCE)


def _specs(product: Product, rows: int) -> tuple[jitgen.TensorSpec, ...]:
    x = jitgen.TensorSpec((rows, product.shape[1]), product.dtype)
    group = product.group if product.format else None
    return x, jitgen.TensorSpec(product.shape, product.dtype, format=product.format, group_size=group)


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """For each backend and format: the geometric mean, the 5th percentile and the worst of the best peer's time divided
    by jitgen's, in ranges of rows; then the ``WORST`` cases."""
    lines = []
    groups: dict[str, list[tuple[float, int, str]]] = {}
    for found in measurements:
        if found.group == "sweep" and found.ratios:
            weights = found.name.split()[1].rstrip(",")
            kind = f"{found.backend}, {weights} weights, {found.dtype}"
            peer, ratio = min(found.ratios.items(), key=lambda one: one[1])
            text = f"{ratio:.2f} of {peer}: M={found.shape[0]}, N={found.shape[1]}, K={found.shape[2]}"
            groups.setdefault(kind, []).append((ratio, found.shape[0], text))
    for kind, cases in groups.items():
        for least, most in (*ROW_RANGES, (1, MOST_ROWS)):
            ratios = [ratio for ratio, rows, _ in cases if least <= rows <= most]
            if ratios:
                lines.append(f"{kind}, {least} to {most} rows: {condensed(ratios)}")
        lines += [f"  {text}" for _, _, text in sorted(cases)[:WORST]]
    return lines
