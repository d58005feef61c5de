"""What a user writes, for mypy and pyright (``make lint``): each line is right, and says what a checker must find.

Lines that are wrong have an ignore of the one error that they are; an ignore that nothing needs is an error, too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import jitgen


@jitgen.jit
def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return torch.relu(x) * scale


@jitgen.jit(backend="cpp")
def both(x: Tensor, *, shift: int) -> tuple[Tensor, Tensor]:
    return x + shift, x - shift


doubled = jitgen.jit(lambda x: x * 2)


def functions(x: Tensor, out: Tensor) -> None:
    assert_type(scaled(x), Tensor)
    assert_type(scaled(x, scale=3.0), Tensor)
    assert_type(scaled(x, out=out), Tensor)
    assert_type(both(x, shift=1), tuple[Tensor, Tensor])
    assert_type(scaled.reference(x, 1.0), Tensor)
    assert_type(scaled.source(x), str)
    text: str = doubled.source(x)  # Any for mypy, which does not know what lambdas take
    print(text)
    scaled()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    scaled(x, "2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    both(x)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    plan = scaled.bind(x, 2.0)
    plan(x, 2.0, out=out)
    lowered = scaled.lower(jitgen.TensorSpec(("M", 64), torch.float32), 2.0, target="sm_90a", backend="cuda")
    assert_type(lowered.source, str)
    assert_type(lowered.explain(), str)


class Base(nn.Module):
    def gate(self, x: Tensor, bias: float = 0.0) -> Tensor:
        return x + bias


class Layer(Base):
    @jitgen.jit
    def gate(self, x: Tensor, bias: float = 0.0) -> Tensor:
        return torch.sigmoid(x) + bias

    @jitgen.jit(backend="auto")
    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x, 1.0)

    @staticmethod
    @jitgen.jit
    def halved(x: Tensor) -> Tensor:
        return x / 2


class Scale:
    def __init__(self, factor: float):
        self.factor = factor

    @jitgen.jit
    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor


class Wider(Layer):
    @jitgen.jit
    def gate(self, x: Tensor, bias: float = 0.0, more: float = 0.0) -> Tensor:
        return torch.sigmoid(x) + bias + more


def methods(x: Tensor) -> None:
    layer = Layer()
    assert_type(layer.gate(x), Tensor)
    assert_type(layer.forward(x), Tensor)
    assert_type(Layer.halved(x), Tensor)
    # A method that may override another is a function for checkers, so that the rest needs a cast.
    assert_type(cast("jitgen.JitFunction[..., Tensor]", layer.gate).source(x), str)
    assert_type(Scale(2.0).apply(x), Tensor)
    base: Base = layer
    assert_type(base.gate(x, bias=1.0), Tensor)
    layer.gate()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def models(model: nn.Module, weight: Tensor, x: Tensor) -> None:
    served = jitgen.jit(model)
    result: Any = served(x)
    report = jitgen.quantize_(model, "int4", group_size=128)
    print(result, report)
    quantised = jitgen.quantize(weight, "int4", group_size=128)
    assert_type(quantised, jitgen.QTensor)
    dense: Tensor = quantised.dequantize(torch.float32)
    scaled(quantised)
    scaled(dense)
    with jitgen.strict():
        scaled(x)
    with jitgen.record("specs.json"):
        scaled(x)
    unsubscribe = jitgen.on_compile(lambda event: print(event.name))
    unsubscribe()
