"""Quantised layers that cannot run a kernel say so: a warning for each cause, a count, an error in strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.call.eager_linear import Fallback, quantized_linear


@pytest.fixture(autouse=True)
def no_fallbacks_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "_fallbacks", {})


def counted() -> dict[str, int]:
    return {row.reason: row.calls for row in jitgen.quantized_linear.specializations if isinstance(row, Fallback)}


weight = jitgen.quantize(torch.randn(32, 64), "int8")
square = jitgen.quantize(torch.randn(64, 64), "int8")
x, bias = torch.randn(2, 64), torch.randn(32)


CAUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "torch.float64": (lambda: F.linear(x.double(), weight), "cast it"),
    "transposed": (lambda: x @ square, "quantise the transpose"),
    "no F.linear": (lambda: torch.addmm(bias, x, weight.t(), beta=2), "call F.linear"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told_once_counted_and_refused_in_strict_mode(cause: str) -> None:
    call, remedy = CAUSES[cause]
    with pytest.warns(jitgen.FallbackWarning, match=cause) as told:
        results = call(), call()
    assert len(told) == 1
    assert torch.equal(*results)
    assert remedy in str(told[0].message)
    ((reason, calls),) = counted().items()
    assert cause in reason
    assert calls == 2
    with jitgen.strict(), pytest.raises(jitgen.UnsupportedError, match="strict mode"):
        call()
    assert list(counted().values()) == [2]


def test_what_is_asked_for_is_no_fallback() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.linear(x, weight, bias)
        F.linear(x.clone().requires_grad_(), weight, bias.clone().requires_grad_()).sum().backward()
        with torch.no_grad():
            F.linear(x.clone().requires_grad_(), weight)
        weight.dequantize()
        jitgen.jit(lambda x: F.linear(x, weight)).reference(x.double())
    assert counted() == {}


def test_torch_compile_runs_the_kernel_and_tells_nothing() -> None:
    layer = nn.Linear(64, 32)
    jitgen.quantize_(layer, "int8")
    want = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-4)
    assert not counted()


def test_quantize_leaves_no_bias_trainable_unless_asked() -> None:
    def made() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 32))
        model[2].bias.requires_grad_(False)
        return model

    model = made()
    report = jitgen.quantize_(model, "int8")
    assert report.frozen_biases == ("0.bias", "3.bias")
    assert "no longer trainable: 2 biases (0.bias, 3.bias)" in str(report)
    assert "in torch" not in str(report)  # a trainable bias goes through a kernel and its derivative
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    model = made()
    report = jitgen.quantize_(model, "int8", trainable_bias=True)
    assert report.frozen_biases == ()
    assert "trainable" not in str(report)
    assert [layer.bias is not None and layer.bias.requires_grad for layer in model] == [True, False, False, True]
    model(x).sum().backward()
    assert model[3].bias.grad is not None
    alone = nn.Linear(64, 64)
    assert jitgen.quantize_(alone, "int8").frozen_biases == ("bias",)
