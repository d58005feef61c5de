"""Reductions over a dimension other than the last, whose elements are not adjacent, measured like the streaming cases.

Every case reduces the middle one of three dimensions. Where the first dimension is 1, that is a single matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.measurement import Bench, Measurement
from bench.streaming import Case, measure_all


def column_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def column_sum_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.sum(x, 1, out=out)


def column_maximum(x: torch.Tensor) -> torch.Tensor:
    return x.amax(1)


def column_maximum_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.amax(x, 1, out=out)


def column_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, 1)


def column_softmax_eager(x: torch.Tensor, out: torch.Tensor) -> Any:
    return torch.softmax(x, 1, out=out)


FUNCTIONS = (
    ("column sum", column_sum, column_sum_eager),
    ("column maximum", column_maximum, column_maximum_eager),
    ("column softmax", column_softmax, column_softmax_eager),
)
SHAPES = (
    ("rows of 4096", (1, None, 4096)),
    ("rows of 64", (1, None, 64)),
    ("64 rows", (1, 64, None)),
    ("matrices of 512 x 1024", (None, 512, 1024)),
)
"""The name of a shape, and its sizes. None is the size that follows from the number of elements of a case."""


def matrices(
    sizes: tuple[int | None, int | None, int | None], elements: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """A tensor of about ``elements`` elements; the size that is None follows from the others."""
    fixed = 1
    for size in sizes:
        fixed *= 1 if size is None else size
    shape = [max(1, elements // fixed) if size is None else size for size in sizes]
    return (torch.randn(shape, dtype=dtype, device=device),)


CASES = tuple(
    Case(f"{name}, {shape}", function, eager, partial(matrices, sizes))
    for name, function, eager in FUNCTIONS
    for shape, sizes in SHAPES
)


def run(bench: Bench) -> Iterator[Measurement]:
    return measure_all(CASES, bench, "columns")
