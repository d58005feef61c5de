"""Reductions of other shapes than the norms of models: very short rows, few long rows, and all elements.

They are measured like the streaming cases. A reduction that writes almost nothing moves half the bytes of a copy of its
input, so that it can take half the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jitgen.bench.measurement import Bench, Measurement
from jitgen.bench.rows import softmax, softmax_eager
from jitgen.bench.streaming import Case, measure_all


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
