"""Gradients of attention on a GPU, in every dialect that has kernels for them, against those of float64 torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from tests import attention_backward as functions
from tests.attention import MASKS, RULES, formula, operands, sample
from tests.attention_backward import compared

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
backends = pytest.mark.parametrize("backend", ["triton", "auto"])


def check(function: Callable[..., Any], *args: torch.Tensor, backend: str, fused: bool = True) -> None:
    on_gpu = [argument.cuda() for argument in args]
    assert [found for found in compared(function, *on_gpu, backend=backend, fused=fused) if found] == []


@backends
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("depth", "width"), [(64, 64), (128, 128), (80, 72), (256, 256), (17, 33), (33, 16), (34, 34)])
def test_dtypes_and_widths(backend: str, dtype: torch.dtype, depth: int, width: int) -> None:
    check(functions.causal, *operands((2, 2), 300, 333, depth, width, dtype), backend=backend)


@backends
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 1000), (1000, 1), (127, 129), (128, 256), (513, 400), (0, 9), (9, 0)]
)
def test_sizes(backend: str, rows: int, keys: int) -> None:
    check(functions.sdpa, *operands((1, 3), rows, keys, 64, 64, BF16), backend=backend, fused=min(rows, keys) > 1)


@backends
@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend: str, mask: str) -> None:
    check(formula(["scale"], [mask]), *operands((1, 2), 300, 333, 64, 64, BF16), backend=backend)


@backends
@pytest.mark.parametrize("rule", RULES)
def test_rules(backend: str, rule: str) -> None:
    check(formula([rule], ["causal"]), *operands((1, 2), 300, 333, 64, 64, BF16), backend=backend)


@backends
@pytest.mark.parametrize("function", [functions.grouped, functions.repeated])
def test_heads_that_share_keys(backend: str, function: Callable[..., Any]) -> None:
    q, _, _ = operands((2, 8), 300, 333, 64, 64, BF16)
    _, k, v = operands((2, 2), 300, 333, 64, 64, BF16)
    check(function, q, k, v, backend=backend)


def _shown() -> torch.Tensor:
    shown = sample((200, 250)) > 0
    shown[3] = False
    return shown


@backends
@pytest.mark.parametrize(
    ("function", "operand", "fused"),
    [
        (functions.sunk, lambda: sample((3,), BF16), True),
        (functions.sloped, lambda: sample((3,)).abs(), False),
        (functions.biased, lambda: sample((3, 200, 250)), False),
        (functions.shown, _shown, True),
    ],
)
def test_operands_of_the_rule(
    backend: str, function: Callable[..., Any], operand: Callable[[], torch.Tensor], fused: bool
) -> None:
    check(function, *operands((2, 3), 200, 250, 64, 64, BF16), operand(), backend=backend, fused=fused)


@backends
def test_documents(backend: str) -> None:
    ids = torch.arange(250).div(33, rounding_mode="floor").expand(2, 250).contiguous()
    check(functions.documents, *operands((2, 3), 250, 250, 64, 64, BF16), ids, backend=backend, fused=False)


@backends
def test_strided_operands_and_equal_bits(backend: str) -> None:
    packed = sample((2, 300, 3, 4, 64), BF16).cuda().requires_grad_()
    function = jitgen.jit(lambda x: functions.causal(*(x[:, :, i].transpose(1, 2) for i in range(3))), backend=backend)
    g = sample((2, 4, 300, 64), BF16).cuda()
    first, second = (torch.autograd.grad(function(packed), packed, g)[0] for _ in range(2))
    assert torch.equal(first, second)
    wanted_of = packed.detach().double().requires_grad_()
    wanted = functions.causal(*(wanted_of[:, :, i].transpose(1, 2) for i in range(3)))
    (reference,) = torch.autograd.grad(wanted, wanted_of, g.double())
    assert (first.double() - reference).abs().max() <= 2 * torch.finfo(BF16).eps * reference.abs().max()
