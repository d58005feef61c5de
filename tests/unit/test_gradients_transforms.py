"""Gradients of decorated functions within the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, jacfwd, jacrev, vjp
from torch.func import vmap as batched

import jitgen
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

Function = Callable[..., Any]


def loss(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ weight) - y).square().mean()


def stopped(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x @ weight.detach()) * weight.sum().sin() - y).square().sum()


def through_vmap(function: Function, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    batched(function, (None, 0, 0))(leaf, x, y).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, w, x, y: grad(f, (0, 1))(w, x[0], y[0]),
    "per sample": lambda f, w, x, y: batched(grad(f), (None, 0, 0))(w, x, y),
    "grad of vmap": through_vmap,
    "vjp": lambda f, w, x, y: vjp(lambda w: f(w, x[0], y[0]), w)[1](w.new_tensor(2)),
    "value too": lambda f, w, x, y: grad_and_value(f)(w, x[0], y[0]),
    "second": lambda f, w, x, y: jacrev(jacrev(lambda w: f(w, x[0], y[0])))(w),
}


@pytest.mark.parametrize("function", [loss, stopped])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.covering(1)
def test_transforms_are_those_of_torch(transform: str, function: Function) -> None:
    args = tuple(torch.randn(*shape).double() for shape in ((4, 3), (5, 2, 4), (5, 2, 3)))
    run = TRANSFORMS[transform]
    torch.testing.assert_close(run(jitgen.jit(function), *args), run(function, *args))


@pytest.mark.slow
def test_per_sample_gradients_of_norms_tables_and_attention() -> None:
    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (4,), gain).cumsum(-1).amax(-1).sum()

    def table(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, rows).square().sum()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    cases: list[tuple[Function, Any, Any, Any]] = [
        (norm, (0, 1), (0, None), (torch.randn(5, 2, 4), torch.randn(4))),
        (table, 0, (None, 0), (torch.randn(7, 3), torch.randint(7, (5, 4)))),
        (attention, (0, 1, 2), 0, tuple(torch.randn(3, 2, 6, 4) for _ in range(3))),
    ]
    for function, wanted, dims, args in cases:
        found = batched(grad(jitgen.jit(function), wanted), dims)(*args)
        torch.testing.assert_close(found, batched(grad(function, wanted), dims)(*args))


def test_captured_tensors_are_constants_of_a_transform() -> None:
    weight, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 4)
    function = jitgen.jit(lambda x: (x @ weight).sin().sum())
    torch.testing.assert_close(grad(function)(x), grad(lambda x: (x @ weight).sin().sum())(x))


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize(
    "transform", [grad, lambda f: batched(grad(f)), lambda f: jacrev(grad(f))], ids=["grad", "batched", "jacrev"]
)
@pytest.mark.covering(1)
def test_quantised_weights_that_a_function_closes_over(transform: Callable[..., Any], decorated: bool) -> None:
    layer, x = torch.nn.Linear(32, 16), torch.randn(5, 32)
    jitgen.quantize_(layer, "int8")
    dense = layer.weight.dequantize()

    def loss(x: Any) -> Any:
        return F.linear(x, layer.weight, layer.bias).sin().sum()

    def reference(x: Any) -> Any:
        return F.linear(x, dense, layer.bias).sin().sum()

    function = jitgen.jit(loss) if decorated else loss
    torch.testing.assert_close(transform(function)(x), transform(reference)(x), rtol=0, atol=1e-5)


def test_tangents_are_refused() -> None:
    with pytest.raises(jitgen.UnsupportedError, match="tangents"):
        jacfwd(jitgen.jit(lambda x: x.sin()))(torch.randn(3))
