"""What row kernels in C++ leave out, as no result could tell: a NaN goes where torch's goes, whatever its bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

Function = Callable[..., Any]
LENGTHS = (5, 100, 1000, 5000)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(x, -1)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def softmax_and_maximum(x: torch.Tensor) -> Any:
    return F.softmax(x, -1), x.amax(-1)


def likely(x: torch.Tensor) -> torch.Tensor:
    return torch.where(F.softmax(x, -1) > 0.5, 1.0, 0.0)


def at_least_itself(x: torch.Tensor) -> torch.Tensor:
    return torch.maximum(F.softmax(x, -1), x)


def same(function: Function, x: torch.Tensor, *rest: Any) -> None:
    got, expected = jitgen.jit(function)(x, *rest), function(x, *rest)
    pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp, softmax_and_maximum, likely])
@pytest.mark.quick(
    where=lambda function, dtype: (function, dtype) in ((softmax, torch.bfloat16), (softmax_and_maximum, torch.float32))
)
def test_nan_and_infinities(function: Function, dtype: torch.dtype) -> None:
    """One NaN first, last, in a row of -inf, beside inf; nothing but NaN; inf; -inf; a finite row."""
    for length in LENGTHS:
        x = torch.randn(8, length).to(dtype)
        x[0, 0] = x[1, -1] = x[3, 1] = math.nan
        x[2], x[2, length // 2], x[3, 0] = -math.inf, math.nan, math.inf
        x[4], x[5, 3], x[6] = math.nan, math.inf, -math.inf
        same(function, x)


@pytest.mark.parametrize("function", [softmax, log_softmax, layer_norm, rms_norm])
@pytest.mark.quick(where=lambda function: function is log_softmax)
def test_every_nan_of_bfloat16_stays_one(function: Function) -> None:
    codes = torch.cat([torch.arange(0x7F81, 0x8000), torch.arange(0xFF81, 0x10000)])
    for length in LENGTHS:
        x = torch.randn(len(codes) + 1, length).bfloat16()
        x[:-1, length // 2] = codes.to(torch.uint16).view(torch.bfloat16)
        out = jitgen.jit(function)(x)
        assert out.isnan().all(-1).tolist() == [True] * len(codes) + [False]


@pytest.mark.parametrize("length", LENGTHS)
def test_nan_of_a_number_stays_one(length: int) -> None:
    """Its bits are all ones: as a float too, and rounding to bfloat16 would carry into the sign."""

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True) * factor

    (number,) = struct.unpack("<d", b"\xff" * 7 + b"\x7f")
    assert jitgen.jit(scaled)(torch.randn(3, length).bfloat16(), number).isnan().all()


@pytest.mark.parametrize(
    ("function", "drops"),
    [(softmax, True), (log_softmax, True), (softmax_and_maximum, False), (likely, False), (at_least_itself, False)],
)
def test_maxima_drop_nan_only_where_the_sum_brings_it(function: Function, drops: bool) -> None:
    source = jitgen.jit(function).lower(jitgen.TensorSpec((64, 1024), torch.float32), target="x86-64-v3").source
    assert ("MaxOfNumbers" in source) == drops
