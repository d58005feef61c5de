"""Rows that every pass reads again, in Triton's interpreter: what is summed while the maximum or the mean is sought.

``tests/unit/test_online.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import jitgen
from tests.interpreter import Check, serve
from tests.triton_reductions import compare, quick_reductions, sample

LENGTHS = (33000, 40960)
"""Of a row that is not kept: with a part of a tile left over, and of whole tiles."""
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = torch.finfo(torch.float32).max

Function = Callable[..., Any]


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, (x[:, 0] > 0).long() * (x.shape[-1] - 1), reduction="none")


def exp_of_sixteen_bits(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1).to(torch.bfloat16)


def layer_norm_and_softmax(x: torch.Tensor) -> torch.Tensor:
    return (F.layer_norm(x, x.shape[-1:], x[0], x[1]) + x).softmax(-1)


EXPONENTIALS: dict[str, Function] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": cross_entropy,
    "written out": lambda x: torch.exp(x - x.amax(-1, keepdim=True)).sum(-1),
    "coarse": exp_of_sixteen_bits,
}
DEVIATIONS: dict[str, Function] = {
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "mean beside": lambda x: (x.var(-1, correction=0), x.mean(-1)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "written out": lambda x: ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1),
}
OVERFLOWING = (3, 4, 8, 9)
"""Rows of ``spreads`` of which the squares overflow: where a root of them is taken, float64 tells something else."""


SQUARED = (DEVIATIONS["var"], DEVIATIONS["written out"])


def exponents(length: int) -> torch.Tensor:
    """Rows whose maximum is not finite, comes first or last, rises or falls all the time, or is far beyond the rest."""
    rows = torch.randn(16, length)
    rows[0] = -math.inf
    rows[1, 0], rows[2, -1] = math.inf, math.inf
    rows[3, 0], rows[4, -1] = math.nan, math.nan
    rows[5, 0], rows[6, -1] = 1e30, 1e30
    rows[7, :-1] = -math.inf
    rows[8, : length // 2] = -math.inf
    rows[9] = torch.linspace(-50, 50, length)
    rows[10] = torch.linspace(50, -50, length)
    rows[11] = torch.randn(length) * 1e-41
    rows[12] = -LARGEST
    rows[13, 0], rows[13, -1] = LARGEST, -LARGEST
    rows[14, 5], rows[14, 7] = math.inf, -math.inf
    rows[15] = -1e4 + rows[15] * 20
    return rows


def spreads(length: int) -> torch.Tensor:
    """Rows with infinities, NaN, outliers whose squares overflow, denormals, no deviation at all, large offsets."""
    rows = torch.randn(14, length)
    rows[0, 0], rows[1, -1] = math.inf, -math.inf
    rows[2, length // 2] = math.nan
    rows[3, 0], rows[4, -1] = 1e30, -1e30
    rows[5] = torch.randn(length) * 1e-41
    rows[6] = 3.0
    rows[7] = -math.inf
    rows[8, 0], rows[8, -1] = LARGEST, -LARGEST
    rows[9, 0], rows[9, 8192] = LARGEST, -LARGEST
    rows[10] *= 1e-15
    rows[11, 0] = 1e4
    rows[12] = 0.0
    rows[13, 1:] = 0.0
    return rows


CHECKS: dict[str, Check] = {}


QUICK = (
    *("dtypes exponentials: logsumexp", "special deviations: var"),
    *("far_from_zero", "both", "beside_one_another"),
)
"""One state in every dtype, another with every special value."""


def is_quick(check: str) -> bool:
    return check in QUICK


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _named(kind: str, functions: dict[str, Function], rows: Callable[[int], torch.Tensor]) -> None:
    for name, function in functions.items():

        def special(function: Function = function) -> Iterator[str | None]:
            for length in LENGTHS:
                x = rows(length)
                if rows is spreads and function not in SQUARED:
                    x = x[[number for number in range(len(x)) if number not in OVERFLOWING]]
                finite = x.double().abs().nan_to_num(0.0, 0.0, 0.0)
                # What is added up is of the order of the row's length; it is exact but for that.
                size = 4.0 + torch.where(finite < 99, finite, 0).sum(-1)
                result = function(x[:2])
                wrong = compare(function, x, magnitude=size[:, None] if getattr(result, "ndim", 1) > 1 else size)
                yield wrong and f"length {length}: {wrong}"

        def dtypes(function: Function = function) -> Iterator[str | None]:
            for dtype in FLOATS:
                for length in LENGTHS:
                    wrong = compare(function, sample((2, length), dtype), magnitude=10.0)
                    yield wrong and f"{dtype} of length {length}: {wrong}"

        CHECKS[f"special {kind}: {name}"] = special
        CHECKS[f"dtypes {kind}: {name}"] = dtypes


_named("exponentials", EXPONENTIALS, exponents)
_named("deviations", DEVIATIONS, spreads)


@check
def far_from_zero() -> Iterator[str | None]:
    """A difference of squares would leave nothing of these variances."""
    for offset in (1e4, -1e4):
        x = torch.randn(3, 40000) + offset
        got, want = jitgen.jit(DEVIATIONS["var"], backend="triton")(x), x.double().var(-1)
        worst = ((got.double() - want) / want).abs().max().item()
        yield f"wrong by {worst} beside {offset}" if not worst < 1e-4 else None


@check
def both() -> Iterator[str | None]:
    x = torch.randn(3, 40000)
    yield compare(layer_norm_and_softmax, x, magnitude=8.0)
    yield compare(lambda x: (x.softmax(-1), x.var(-1), x.argmax(-1), x.logsumexp(-1)), x, magnitude=50.0)


def _beside_one_another(dtype: torch.dtype) -> Iterator[str | None]:
    x = sample((9001, 24), dtype)
    yield compare(lambda x: (x.softmax(0), x.var(0)), x, magnitude=8.0)
    yield compare(lambda x: x.logsumexp(0), x, magnitude=20.0)


@check
def beside_one_another() -> Iterator[str | None]:
    return _beside_one_another(torch.float32)


@check
def beside_one_another_in_16_bits() -> Iterator[str | None]:
    return _beside_one_another(torch.bfloat16)


@check
def the_same_bits() -> Iterator[str | None]:
    x = torch.randn(2, 40000)
    for function in (EXPONENTIALS["softmax"], DEVIATIONS["var"]):
        jitted = jitgen.jit(function, backend="triton")
        yield None if torch.equal(jitted(x), jitted(x)) else "two calls differ"


@contextmanager
def within() -> Iterator[None]:
    """So few rows would be divided into chunks."""
    with patch("jitgen.families.rows.reduction.row_chunks.SINGLE_BLOCK_ROWS", 0), quick_reductions():
        yield


if __name__ == "__main__":
    serve(CHECKS, within())
