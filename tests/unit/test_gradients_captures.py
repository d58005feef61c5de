"""Gradients of functions that close over tensors and values: warm calls are resolved once, and see what changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.call.resolver import Resolver
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(6, 6), 3.0

    @jitgen.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def test_warm_calls_of_a_module_specialize_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = Scaled(), []
    specialize = Resolver.specialize

    def counted(self: Resolver, *of: Any, **named: Any) -> Any:
        asked.append(self.name)
        return specialize(self, *of, **named)

    monkeypatch.setattr(Resolver, "specialize", counted)
    for x in (torch.randn(2, 6), torch.randn(2, 6, requires_grad=True)):
        model(x).sum().backward()
        model.zero_grad()
        asked.clear()
        model(x).sum().backward()
        assert not asked
        wanted = torch.autograd.grad((torch.tanh(model.linear(x)) * 3).sum(), list(model.parameters()))
        torch.testing.assert_close([p.grad for p in model.parameters()], list(wanted))


def test_what_a_function_captures_may_change() -> None:
    model, x = Scaled(), torch.randn(2, 6)

    def check(*wanted: Any) -> None:
        model.zero_grad()
        y = model(x)
        torch.testing.assert_close(y, torch.tanh(model.linear(x)) * model.scale)
        if y.requires_grad:
            y.sum().backward()
        assert tuple(p.grad is not None for p in model.parameters()) == wanted

    check(True, True)
    check(True, True)
    model.scale = 7.0
    check(True, True)
    model.linear.weight.requires_grad_(False)
    check(False, True)
    model.linear.bias.requires_grad_(False)
    check(False, False)
    model.requires_grad_()
    check(True, True)
    model.linear = torch.nn.Linear(6, 3)
    check(True, True)
    model.double()
    x = x.double()
    check(True, True)
    with torch.no_grad():
        assert not model(x).requires_grad
