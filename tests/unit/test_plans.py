"""Plans: one signature bound, and calls that write into memory of the caller's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import jitgen
from jitgen.call.plan import LaunchPlan

x3 = torch.tensor([1.0, 2.0, 3.0])


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_plans() -> None:
    function = jitgen.jit(lambda x, k: x * k)
    plan = function.bind(x3, 2.0)
    same(plan(x3 + 1, 3.0), (x3 + 1) * 3)
    for wrong in (torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]):
        with pytest.raises(ValueError, match="bound"):
            plan(wrong, 2.0)
    for arguments in ((), (x3,), (x3, 2.0, 3.0)):
        with pytest.raises(TypeError, match=rf"plan of <lambda> takes 2 arguments, got {len(arguments)}$"):
            plan(*arguments)
        with pytest.raises(TypeError, match=rf"takes 2 arguments, got {len(arguments)}$"):
            plan(*arguments, out=torch.empty(3))
    with pytest.raises(TypeError, match="argument 0 of the plan of <lambda> is int, not a tensor"):
        plan(3, 2.0)
    for wrong_number in (2, x3, True):
        with pytest.raises(ValueError, match=r"bound with 2\.0"):
            plan(x3, wrong_number)
    flagged = jitgen.jit(lambda x, negate: -x if negate else x * 1).bind(x3, True)
    same(flagged(x3 + 1, True), -(x3 + 1))
    with pytest.raises(ValueError, match="bound with True"):
        flagged(x3, False)


def test_out() -> None:
    function = jitgen.jit(lambda x, y: x * 2 + y)
    out = torch.full((3,), 99.0)
    assert function(x3, x3, out=out) is out
    same(out, x3 * 3)
    strided = torch.full((6,), 99.0)
    function(x3, x3, out=strided[::2])
    same(strided[::2], x3 * 3)
    assert (strided[1::2] == 99).all()
    pair = torch.empty(3), torch.empty(3)
    jitgen.jit(lambda x: (x + 1, x + 2))(x3, out=pair)
    same(pair, (x3 + 1, x3 + 2))
    x = x3.clone()
    function(x, x3, out=x)
    same(x, x3 * 3)


@pytest.mark.parametrize(
    ("out", "what"),
    [
        (torch.empty(4), "result is"),
        (torch.empty(3, dtype=torch.float64), "result is"),
        (torch.empty(1).expand(3), "share memory"),
        ((torch.empty(3), torch.empty(3)), "returns 1"),
    ],
)
def test_wrong_out(out: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        jitgen.jit(lambda x: x * 2)(x3, out=out)


@pytest.mark.parametrize(
    "function",
    [lambda a: a, lambda a: a.T, lambda a: a.T[1:], lambda a: (a + 1).T, lambda a: a.roll(2), lambda a: (a + 1, a.T)],
)
def test_out_of_results_that_are_views(function: Any) -> None:
    for a in (torch.randn(6, 6), torch.randn(6, 6).T, torch.randn(6, 12)[:, ::2]):
        jitted, want = jitgen.jit(function), function(a)
        out = tuple(map(torch.empty_like, want)) if isinstance(want, tuple) else torch.empty(want.shape)
        for _ in range(2):
            assert jitted(a, out=out) is out
            same(out, want)
        with pytest.raises(ValueError, match=r"result is|returns"):
            jitted(a, out=torch.empty(6, 7))
    if not isinstance(want, tuple) and want.shape == a.shape:
        expected = want.clone()
        same(jitted(a, out=a), expected)


def test_out_of_a_function_that_updates_an_argument_is_refused() -> None:
    with pytest.raises(jitgen.UnsupportedError, match="updates an argument"):
        jitgen.jit(lambda x: x.add_(1) * 2)(x3.clone(), out=torch.empty(3))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose plans were made, in order."""
    names: list[str] = []
    prepare = LaunchPlan._prepare

    def counted(self: LaunchPlan, function: Any, *rest: Any) -> None:
        names.append(function.name)
        prepare(self, function, *rest)

    monkeypatch.setattr(LaunchPlan, "_prepare", counted)
    return names


def test_calls_with_out_make_a_plan_once(made: list[str]) -> None:
    function = jitgen.jit(lambda x, k, negate=False: (-x if negate else x) * k)
    for size in (3, 5, 3, 5):
        for factor in (2.0, 3.0):
            x, out = torch.randn(size), torch.empty(size)
            assert function(x, factor, out=out) is out
            same(out, x * factor)
    assert len(made) == 2
    x, out = torch.randn(3), torch.empty(3)
    for negate in (True, False, True):
        same(function(x, 2, negate, out=out), (-x if negate else x) * 2)
    same(function(x, 2, negate=True, out=out), -x * 2)
    assert len(made) == 4


def test_calls_with_out_where_a_number_is_static(made: list[str]) -> None:
    function = jitgen.jit(lambda x, k: x * 2 if k > 1 else x + k)
    for number in (2.0, 0.0, 2.0, -0.0, 0.0, 2, 2):
        x, out = torch.randn(3), torch.empty(3)
        same(function(x, number, out=out), x * 2 if number > 1 else x + number)
    assert len(made) == 4


def test_calls_with_out_see_what_the_function_reads() -> None:
    scale = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    module = torch.nn.Module()
    module.scale = scale
    module.double = False
    function = jitgen.jit(lambda x: x * module.scale * 2 if module.double else x * module.scale)
    out = torch.empty(3)
    same(function(x3, out=out), x3 * scale)
    scale.data = torch.randn(3)
    same(function(x3, out=out), x3 * scale)
    module.double = True
    same(function(x3, out=out), x3 * scale * 2)


def test_what_no_plan_takes_is_refused_with_out_too() -> None:
    function = jitgen.jit(lambda x, y: x + y)
    with pytest.raises(jitgen.TraceError, match="got set"):
        function(x3, {1, 2}, out=torch.empty(3))


def test_plans_keep_no_memory_of_arguments() -> None:
    function = jitgen.jit(lambda x: x + 1)
    x, out = torch.randn(3), torch.empty(3)
    gone = weakref.ref(x), weakref.ref(out)
    plan = function.bind(x)
    plan(x, out=out)
    function(x, out=out)
    del x, out
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    same(plan(x3), x3 + 1)
