"""Matrix products of random sizes, so that no figure holds only for the sizes that something was tuned for.

The rows of x are drawn from 1 to 8192 on a logarithmic scale and are not rounded. N and K are drawn on a logarithmic
scale too, as multiples of 8, or of a group of the weight's format; half of them have a large odd factor, the others are
rounded to multiples of 256. ``summary`` condenses a sweep: jitgen's speed beside the best peer's, by rows.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence

import torch

from jitgen.bench.measurement import Bench, Measurement
from jitgen.bench.products import GROUP, Product, linear, measure

FORMATS: tuple[str | None, ...] = ("int4", None)
"""The weights of a sweep: W4A16 with groups of ``GROUP``, and dense ones of the activation's dtype."""
MOST_ROWS = 8192
SIDES = {"cuda": (64, 60_000), "cpu": (64, 4096)}
"""The least and the most of N and K, by device."""
MOST_WEIGHTS = {"cuda": 3.5e8, "cpu": 1.2e7}
"""The most elements of a weight, so that copies of it fit in memory, and a sweep takes minutes."""
MOST_PRODUCTS = {"cuda": 2e12, "cpu": 4e9}
"""The most multiply-adds of a case."""
ROUND = 256
ROW_RANGES = ((1, 8), (9, 64), (65, 256), (257, 1024), (1025, MOST_ROWS))
"""The ranges of rows that a summary has lines for."""
WORST = 10


def draw(source: random.Random, device: str) -> tuple[int, int, int]:
    """(M, N, K) of one case."""
    while True:
        rows = int(math.exp(source.uniform(0, math.log(MOST_ROWS + 1))))
        columns, length = _side(source, device, 8), _side(source, device, GROUP)
        weights = columns * length
        if weights <= MOST_WEIGHTS[device] and rows * weights <= MOST_PRODUCTS[device]:
            return rows, columns, length


def _side(source: random.Random, device: str, unit: int) -> int:
    least, most = SIDES[device]
    size = math.exp(source.uniform(math.log(least), math.log(most)))
    if source.random() < 0.5:
        return max(1, round(size / ROUND)) * ROUND
    odd = 2 * int(size / (2 * unit)) + 1
    return unit * odd


def run(bench: Bench) -> Iterator[Measurement]:
    """``bench.cases`` cases of each of ``FORMATS``, drawn with ``bench.seed``."""
    source = random.Random(bench.seed)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    with torch.no_grad():
        for _ in range(bench.cases):
            rows, columns, length = draw(source, bench.device)
            for format in FORMATS:
                product = Product(
                    f"{columns}x{length} {format or 'dense'}", linear, 1, format, (columns, length), dtype
                )
                yield from measure(product, (rows,), bench, "sweep")


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
            ratios = sorted(ratio for ratio, rows, _ in cases if least <= rows <= most)
            if ratios:
                lines.append(
                    f"{kind}, {least} to {most} rows: geometric mean {statistics.geometric_mean(ratios):.2f}, 5th "
                    f"percentile {ratios[len(ratios) // 20]:.2f}, worst {ratios[0]:.2f} of {len(ratios)}"
                )
        lines += [f"  {text}" for _, _, text in sorted(cases)[:WORST]]
    return lines
