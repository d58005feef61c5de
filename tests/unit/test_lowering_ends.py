"""Lowering ends: each search in it has a bound, and random chains of movements are lowered and right."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import movement_chains
import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols, views
from tests import fresh

LIMIT = 60.0
"""Seconds that any of these may take to lower; each takes less than one on a machine that does nothing else."""
X, V, W = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2, 1, 1]), torch.tensor([[0, 2, 1], [1, 1, 0]])


def _repeated_row(t: torch.Tensor) -> torch.Tensor:
    t = t[:1][torch.tensor([0, 0])[:, None].expand(2, 2).reshape(-1)]
    return F.pad((t + t.flip(0)).reshape(2, 6), (2, 0))


def _no_elements(t: torch.Tensor) -> torch.Tensor:
    t = t[:, :1].reshape(1, -1)[0:0].permute(1, 0)
    return t[torch.tensor([2, 3])[:, None].expand(2, 2).reshape(-1)].reshape(0, 3)


GATHERS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "by a nested literal": (lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1]])), (X,)),
    "take_along_dim": (lambda x: torch.take_along_dim(x, torch.tensor([[0, 2], [1, 1], [2, 2], [0, 0]]), 1), (X,)),
    "by a reshaped concatenation": (lambda x, v: x.gather(1, torch.cat([v[:2], v[2:]]).reshape(2, 2)), (X, V)),
    "by a stack": (lambda x, v: x.gather(0, torch.stack([v[:3], v[1:]]).reshape(3, 2)), (X, V)),
    "two gathers that want other shapes": (
        lambda x, i: (
            x.gather(0, torch.cat([i[:1], i[1:]]).T.reshape(2, 3)).reshape(6)
            + x.gather(0, torch.cat([i[:1], i[1:]]).reshape(3, 2)).reshape(6)
        ),
        (X, W),
    ),
    "a padded reshape of a gather": (_repeated_row, (X,)),
    "a reshape of no elements": (_no_elements, (X,)),
}


@pytest.mark.parametrize("name", GATHERS)
def test_indices_that_are_joined_and_reshaped(name: str) -> None:
    function, arguments = GATHERS[name]
    assert torch.equal(jitgen.jit(function)(*arguments), function(*arguments))


def _repeated(step: Callable[[Any], Any], times: int = 40) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        for _ in range(times):
            n = step(n)
        return x * n

    return function


def _folded(x: torch.Tensor) -> torch.Tensor:
    for _ in range(18):
        x = torch.cat([x[x.shape[0] // 2 :], x[: x.shape[0] // 3]])
    return x + 1


SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": _repeated(lambda n: max(n, n // 2 + 1)),
    "sum": _repeated(lambda n: n // 3 + n % 7),
    "product": _repeated(lambda n: (n * n + n) % 11 + n // 2),
    "float": _repeated(lambda n: n * 0.5 + n / 3),
    "joined slices": _folded,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_computed_from_themselves_again_and_again(name: str) -> None:
    x, started = torch.ones(500), time.monotonic()
    function = jitgen.jit(SIZES[name])
    function.lower(x)
    assert time.monotonic() - started < LIMIT
    torch.testing.assert_close(function(x), SIZES[name](x))
    torch.testing.assert_close(function(x[:77]), SIZES[name](x[:77]))  # a number that was fixed is guarded


def test_expressions_are_equal_and_hashed_by_value() -> None:
    n = symbols.size_symbol(0, 0)
    first, second = (symbols.maximum(n, symbols.floordiv(n, 2)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != symbols.minimum(n, symbols.floordiv(n, 2))
    assert pickle.loads(pickle.dumps(first)) == first
    assert str(first) == "max(s0_0, (s0_0 // 2))"


def test_rewriting_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_STEPS", 3)
    with pytest.raises(UnsupportedError, match=r"no kernels within 3 rewrites.*test_lowering_ends"):
        jitgen.jit(lambda x: x.flip(0).T.reshape(-1)[1:].roll(2) + 1).lower(X)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) if seed > 2 else seed for seed in range(6)]
)
def test_random_chains(seed: int) -> None:
    _check_chains(range(100 * seed, 100 * seed + 12), compiled=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_more_random_chains(seed: int) -> None:
    _check_chains(range(1000 * seed + 600, 1000 * seed + 800), compiled=200)


def _check_chains(seeds: range, compiled: int) -> None:
    """Lower the chain of each seed, and compare the results of the first ``compiled``."""
    for number, seed in enumerate(seeds):
        text, argument = movement_chains.draw(seed)
        function, started = movement_chains.function(text), time.monotonic()
        decorated = jitgen.jit(function)
        decorated.lower(argument)
        assert time.monotonic() - started < LIMIT, text
        if number < compiled:
            torch.testing.assert_close(decorated(argument), function(argument), msg=text)


def test_a_module_that_a_trace_imports_is_not_followed() -> None:
    program = (
        "import torch, jitgen\n"
        "f = lambda x: x.expand(torch.broadcast_shapes(x.shape, (3, 4))) + 1\n"
        "assert jitgen.jit(f).lower(torch.ones(3, 1)).lowered.graph.outputs\n"
    )
    done = fresh.run(program, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
