"""The judge of random operators: right ones pass, and each kind of wrong one is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.conformance import randomness

X = torch.arange(1.0, 6.0)
Draw = Callable[[], torch.Tensor]

PAIRS: dict[str, tuple[Draw, Draw, bool]] = {
    "the same dropout": (lambda: F.dropout(X, 0.2), lambda: F.dropout(X, 0.2), True),
    "dropout that is rounded otherwise": (
        lambda: X * (1 / 0.7) * torch.empty(5).bernoulli_(0.7),
        lambda: F.dropout(X, 0.3),
        True,
    ),
    "a small p of one element": (lambda: F.dropout(X[:1], 0.01), lambda: F.dropout(X[:1], 0.01), True),
    "p of 0": (lambda: F.dropout(X, 0.0), lambda: F.dropout(X, 0.0), True),
    "normal numbers": (lambda: torch.randn(3, 2), lambda: torch.randn(3, 2), True),
    "no elements": (lambda: torch.rand(0), lambda: torch.rand(0), True),
    "dropout without its scale": (lambda: F.dropout(X, 0.2) * 0.8, lambda: F.dropout(X, 0.2), False),
    "dropout of the wrong scale, with a small p": (
        lambda: F.dropout(X, 0.02) * 0.98,
        lambda: F.dropout(X, 0.02),
        False,
    ),
    "numbers of another p": (lambda: torch.empty(5).bernoulli_(0.9), lambda: torch.empty(5).bernoulli_(0.3), False),
    "nothing dropped": (lambda: X / 0.5, lambda: F.dropout(X, 0.5), False),
    "uniform for normal numbers": (lambda: torch.rand(5) - 0.5, lambda: torch.randn(5), False),
    "an integer too high": (lambda: torch.randint(1, 4, (5,)), lambda: torch.randint(0, 3, (5,)), False),
    "not a number": (lambda: torch.rand(5).log().sqrt(), lambda: torch.rand(5), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_distributions_are_compared(name: str) -> None:
    got, eager, same = PAIRS[name]
    assert (randomness.mismatch(got, eager, roundings=4) is None) == same


def test_an_operator_is_random_where_it_draws() -> None:
    """Not where two results differ: those of a dropout with a small p are mostly equal."""
    assert randomness.draws_numbers(lambda: F.dropout(X[:1], 1e-9))
    assert randomness.draws_numbers(lambda: torch.randn(2))
    assert not randomness.draws_numbers(lambda: F.dropout(X, 0.5, training=False))
    assert not randomness.draws_numbers(lambda: X.sort())
