"""A warm call is a handful of Python calls: this counts them, so that none is added unseen."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.quant.layers import QuantizedLinear
from jitgen.quant.qtensor import QTensor


@jitgen.jit
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that a warm call runs, ``call`` itself aside."""
    for _ in range(3):
        call()
    names: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


x, y, out = (torch.randn(64) for _ in range(3))
FORMS: dict[str, tuple[Callable[[], Any], int]] = {
    "positional": (lambda: add(x, y), 3),  # __call__, dispatch, launch
    "out=": (lambda: add(x, y, out=out), 4),  # __call__, call, the plan, launch
    "keywords": (lambda: add(x=x, y=y), 4),  # __call__, call, dispatch, launch
    "keywords, out=": (lambda: add(x, y=y, out=out), 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_function(form: str) -> None:
    call, most = FORMS[form]
    assert len(python_calls(call)) <= most


@pytest.mark.parametrize("bias", [False, True])
def test_calls_of_a_quantised_linear(bias: bool) -> None:
    """The module's two, forward, what asks for Dynamo, __call__, two dispatchers, launch."""
    layer = nn.Linear(64, 32, bias=bias).bfloat16()
    jitgen.quantize_(layer, "int4", 32)
    row = torch.randn(1, 64).bfloat16()
    with torch.no_grad():
        names = python_calls(lambda: layer(row))
    assert len(names) <= 8
    assert "__torch_function__" not in names


def test_what_needs_more_than_a_kernel_is_f_linear() -> None:
    layer = nn.Linear(64, 32)
    jitgen.quantize_(layer, "int8")
    assert type(layer) is QuantizedLinear
    row = torch.randn(2, 64)
    exact = F.linear(row, layer.weight.dequantize(), layer.bias)
    torch.testing.assert_close(layer(row), exact)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error", jitgen.FallbackWarning)
        assert layer(row).dtype == torch.bfloat16
    traced = jitgen.jit(lambda row: torch.relu(layer(row)))
    torch.testing.assert_close(traced(row), torch.relu(exact))
    row.requires_grad_(True)
    layer(row).sum().backward()
    torch.testing.assert_close(row.grad, layer.weight.dequantize().sum(0).expand(2, -1))
    layer.weight = nn.Parameter(layer.weight.dequantize())
    torch.testing.assert_close(layer(row), exact)


def test_a_mode_sees_the_product() -> None:
    layer = nn.Linear(64, 32, bias=False)
    jitgen.quantize_(layer, "int8")
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        layer(torch.randn(2, 64))
    assert F.linear in seen


def test_a_subclass_of_linear_keeps_its_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    layer = Doubled(64, 32, bias=False)
    jitgen.quantize_(layer, "int8")
    assert isinstance(layer.weight, QTensor)
    row = torch.randn(2, 64)
    torch.testing.assert_close(layer(row), 2 * F.linear(row, layer.weight.dequantize()))


def test_calls_of_a_step_with_gradients() -> None:
    """A call whose gradients are computed and its backward: of jitgen's functions, about twenty."""
    gated = jitgen.jit(lambda x, weight: F.silu(x * weight))
    left, right, grad = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    names = python_calls(lambda: torch.autograd.grad(gated(left, right), (left, right), grad))
    assert "specialize" not in names
    assert len(names) <= 140, "most of them torch's own"
