"""Reductions of other shapes than the norms of models: very short rows, few long rows, and all elements.

They are measured like the streaming cases. A reduction that writes almost nothing moves half the bytes of a copy of its
input, so that it can take half the time. ``sweep`` measures row reductions of random sizes, so that no figure holds
only for the sizes that something was tuned for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import Bench, Measurement, attempted, condensed
from bench.prebuild import Build, gpu_target, prebuild
from bench.rows import REDUCTIONS, Reduction, softmax, softmax_eager
from bench.sizes import log_uniform
from bench.streaming import Case, measure, measure_all
from jitgen.spec import dtype_name


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def total_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.sum(x, -1, out=out)


def argmax(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


def argmax_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.argmax(x, -1, out=out)


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.var(-1)


def variance_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.var(x, -1, out=out)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


def logsumexp_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.logsumexp(x, -1, out=out)


def cross_entropy(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes, reduction="none")


def cross_entropy_eager(logits: torch.Tensor, classes: torch.Tensor, out: torch.Tensor) -> Any:
    return F.cross_entropy(logits, classes, reduction="none")  # there is no form with out=


def rows_of(length: int, elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(elements // length, length, dtype=dtype, device=device),)


def few_rows(count: int, elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(count, elements // count, dtype=dtype, device=device),)


def labelled(length: int, elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Logits of ``length`` classes, and the correct class of each row."""
    (logits,) = rows_of(length, elements, dtype, device)
    return logits, torch.randint(length, logits.shape[:1], device=device)


SHORT, UNALIGNED, FEW, ONE = partial(rows_of, 32), partial(rows_of, 100), partial(few_rows, 16), partial(few_rows, 1)
CASES = (
    Case("sum, rows of 32", total, total_eager, SHORT),
    Case("sum, rows of 100", total, total_eager, UNALIGNED),
    Case("sum, 1 row", total, total_eager, ONE),
    Case("softmax, rows of 32", softmax, softmax_eager, SHORT),
    Case("softmax, rows of 100", softmax, softmax_eager, UNALIGNED),
    Case("argmax, rows of 100", argmax, argmax_eager, UNALIGNED),
    Case("argmax, 16 rows", argmax, argmax_eager, FEW),
    Case("argmax, 1 row", argmax, argmax_eager, ONE),
    Case("variance, 16 rows", variance, variance_eager, FEW),
    Case("variance, 1 row", variance, variance_eager, ONE),
    Case("log-sum-exp, 16 rows", logsumexp, logsumexp_eager, FEW),
    Case("cross entropy, rows of 32000", cross_entropy, cross_entropy_eager, partial(labelled, 32000)),
)


def run(bench: Bench) -> Iterator[Measurement]:
    return measure_all(CASES, bench, "reductions")


# ------------------------------------------------------------------------------------------------------ random sizes

SWEEP = "reductions sweep"
"""The group of what ``sweep`` measures."""
MOST_ROWS, MOST_COLUMNS = 100_000, 200_000
MOST_ELEMENTS = {"cuda": 2**27, "cpu": 2**24}
"""Elements of a case, so that a sweep takes minutes."""
WORST = 10
DRAWN = (
    *(each for each in REDUCTIONS if each.name in ("softmax", "rms_norm", "layer_norm")),
    Reduction("sum", total, total_eager),
    Reduction("log-sum-exp", logsumexp, logsumexp_eager),
)
"""What a sweep draws from."""


def draw(source: random.Random, device: str) -> tuple[Reduction, int, int, torch.dtype]:
    """A function, rows, columns and a dtype. Rows and columns are drawn on a logarithmic scale. Rows are not rounded;
    half of the columns are multiples of 64, or of 8 where they are fewer."""
    reduction = source.choice(DRAWN)
    dtype = source.choice((torch.bfloat16, torch.float32))
    while True:
        rows, columns = (int(log_uniform(source, 1, most + 1)) for most in (MOST_ROWS, MOST_COLUMNS))
        if source.random() < 0.5:
            unit = 64 if columns > 64 else 8
            columns = -(-columns // unit) * unit
        if rows * columns <= MOST_ELEMENTS[device]:
            return reduction, rows, columns, dtype


def sweep(bench: Bench) -> Iterator[Measurement]:
    """``bench.cases`` cases, drawn with ``bench.seed``."""
    source = random.Random(bench.seed)
    drawn = [draw(source, bench.device) for _ in range(bench.cases)]
    if bench.device == "cuda":
        target = gpu_target()
        prebuild(
            Build(reduction.function, specs_of(reduction, rows, columns, dtype), backend, target)
            for reduction, rows, columns, dtype in drawn
            for backend in bench.backends
        )
    for reduction, rows, columns, dtype in drawn:
        case = reduction.case(columns, rows, (dtype,), f"{rows} ")
        yield from attempted(measure(case, dtype, bench, SWEEP), bench, SWEEP, case.name, dtype_name(dtype))


def specs_of(reduction: Reduction, rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of ``rows_of`` as specs."""
    spec, vector = jitgen.TensorSpec((rows, columns), dtype), jitgen.TensorSpec((rows, columns), dtype, strides=(0, 1))
    return (*(spec for _ in range(reduction.tensors)), *(vector for _ in range(reduction.weights)))


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """Of a sweep, for each backend: the geometric mean, the 5th percentile and the worst cases of eager torch's time
    divided by jitgen's; and the largest error."""
    lines, cases = [], dict[str, list[tuple[float, str]]]()
    errors: dict[str, list[float]] = {}
    for found in measurements:
        if found.group == SWEEP:
            ratio, own = found.ratios["eager"], found.seconds["jitgen"]
            speed = f"{found.ratios['copy_']:.2f} of a copy's speed, {own * 1e6:.1f} us"
            cases.setdefault(found.backend, []).append((ratio, f"{ratio:.2f}: {found.name} {found.dtype}, {speed}"))
            errors.setdefault(found.backend, []).append(found.error if found.error is not None else math.nan)
    for backend, ratios in cases.items():
        ratios.sort()
        wrong = max(errors[backend], key=lambda error: (math.isnan(error), error))
        condensation = condensed([ratio for ratio, _ in ratios])
        lines.append(f"{backend}, eager torch's time over jitgen's: largest error {wrong:.1e}, {condensation}:")
        lines += [f"  {text}" for _, text in ratios[:WORST]]
    return lines
