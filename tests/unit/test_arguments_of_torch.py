"""Arguments that torch takes are taken, with its results; what it refuses is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import TraceError, UnsupportedError

Tensor = torch.Tensor
INTEGERS = torch.tensor([[-7, 3], [2, -5]])
WINDOWS = torch.arange(-13, 51).reshape(1, 1, 8, 8)
LEAST = torch.tensor([-(2**63), 1, -3])
FLOATS = torch.tensor([1.0, math.nan, -2.0, math.inf])

TAKEN: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=-2.7), INTEGERS),
    "addmm": (lambda x: torch.addmm(x, x, x, alpha=2.5, beta=-1.5), INTEGERS),
    "addmm, beta below 1": (lambda x: torch.addmm(x, x, x, beta=0.5), INTEGERS),
    "addmv": (lambda x: torch.addmv(x[0], x, x[1], alpha=-2.5), INTEGERS),
    "baddbmm": (lambda x: torch.baddbmm(x[None], x[None], x[None], alpha=2.7, beta=1.9), INTEGERS),
    "addbmm": (lambda x: torch.addbmm(x, x[None], x[None], alpha=2.7), INTEGERS.int()),
    "avg_pool1d": (lambda x: F.avg_pool1d(x[0], 3, 2), WINDOWS),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), WINDOWS),
    "avg_pool2d, without padding": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), WINDOWS),
    "avg_pool2d, divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=-3), WINDOWS),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.view(1, 4, 4, 4), 2), WINDOWS),
    "a factor beyond int64": (lambda x: x * (2**63 + 5), LEAST),
    "a term beyond int64": (lambda x: x - 2**63, LEAST),
    "equal to what wraps": (lambda x: x == 2**63, LEAST),
    "above what wraps": (lambda x: x > 2**64 - 1, LEAST),
    "bits beyond int64": (lambda x: x & 2**63, LEAST),
    "a divisor beyond int64": (lambda x: x // 2**63, LEAST),
    "beyond int64, of bytes": (lambda x: x + 2**63 + 3, LEAST.to(torch.uint8)),
    "clamp to NaN": (lambda x: x.clamp(min=math.nan), FLOATS),
    "clamp to NaN or 1": (lambda x: x.clamp(math.nan, 1.0), FLOATS),
    "clamp_max to NaN": (lambda x: torch.clamp_max(x, math.nan), FLOATS),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.covering(1)
def test_what_torch_takes(name: str) -> None:
    function, x = TAKEN[name]
    # torch 2.11 ignores a bound that is NaN where it is the only one, though not in clamp_min
    expected = x.clamp_min(math.nan) if name == "clamp to NaN" else function(x)
    torch.testing.assert_close(jitgen.jit(function)(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x == y,
        lambda x, y: x != y,
        lambda x, y: x == 0.3,
        lambda x, y: x != 1e9,
        lambda x, y: x == torch.tensor(2.0),
        lambda x, y: x.isnan(),
        lambda x, y: x.abs(),
    ],
    ids=["==", "!=", "== a number", "!= a number beyond", "== a 0-d tensor", "isnan", "abs"],
)
@pytest.mark.covering(1)
def test_what_torch_computes_of_float8(function: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0, 0.3, math.nan, -0.0]).to(dtype)
    y = torch.tensor([1.0, 2.0, 0.3, math.nan, 0.0]).to(dtype)
    found, expected = jitgen.jit(function)(x, y), function(x, y)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "eager"),
    [
        (lambda x: x.clamp(min=math.nan), lambda x: x.clamp_min(math.nan)),
        (lambda x: x.clamp(-1.0, math.nan), None),
        (lambda x: torch.fmax(x, torch.tensor(math.nan)), None),
    ],
    ids=["min", "max", "fmax"],
)
def test_gradients_at_bounds_of_nan(function: Callable[..., Any], eager: Callable[..., Any] | None) -> None:
    found, expected = FLOATS.clone().requires_grad_(), FLOATS.clone().requires_grad_()
    one, other = jitgen.jit(function)(found), (eager or function)(expected)
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    (found_grad,) = torch.autograd.grad(one.sum(), found, allow_unused=True, materialize_grads=True)
    (expected_grad,) = torch.autograd.grad(other.sum(), expected)
    torch.testing.assert_close(found_grad, expected_grad, rtol=0, atol=0)


REFUSED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "isin of bool": (lambda x: torch.isin(x > 0, x > 1), INTEGERS),
    "isin among bool": (lambda x: torch.isin(x, x > 1), INTEGERS),
    "isin of True": (lambda x: torch.isin(x, True), INTEGERS),
    "rrelu up to inf": (lambda x: F.rrelu(x, 0.1, math.inf), FLOATS),
    "rrelu from NaN": (lambda x: F.rrelu(x, math.nan, 0.3, training=True), FLOATS),
    "rrelu in the wrong order": (lambda x: F.rrelu(x, 0.4, 0.3), FLOATS),
    "avg_pool2d of int32": (lambda x: F.avg_pool2d(x, 2), WINDOWS.int()),
    "a float alpha of a sum of integers": (lambda x: torch.add(x, x, alpha=2.0), INTEGERS),
    "a factor beyond the dtype": (lambda x: torch.addmm(x, x, x, alpha=300.5), INTEGERS.to(torch.int8)),
    "a factor of NaN": (lambda x: torch.addcmul(x, x, x, value=math.nan), INTEGERS),
    "beyond uint64": (lambda x: x + 2**64, LEAST),
    "below int64": (lambda x: x + (-(2**63) - 1), LEAST),
    "< of float8": (lambda x: x < x, FLOATS.to(torch.float8_e5m2)),
    "a sum of float8": (lambda x: x + x, FLOATS.to(torch.float8_e5m2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses(name: str) -> None:
    function, x = REFUSED[name]
    with pytest.raises((RuntimeError, OverflowError, NotImplementedError)):
        function(x)
    with pytest.raises((TraceError, UnsupportedError, RuntimeError)) as caught:
        jitgen.jit(function)(x)
    assert "test_arguments_of_torch.py" in str(caught.value)
