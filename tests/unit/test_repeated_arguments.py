"""One tensor passed as several arguments, or as an argument and as ``out=``: right, and as warm as any other call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.call.dispatch import DispatchState
from jitgen.call.plan import LaunchPlan
from jitgen.runtime.guards import layout_check


def scaled_sum(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * 2 + y * weight


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that did not take the fast path, by who took them."""
    calls: list[str] = []
    for owner, name in ((DispatchState, "cold"), (LaunchPlan, "launch")):
        way = getattr(owner, name)

        def counted(*args: Any, way: Any = way, name: str = name) -> Any:
            calls.append(name)
            return way(*args)

        monkeypatch.setattr(owner, name, counted)
    return calls


def test_calls_stay_warm_whichever_arguments_are_one(slow: list[str]) -> None:
    x, y, weight = torch.randn(3, 50)
    function = jitgen.jit(scaled_sum)
    function(x, y, weight)
    function(x, x, weight)
    slow.clear()
    for arguments in ((x, x, weight), (x, y, weight), (y, y, y), (x, y, x), (weight, x, y)):
        assert torch.equal(function(*arguments), scaled_sum(*arguments))
    assert not slow


def test_plans_stay_warm_whichever_arguments_are_one(slow: list[str]) -> None:
    x, y, weight = torch.randn(3, 50)
    plan = jitgen.jit(scaled_sum).bind(x, y, weight)
    plan(x, x, weight)
    slow.clear()
    for arguments in ((x, x, weight), (x, y, weight), (y, y, y)):
        assert torch.equal(plan(*arguments), scaled_sum(*arguments))
    assert not slow


def test_out_may_be_an_argument_and_stays_warm(slow: list[str]) -> None:
    x, y, weight = torch.randn(3, 50)
    plan = jitgen.jit(scaled_sum).bind(x, y, weight)
    plan(x.clone(), y, weight, out=y.clone())
    for repeated in ((x, y, weight), (x, x, weight)):
        plan(*repeated, out=repeated[0].clone())
        fresh = {id(tensor): tensor.clone() for tensor in repeated}
        arguments = [fresh[id(tensor)] for tensor in repeated]
        expected = scaled_sum(*arguments)
        plan(*arguments, out=arguments[0])
        slow.clear()
        again = scaled_sum(*arguments)
        assert torch.equal(arguments[0], expected)
        plan(*arguments, out=arguments[0])
        assert torch.equal(arguments[0], again)
        assert not slow


def test_out_may_overlap_an_argument_in_part_once_warm() -> None:
    memory = torch.randn(51)
    x, shifted, weight = memory[:50], memory[1:], torch.randn(50)
    plan = jitgen.jit(scaled_sum).bind(x, x, weight)
    for _ in range(2):
        for out in (x, shifted):
            expected = plan(x, x, weight)
            plan(x, x, weight, out=out)
            assert torch.equal(out, expected)


def test_an_update_in_place_of_a_repeated_argument_is_refused_once_warm() -> None:
    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    function, x, y = jitgen.jit(update), torch.randn(50), torch.randn(50)
    for _ in range(3):
        function(x, y)
        with pytest.raises(jitgen.UnsupportedError, match="shares memory"):
            function(x, x)


def test_layouts_are_checked_where_an_argument_is_repeated() -> None:
    x = torch.randn(4, 6)
    check = layout_check([x, x, x])
    assert check(x, x, x)
    assert check(torch.randn(4, 6), x, torch.randn(4, 6))
    for other in (x.t(), x.double(), x[:2], torch.randn(4, 6, requires_grad=True), torch.randn(6, 4).t()):
        assert not check(x, x, other)
        assert not check(other, x, x)
