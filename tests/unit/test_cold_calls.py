"""What a new call asks: its arguments are checked once, whatever its form, and those of a known one are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.call import signature
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


def scaled(x: torch.Tensor, weight: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.relu(x * weight) * scale


def checks(call: Callable[[], Any]) -> int:
    """How often ``signature.check`` runs within ``call``."""
    count = 0

    def entered(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is signature.check.__code__

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


FORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "positional": lambda function, x, y: function(x, y),
    "keywords": lambda function, x, y: function(x, scale=3.0, weight=y),
    "out": lambda function, x, y: function(x, y, out=torch.empty_like(x)),
    "out and keywords": lambda function, x, y: function(x, weight=y, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_checked_once(form: str) -> None:
    function, call = jitgen.jit(scaled), FORMS[form]
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    assert checks(lambda: call(function, x, y)) == 1
    assert checks(lambda: call(function, x, y)) == 0
    assert checks(lambda: call(function, x[:2], y[:2])) == 1
    assert torch.allclose(function(x, y), scaled(x, y))


def test_bind_checks_once_and_so_does_a_plan_that_is_called_differently() -> None:
    x, y, out = torch.randn(3, 5), torch.randn(3, 5), torch.empty(5, 3).t()
    function = jitgen.jit(scaled)
    assert checks(lambda: function.bind(x, y)) == 1
    plan = function.bind(x, y)
    assert checks(lambda: plan(x, y)) == 0
    assert checks(lambda: plan(x, y, out=out)) == 1
    assert torch.allclose(out, scaled(x, y))


def test_an_empty_tensor_is_checked_at_every_call() -> None:
    """Its address is 0, as that of a tensor that has lost its memory is."""
    function, x = jitgen.jit(scaled), torch.empty(0, 5)
    for _ in range(2):
        assert checks(lambda: function(x, x)) == 1
    lost = torch.randn(3, 5)
    function(lost, torch.ones(3, 5))
    lost.untyped_storage().resize_(0)
    with pytest.raises(jitgen.UnsupportedError, match="without memory"):
        function(lost, torch.ones(3, 5))


@pytest.mark.parametrize("known", [False, True])
def test_what_no_kernel_takes_is_refused_under_a_mode_too(known: bool) -> None:
    class Doubled(torch.Tensor):
        """A tensor whose elements mean something else."""

    from torch.utils.flop_counter import FlopCounterMode

    function, x = jitgen.jit(scaled), torch.randn(3, 5)
    if known:
        function(x, x)
    with pytest.raises(jitgen.UnsupportedError, match="type Doubled"):
        function(x.as_subclass(Doubled), x)
    with FlopCounterMode(display=False), pytest.raises(jitgen.UnsupportedError, match="type Doubled"):
        function(x.as_subclass(Doubled), x)
    with FlopCounterMode(display=False):
        assert torch.allclose(function(x, x), scaled(x, x))
