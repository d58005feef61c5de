"""Objects as arguments: they are followed and guarded as captured objects are; no call keeps them alive."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jitgen
from jitgen.errors import TraceError, UnsupportedError

x = torch.tensor([1.0, -2.0, 3.0])


@dataclasses.dataclass
class Config:
    k: float = 2.0
    more: Any = None


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: float):
        self.k = k


class Mode(enum.Enum):
    PLUS = 1
    MINUS = -1


class Level(enum.IntEnum):
    HIGH = 3


def scaled(x: torch.Tensor, config: Any) -> torch.Tensor:
    return helper(x, config)


def helper(x: torch.Tensor, config: Any) -> torch.Tensor:
    return x * config.k


def nested(x: torch.Tensor, config: Any) -> torch.Tensor:
    return x * config.k + config.more.weight


def called(x: torch.Tensor, function: Any) -> Any:
    return function(x) + 1


def signed(x: torch.Tensor, mode: Mode) -> torch.Tensor:
    return x.exp() if mode is Mode.PLUS else x * mode.value


def times(x: torch.Tensor, number: Any) -> torch.Tensor:
    return number * x * number


def first(x: torch.Tensor, values: Any) -> torch.Tensor:
    return x * float(values[0])


def closure(k: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * k


def with_weight(value: float) -> Any:
    return types.SimpleNamespace(k=value, more=types.SimpleNamespace(weight=torch.full((3,), value)))


CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "dataclass": (scaled, [Config(2.0), Config(3.0), Config(2.0)]),
    "class without weak references": (scaled, [Slotted(2.0), Slotted(3.0)]),
    "namespace": (nested, [with_weight(2.0), with_weight(3.0)]),
    "class": (scaled, [Config, type("Other", (), {"k": 7.0})]),
    "enum": (signed, [Mode.PLUS, Mode.MINUS, Mode.PLUS]),
    "number of an enum": (times, [Level.HIGH]),
    "function": (called, [torch.exp, closure(2.0), closure(3.0), functools.partial(torch.clamp, min=0.5)]),
    "jit function": (called, [jitgen.jit(closure(2.0)), jitgen.jit(closure(4.0))]),
    "method": (called, [nn.ReLU().forward, nn.Sigmoid().forward]),
    "module": (called, [nn.Linear(3, 3), nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.ReLU()]),
    "number of numpy": (times, [np.float32(2.5), np.float64(0.1), np.int64(3), np.float32(3.5)]),
    "array of numpy": (first, [np.array([2.0]), np.array([3.0])]),
    "set": (lambda x, chosen: x * (2 if 1 in chosen else 3), [{1}, {2}, {1}]),
    "list of objects": (lambda x, values: x * values[0].k, [[Config(2.0)], [Config(3.0)]]),
    "range": (lambda x, steps: x * sum(steps), [range(3), range(5)]),
}


def results(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with torch.no_grad():
        return function(*arguments, **keywords)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.quick(where=lambda name: list(CALLS).index(name) % 5 == 0)
def test_results_are_those_of_eager(name: str) -> None:
    function, objects = CALLS[name]
    jitted = jitgen.jit(function)
    for each in (*objects, *objects):
        want = results(function, x, each)
        torch.testing.assert_close(results(jitted, x, each), want)
        torch.testing.assert_close(results(jitted, x, each, out=torch.empty(3)), want)
    assert len(jitted.specializations) <= len(objects)


@pytest.mark.parametrize("make", [lambda: Config(2.0), lambda: Slotted(2.0), lambda: types.SimpleNamespace(k=2.0)])
def test_changes_are_seen_and_what_is_the_same_is_not_traced_again(make: Callable[[], Any]) -> None:
    jitted = jitgen.jit(scaled)
    for _ in range(3):
        torch.testing.assert_close(jitted(x, make()), x * 2)
    assert len(jitted.specializations) == 1
    changed = make()
    for k in (3.0, 5.0, 3.0):
        changed.k = k
        torch.testing.assert_close(jitted(x, changed), x * k)
        torch.testing.assert_close(jitted(x=x, config=changed), x * k)


def test_an_object_may_be_a_mark() -> None:
    mark, other = Config(2.0), Config(2.0)
    marks = types.SimpleNamespace(first=mark)
    for function in (lambda x, c: x * (2 if c is mark else 3), lambda x, c: x * (2 if c is marks.first else 3)):
        jitted = jitgen.jit(function)
        for each in (mark, other, mark):
            torch.testing.assert_close(jitted(x, each), function(x, each))


def test_modules_of_one_architecture_share_kernels() -> None:
    jitted = jitgen.jit(called)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)]
    for layer in (*layers, *layers):
        torch.testing.assert_close(results(jitted, x, layer), results(called, x, layer))
    assert len(jitted.specializations) == 1
    layers[1][1] = nn.Tanh()
    with torch.no_grad():
        layers[2][0].weight.fill_(2.0)
    for layer in layers:
        torch.testing.assert_close(results(jitted, x, layer), results(called, x, layer))


def test_no_argument_is_kept_alive() -> None:
    jitted, module, config, tensor = jitgen.jit(called), nn.Linear(3, 3), Config(), torch.randn(3)
    with torch.no_grad():
        jitted(tensor, module)
    jitgen.jit(scaled)(tensor, config)
    gone = [weakref.ref(each) for each in (module, module.weight, config, tensor)]
    del module, config, tensor
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_plans_and_sources_take_objects() -> None:
    config = Config(2.0)
    jitted = jitgen.jit(scaled)
    plan = jitted.bind(x, config)
    for k in (2.0, 5.0):
        config.k = k
        torch.testing.assert_close(plan(x, config), x * k)
        torch.testing.assert_close(plan(x, copy.copy(config)), x * k)
    with pytest.raises(ValueError, match="argument 1 of the plan"):
        plan(x, Slotted(2.0))
    assert jitted.specializations[-1].kernels[0].entry in jitted.source(x, config)


def test_an_object_keeps_a_tensor() -> None:
    def function(x: torch.Tensor, config: Config) -> torch.Tensor:
        config.more = x * 2
        return x

    jitted = jitgen.jit(function)
    for config in (Config(), Config()):
        jitted(x, config)
        torch.testing.assert_close(config.more, x * 2)


@pytest.mark.parametrize("value", [iter([2.0]), np.zeros(1000)], ids=["iterator", "large array"])
def test_what_cannot_be_compared_is_refused(value: Any) -> None:
    with pytest.raises(TraceError, match="values is") as refused:
        jitgen.jit(first)(x, value)
    assert f"{__file__}:{first.__code__.co_firstlineno + 1}" in str(refused.value)


# ------------------------------------------------------------------------------------------------------------ gradients


def test_gradient_modes_within_a_function() -> None:
    weight = torch.ones(3, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * weight
        with torch.inference_mode(), torch.set_grad_enabled(False):
            return y + 1

    jitted = jitgen.jit(function)
    for _ in range(3):
        torch.testing.assert_close(jitted(x), x + 1)
    with torch.no_grad():
        weight.fill_(2.0)
        torch.testing.assert_close(jitted(x), x * 2 + 1)
    torch.testing.assert_close(jitted(x), x * 2 + 1)
    assert torch.is_grad_enabled()
    torch.testing.assert_close(jitgen.jit(torch.no_grad()(scaled))(x, Config(2.0)), x * 2)


def test_a_captured_tensor_that_requires_grad_gets_a_gradient_where_it_is_used_with_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * weight
        return y * weight

    jitted = jitgen.jit(function)
    for other in (x, torch.randn(5, 3)):
        with torch.no_grad():
            torch.testing.assert_close(jitted(other), other)
        weight.grad = None
        jitted(other).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, other.detach().reshape(-1, 3).sum(0))
    with pytest.raises(UnsupportedError, match="weight requires grad"):
        jitted.bind(x)
