"""Tangents of forward-mode AD: kernels compute none, so a call is refused, and a quantised layer runs in torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import jitgen
from jitgen.errors import FallbackWarning, UnsupportedError


@jitgen.jit
def squared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * x + y


@pytest.fixture
def dual() -> Iterator[torch.Tensor]:
    with forward_ad.dual_level():
        yield forward_ad.make_dual(torch.randn(8), torch.ones(8))


@pytest.mark.parametrize("warm", [False, True])
def test_a_dual_argument_is_refused(warm: bool) -> None:
    plain, plan = torch.randn(8), squared.bind(torch.randn(8), torch.randn(8))
    for _ in range(2 * warm):
        squared(plain, plain), squared(x=plain, y=plain), plan(plain, plain), plan(plain, plain, out=torch.empty(8))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(8), torch.ones(8))
        for call in (squared, plan, lambda x, y: squared(y, y=x), lambda x, y: plan(x, y, out=torch.empty(8))):
            with pytest.raises(UnsupportedError, match="dual tensor of forward-mode AD"):
                call(dual, plain)
            torch.testing.assert_close(call(plain, plain), plain * plain + plain)
        with pytest.raises(UnsupportedError, match="dual tensor"):
            plan(plain, plain, out=dual)
        with pytest.raises(UnsupportedError, match="dual tensor"):
            squared(dual, plain.clone().requires_grad_())
    torch.testing.assert_close(squared(dual, plain), dual * dual + plain)


def test_where_torch_propagates_none_a_dual_tensor_is_plain(dual: torch.Tensor) -> None:
    with forward_ad._set_fwd_grad_enabled(False):
        assert squared(dual, dual).shape == (8,)


def test_within_torch_func() -> None:
    x = torch.randn(3, 8)

    def called(x: torch.Tensor) -> torch.Tensor:
        return squared(x, x)

    for transformed in (
        lambda: torch.func.jvp(called, (x,), (x,)),
        lambda: torch.func.jvp(torch.vmap(called), (x,), (x,)),
        lambda: torch.vmap(lambda x: torch.func.jvp(called, (x,), (x,)))(x),
        lambda: torch.func.jacfwd(called)(x),
    ):
        with pytest.raises(UnsupportedError, match="dual tensor"):
            transformed()
    with forward_ad.dual_level():
        torch.testing.assert_close(torch.vmap(called)(x), x * x + x)


@pytest.mark.parametrize("warm", [False, True])
def test_a_captured_dual_is_refused(warm: bool) -> None:
    scale = torch.randn(8)
    scaled = jitgen.jit(lambda x: x * scale)
    x = torch.randn(8)
    if warm:
        scaled(x), scaled(x)
    with forward_ad.dual_level():
        scale = forward_ad.make_dual(scale, torch.ones(8))
        with pytest.raises(UnsupportedError, match="dual tensor"):
            scaled(x)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("of", ["input", "bias"])
def test_a_quantised_layer_runs_in_torch(warm: bool, of: str) -> None:
    layer = nn.Linear(64, 16)
    jitgen.quantize_(layer, "int8")
    x, tangent = torch.randn(3, 64), torch.randn(3, 64)
    if warm:
        layer(x), layer(x)
    jitgen.quantized_linear._fallbacks.clear()
    with forward_ad.dual_level():
        if of == "bias":
            bias = layer.bias.detach()
            del layer.bias
            layer.bias = forward_ad.make_dual(bias, torch.ones(16))
            expected = torch.ones(3, 16)
        else:
            x = forward_ad.make_dual(x, tangent)
            expected = tangent @ layer.weight.dequantize().T
        with pytest.warns(FallbackWarning, match="tangent"):
            result = layer(x)
        torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, expected)
