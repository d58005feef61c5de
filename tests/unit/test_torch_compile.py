"""Decorated functions within torch.compile: cold or warm, they run their own kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import jitgen


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch._dynamo.reset()


def _shifted() -> jitgen.call.function.JitFunction:
    return jitgen.jit(lambda x: torch.sin(x) + 1)


X = torch.randn(3, 4)


def test_a_cold_function() -> None:
    shifted = _shifted()
    compiled = torch.compile(lambda x: shifted(x * 2) * 3, backend="eager")
    for x in (X, X, torch.randn(5, 6)):
        torch.testing.assert_close(compiled(x), (torch.sin(x * 2) + 1) * 3)
    assert shifted.specializations


def test_a_method_keywords_out_and_a_plan() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(4), requires_grad=False)

        @jitgen.jit
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x + 1) - self.scaled(x=x)

    model = Model()
    torch.testing.assert_close(torch.compile(model, backend="eager")(X), model.scale.expand(3, 4))
    shifted = _shifted()
    plan = shifted.bind(X)

    def both(x: torch.Tensor) -> torch.Tensor:
        return plan(x) + shifted(x, out=torch.empty(3, 4))

    torch.testing.assert_close(torch.compile(both, backend="eager")(X), 2 * (X.sin() + 1))


def test_fullgraph_says_why_it_cannot() -> None:
    shifted = _shifted()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"decorated with jitgen\.jit"):
        torch.compile(lambda x: shifted(x) + 1, backend="eager", fullgraph=True)(X)
