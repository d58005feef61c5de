"""Decorated functions under ``torch.autocast``: dtypes as of the same torch functions, and a part of the signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import lowered

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.trace import autocast, table

X, W, BATCH = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 3, 3)
CLASSES, SIGNS = torch.tensor([0, 1, 2]), torch.tensor([1.0, -1.0, 1.0])

CALLS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, w[:, 0]),
    "@": lambda x, w: x @ w.T,
    "matmul of a matrix and a vector": lambda x, w: x @ w[0],
    "mm": lambda x, w: torch.mm(x, w.T),
    "mv": lambda x, w: torch.mv(x, w[0]),
    "dot": lambda x, w: torch.dot(x[0], w[0]),
    "addmm": lambda x, w: torch.addmm(x[:, :3], x, w.T),
    "bmm": lambda x, w: torch.bmm(x[None], w.T[None]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "outer": lambda x, w: torch.outer(x[0], w[0]),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "cat": lambda x, w: torch.cat([x, w]),
    "stack": lambda x, w: torch.stack([x, w], 1),
    "prod": lambda x, w: x.prod(),
    "sum": lambda x, w: x.sum(-1),
    "softmax": lambda x, w: x.softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,)),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,)),
    "exp": lambda x, w: x.exp(),
    "pow": lambda x, w: x**2,
    "add": lambda x, w: x + w,
    "mse_loss": lambda x, w: F.mse_loss(x, w),
    "l1_loss": lambda x, w: F.l1_loss(x, w),
    "huber_loss": lambda x, w: F.huber_loss(x, w),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, w),
    "binary_cross_entropy": lambda x, w: F.binary_cross_entropy(x, w),
    "binary_cross_entropy_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x, w),
    "cross_entropy": lambda x, w: F.cross_entropy(x, CLASSES),
    "nll_loss": lambda x, w: F.nll_loss(x, CLASSES),
    "kl_div": lambda x, w: F.kl_div(x, w),
    "poisson_nll_loss": lambda x, w: F.poisson_nll_loss(x, w),
    "soft_margin_loss": lambda x, w: F.soft_margin_loss(x, w),
    "multi_margin_loss": lambda x, w: F.multi_margin_loss(x, CLASSES),
    "hinge_embedding_loss": lambda x, w: F.hinge_embedding_loss(x, w),
    "margin_ranking_loss": lambda x, w: F.margin_ranking_loss(x, w, x),
    "triplet_margin_loss": lambda x, w: F.triplet_margin_loss(x, w, x),
    "cosine_embedding_loss": lambda x, w: F.cosine_embedding_loss(x, w, SIGNS),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, w),
    "pairwise_distance": lambda x, w: F.pairwise_distance(x, w),
    "normalize": lambda x, w: F.normalize(x),
    "gelu of a linear": lambda x, w: F.gelu(F.linear(x, w)) + x[:, :3],
}

single, half, narrow, double = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = (
    *((single, single, narrow), (single, narrow, half), (narrow, single, half)),
    *((narrow, narrow, narrow), (double, single, narrow), (double, narrow, half)),
)
"""Of two operands and of autocast: every pair of them."""


def _dtype(call: Callable[[], Any]) -> str | None:
    try:
        return str(call().dtype).removeprefix("torch.")
    except (RuntimeError, TypeError, ValueError, TraceError, UnsupportedError):
        return None


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_under_autocast(name: str) -> None:
    for first, second, lower in DTYPES:
        x, w = X.to(first), W.to(second)
        with torch.autocast("cpu", dtype=lower):
            want = _dtype(lambda x=x, w=w: CALLS[name](x, w))
            got = _dtype(lambda x=x, w=w: lowered(CALLS[name], x, w).graph.outputs[0])
        assert got == want, (first, second, lower)


def test_autocast_is_part_of_the_signature() -> None:
    jitted = jitgen.jit(lambda x, w: F.linear(x, w))
    plan, out = jitted.bind(X, W), torch.empty(3, 3)
    for _ in range(3):
        assert jitted(X, W).dtype == plan(X, W).dtype == jitted(X, W, out=out).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert jitted(X, W).dtype == plan(X, W).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert jitted(X, W).dtype == torch.float32
            with pytest.raises(ValueError, match="bfloat16"):
                jitted(X, W, out=out)
        with torch.autocast("cpu", dtype=torch.float16):
            assert jitted(X, W).dtype == plan(X, W).dtype == torch.float16


def test_values_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = jitgen.jit(lambda x, w: F.mse_loss(F.linear(x, w), x[:, :3]))(X, W)
    # One rounding of the product to bfloat16, of at most 2**-8 of it, is what the two may differ by.
    product = F.linear(X.bfloat16().double(), W.bfloat16().double())
    rounding, distance = 2**-8 * product.abs(), product - X[:, :3]
    bound = (2 * distance.abs() * rounding + rounding**2).mean().item()
    torch.testing.assert_close(got.double(), distance.square().mean(), rtol=2**-20, atol=bound)


@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: F.gelu(x @ w.t() + b),
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: torch.matmul(x, w.T) * b,
    ],
    ids=["linear", "gelu of @", "addmm", "matmul"],
)
def test_products_with_quantised_weights(
    product: Callable[..., Any], dtype: torch.dtype, activation: str | None
) -> None:
    """They compute in autocast's dtype, whatever that of x, as eager torch on the same weights does."""
    weight, bias = jitgen.quantize(torch.randn(48, 64), "int8", activation=activation), torch.randn(48).bfloat16()
    x = torch.randn(5, 64, dtype=dtype, requires_grad=True)
    function = jitgen.jit(product)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = function(x, weight, bias), function.reference(x, weight, bias)
        alike = jitgen.jit(product)(x.bfloat16(), weight, bias)
    assert found.dtype == wanted.dtype == alike.dtype
    assert torch.equal(found, alike)
    # Up to three results in a row are each rounded to bfloat16, by 2**-9 of themselves.
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_that_autocast_knows_has_its_place(device: str) -> None:
    """torch's dispatcher says which functions autocast converts the arguments of."""
    known = autocast.LOWER[device] | autocast.FLOAT32[device] | autocast.WIDEST[device] | autocast.REFUSED[device]
    names = {name.rpartition(".")[2] for name in table.rows()}
    assert {name for name in names if _has_kernel(name, f"Autocast{device.upper()}")} <= known


def _has_kernel(name: str, key: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
        if torch._C._dispatch_has_kernel(full) and torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
            return True
    return False
