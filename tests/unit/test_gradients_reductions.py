"""Gradients of reductions and interpolations of numbers whose elements are infinite, NaN or equal: eager torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

INF, NAN = math.inf, math.nan
ROWS = [[1.0, 2, 3], [2, 2, 1], [0, 0, 0], [INF, 1, 2], [-INF, 1, 2], [NAN, 1, 2], [NAN, INF, NAN], [INF, -INF, 0]]
NUMBERS = slice(0, 5)
"""The rows without a NaN, of which the gradient of ``torch.amax`` is 0 / 0 in torch."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "amax": lambda x: x[NUMBERS].amax(1),
    "amin": lambda x: x[NUMBERS].amin(1),
    "aminmax": lambda x: torch.aminmax(x[NUMBERS], dim=1),
    "norm, p = inf": lambda x: torch.linalg.vector_norm(x, INF, 1),
    "max of all": lambda x: x.max() + x[:4].max(),
    "min of all": lambda x: x.min() + x[:4].min(),
    "var": lambda x: x.var(1),
    "var, correction": lambda x: x.var(1, correction=0.5),
    "std": lambda x: x.std(1),
    "var of all": lambda x: x[:3].var(),
    "median": lambda x: x.median(1).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "median of all": lambda x: x.median(),
    "lerp by a tensor": lambda x: torch.lerp(x, x.flip(1), x.roll(1, 0)),
    "lerp by a number": lambda x: torch.lerp(x, x.flip(0), 0.7),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1, dx=0.3),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.arange(8) % 3, reduction="none"),
    "multi_margin_loss, p = 2": lambda x: F.multi_margin_loss(x, torch.arange(8) % 3, p=2, reduction="none"),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, -1, 2]] * 8), reduction="none"),
    "hypot": lambda x: torch.hypot(x, x.flip(1)),
    "power": lambda x: x.clamp(-2, 2) ** 1e308,
    "cdist, p = 0": lambda x: torch.cdist(x, x[:2], 0),
    "cdist, p = 1": lambda x: torch.cdist(x, x[:2], 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick(where=lambda name: name in ("amax", "var", "median", "lerp by a tensor"))
def test_the_values_and_gradients_are_torchs(name: str) -> None:
    results = []
    # torch 2.11 has no derivative of aminmax
    eager = FUNCTIONS[name] if name != "aminmax" else lambda x: (x[NUMBERS].amin(1), x[NUMBERS].amax(1))
    for function in (eager, jitgen.jit(FUNCTIONS[name])):
        x = torch.tensor(ROWS, dtype=torch.float64, requires_grad=True)
        found = function(x)
        values = found if isinstance(found, tuple) else (found,)
        given = [torch.arange(1.0, each.numel() + 1, dtype=each.dtype).reshape(each.shape) for each in values]
        gradient = torch.autograd.grad(values, x, given, allow_unused=True)[0] if values[0].requires_grad else None
        results.append([*values, torch.zeros_like(x) if gradient is None else gradient])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


OF_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax, along": lambda x: x.softmax(-1).amin(-1),
    "softmax, across": lambda x: x.softmax(-1).amax(0),
    "quotient": lambda x: (x / x.sum(-1, keepdim=True)).amax(0),
    "gelu": lambda x: F.gelu(3 * x).amax(-1),
    "power": lambda x: (x.abs() ** 1.7).amin(0),
    "equal ones": lambda x: (0 * x).softmax(-1).amax(0) + x.relu().amin(0),
}
"""Extrema of values that the backward computes again, which a kernel with another form of exp has other bits of."""


@pytest.mark.parametrize("name", OF_FUNCTIONS)
@pytest.mark.quick(where=lambda name: name == "softmax, across")
def test_the_gradient_of_an_extremum_of_a_function_reaches_the_element_that_it_is(name: str) -> None:
    function = OF_FUNCTIONS[name]
    x = torch.randn(9, 7, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found, wanted = jitgen.jit(function)(x), function(wide)
    g = torch.randn_like(found)
    (got,), (want,) = torch.autograd.grad(found, x, g), torch.autograd.grad(wanted, wide, g.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_second_derivative_of_a_variance(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2, 4, -3], [0.5, 0, 1, 1]], dtype=dtype)
    found = []
    for function in (lambda x: x.var(1), jitgen.jit(lambda x: x.var(1))):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-4)


def test_trapezoid_wraps_its_ends_as_torch_does() -> None:
    x = torch.tensor([[100, 100, 100], [1, 2, 3]], dtype=torch.int8)
    assert torch.equal(jitgen.jit(lambda x: torch.trapezoid(x, dim=1))(x), torch.trapezoid(x, dim=1))
