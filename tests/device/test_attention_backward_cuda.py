"""Gradients of attention by the kernel for Hopper against float64: rules, masks, shapes, strides, shared heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.attention import INF, MASKS, RULES, formula, sample
from tests.attention_backward import (
    biased,
    causal,
    compared,
    documents,
    grouped,
    repeated,
    sdpa,
    shown,
    sloped,
    sunk,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of sm_90a")]

BF16, F16 = torch.bfloat16, torch.float16
SIZES = (1, 63, 64, 65, 127, 129, 1000, 1023)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [sample(shape, dtype, number).cuda() for number, shape in enumerate(shapes)]


def heads(
    rows: int,
    keys: int,
    depth: int,
    width: int,
    batch: tuple[int, int] = (1, 2),
    shared: int = 1,
    dtype: torch.dtype = BF16,
) -> list[torch.Tensor]:
    outer, inner = batch
    return tensors(
        (outer, inner * shared, rows, depth), (outer, inner, keys, depth), (outer, inner, keys, width), dtype=dtype
    )


def poison() -> None:
    """Fills memory that the allocator gives out next with NaN."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 22, 1 << 20, 1 << 18, 1 << 16) * 4]
    del blocks


def check(function: Callable[..., Any], *args: torch.Tensor, fused: bool = True) -> None:
    poison()
    wrong = [each for each in compared(function, *args, backend="cuda", fused=fused) if each is not None]
    assert not wrong, (wrong, [tuple(a.shape) for a in args])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("function", [sdpa, causal])
def test_sizes(function: Callable[..., Any], dtype: torch.dtype) -> None:
    for number, rows in enumerate(SIZES):
        for keys in (SIZES[number], SIZES[number - 1], SIZES[-number]):
            check(function, *heads(rows, keys, 128, 128, dtype=dtype), fused=min(rows, keys) > 1)


@pytest.mark.parametrize(("depth", "width"), [(64, 64), (80, 80), (96, 96), (128, 64), (24, 128), (8, 8), (20, 70)])
def test_heads(depth: int, width: int) -> None:
    for function, rows, keys in ((causal, 200, 300), (sdpa, 65, 129)):
        check(function, *heads(rows, keys, depth, width))


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    for rows, keys in ((193, 400), (65, 129)):  # every row has keys under every mask
        check(formula(["scale"], [mask]), *heads(rows, keys, 64, 64))


@pytest.mark.parametrize("rules", [["cap"], ["scale", "distance"], ["alternate"], ["cap", "distance"]])
def test_rules(rules: list[str]) -> None:
    check(formula(rules, ["window"]), *heads(300, 400, 128, 128))
    check(formula(rules, []), *heads(100, 65, 128, 64))


def test_heads_that_share_keys() -> None:
    for rows, keys, shared in ((200, 300, 4), (65, 127, 3)):
        check(grouped, *heads(rows, keys, 128, 128, (2, 2), shared))
        check(repeated, *heads(rows, keys, 64, 96, (2, 2), shared))


def test_biases_slopes_and_sinks() -> None:
    args = heads(200, 300, 128, 128, (2, 3))
    check(biased, *args, *tensors((3, 200, 300), dtype=torch.float32), fused=False)
    check(sloped, *args, *tensors((3,), dtype=torch.float32), fused=False)
    check(sunk, *args, *tensors((3,)))


def test_documents_and_masks_in_memory() -> None:
    check(documents, *heads(300, 300, 128, 128, (2, 2)), (torch.arange(600).reshape(2, 300) // 70).cuda())
    mask = sample((2, 1, 200, 300)).cuda() > 0
    mask[0, :, 50] = False
    check(shown, *heads(200, 300, 64, 64, (2, 2)), mask)


def test_strides() -> None:
    def rows_first(q: Any, k: Any, v: Any) -> Any:
        return causal(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    check(rows_first, *tensors(*[(2, 150, 3, 64)] * 3))
    check(lambda q, k, v: causal(q[..., 1:65], k[..., 1:65], v[..., 3:67]), *tensors(*[(1, 2, 150, 72)] * 3))

    def summed(q: Any, k: Any, v: Any) -> Any:
        return causal(q, k, v).float().sum()

    args = heads(200, 150, 64, 64)
    leaves = [a.clone().requires_grad_() for a in args]
    jitgen.jit(summed, backend="cuda")(*leaves).backward()
    wanted = [a.double().requires_grad_() for a in args]
    summed(*wanted).backward()
    for leaf, reference in zip(leaves, wanted, strict=True):
        error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 2e-2, error


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv", "qv"])
def test_some_gradients(wanted: str) -> None:
    args = heads(200, 300, 128, 128)
    leaves = [a.clone().requires_grad_(name in wanted) for name, a in zip("qkv", args, strict=True)]
    whole = [a.clone().requires_grad_() for a in args]
    g = sample((1, 2, 200, 128), BF16, 7).cuda()
    for inputs in (leaves, whole):
        jitgen.jit(causal, backend="cuda")(*inputs).backward(g)
    for name, leaf, other in zip("qkv", leaves, whole, strict=True):
        if name in wanted:
            torch.testing.assert_close(leaf.grad, other.grad, atol=2**-6 * float(other.grad.abs().max()), rtol=0.0)


def test_rows_without_keys_and_infinities() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        mask = torch.arange(k.shape[-2], device=q.device) < i - 5
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    check(attend, *heads(100, 90, 64, 64))
    q, k, v = heads(150, 150, 64, 64)
    k[:, :, 140:] = INF  # what a causal mask hides from the first rows does not reach their gradients
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = jitgen.jit(causal, backend="cuda")(*leaves)
    out[:, :, :128].sum().backward()
    assert not leaves[0].grad[:, :, :64].isnan().any()


def test_many_blocks_and_the_same_bits() -> None:
    args = heads(900, 700, 64, 64, (3, 20))
    g = sample((3, 20, 900, 64), BF16, 3).cuda()
    found = []
    for _ in range(3):
        leaves = [a.clone().requires_grad_() for a in args]
        jitgen.jit(causal, backend="cuda")(*leaves).backward(g)
        found.append([leaf.grad for leaf in leaves])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_all_rules_and_masks_together() -> None:
    check(formula(sorted(RULES), ["causal", "window"]), *heads(257, 300, 96, 128, (2, 3)))
