"""Reductions on a GPU over another dimension than the last, in both dialects, against float64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.numeric import close, results

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

Function = Callable[..., Any]
BACKENDS = ["cuda", "triton"]

SHAPES = [
    (1, 1, 64),
    (3, 2, 40),
    (2, 5, 8),
    (70, 7, 24),
    (3, 100, 33),
    (2, 129, 1000),
    (5, 512, 256),
    (2, 513, 130),
    (1, 4096, 72),
    (1, 4097, 1024),
    (2, 9000, 48),
    (1, 16_384, 520),
    (1, 20_000, 4100),
    (1, 40_000, 16),
    (1, 263_000, 24),
]
"""(matrices, length, columns) around every change of threads, cluster, residency and parts; some of them unaligned."""

FLOATING: dict[str, tuple[Function, float]] = {
    "sum": (lambda x: x.sum(1), 4),
    "mean": (lambda x: x.mean(1, keepdim=True), 4),
    "variance": (lambda x: x.var(1, correction=0), 8),
    "softmax": (lambda x: F.softmax(x, 1), 16),
    "log_softmax": (lambda x: F.log_softmax(x, 1), 16),
    "logsumexp": (lambda x: x.logsumexp(1), 8),
    "several": (lambda x: (x.sum(1), x.norm(dim=1), x.std(1, correction=0), x.amax(1)), 8),
    "standardized": (lambda x: (x - x.mean(1, True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-2), 16),
    "weighted": (lambda x: (x * torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1]).sum(1), 8),
    "scaled": (lambda x: ((x * x[:, :1]).sum(1), x[:, :1, :] * 2), 8),
}
EXACT: dict[str, Function] = {
    "extrema": lambda x: (x.amax(1), x.amin(1, keepdim=True)),
    "places": lambda x: (x.argmax(1), x.argmin(1), x.max(1)[0]),
    "truth": lambda x: ((x > 2).any(1), (x > -3).all(1)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(
    where=lambda dtype, shape: (
        dtype == torch.float32 and shape in ((3, 2, 40), (2, 129, 1000), (2, 513, 130), (2, 9000, 48), (1, 40_000, 16))
    )
)
def test_columns(backend: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    length = shape[1]
    x = torch.randn(shape, device="cuda").to(dtype)
    for name, (function, terms) in FLOATING.items():
        got, want = results(jitgen.jit(backend=backend)(function)(x)), results(function(x.double()))
        size = 25.0 * (length**0.5 if name in ("sum", "several", "weighted", "scaled") else 1)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype, name
            close(ours, theirs, dtype, terms, length, size)
    for name, function in EXACT.items():
        got, want = results(jitgen.jit(backend=backend)(function)(x)), results(function(x))
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("shape", [(2, 5, 40), (2, 700, 40), (1, 9000, 40), (1, 20_000, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda dtype, shape: dtype == torch.bfloat16 and shape[1] in (5, 9000))
def test_special_columns(backend: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    length = shape[1]
    x = torch.randn(shape, device="cuda")
    x[:, :, 0] = -math.inf
    x[:, length // 2, 1] = math.nan
    x[:, 0, 2] = 60000.0
    x[:, :, 3] = 1e-40
    x[:, -1, 4] = math.inf
    x[:, : length // 2, 5] = -math.inf
    x[:, :, 6] = 3.0
    x[:, :, 7] = torch.finfo(torch.float32).min
    x = x.to(dtype)
    for name in ("softmax", "log_softmax", "logsumexp", "sum", "variance"):
        function, terms = FLOATING[name]
        # On the CPU, where torch composes: one infinite element makes a whole fused result NaN.
        got, want = jitgen.jit(backend=backend)(function)(x), function(x.double().cpu()).cuda()
        overflow = want.abs() > torch.finfo(dtype).max
        want = torch.where(overflow & ~want.isnan(), want.sign() * math.inf, want)
        assert torch.equal(got.isnan()[..., :7], want.isnan()[..., :7]), name
        close(got[..., 8:], want[..., 8:], dtype, 4 * terms, length, 4 * length**0.5)
        close(got[..., 2:4], want[..., 2:4], dtype, 4 * terms, length, 6e4)
        close(got[..., 6], want[..., 6], dtype, 4 * terms, length, 3.0 * length)
        if name == "softmax":
            close(got[..., 5], want[..., 5], dtype, 4 * terms, length, 1.0)
            close(got[..., 7], want[..., 7], dtype, 4 * terms, length, 1.0)
    for name, function in EXACT.items():
        for ours, theirs in zip(results(jitgen.jit(backend=backend)(function)(x)), results(function(x)), strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_columns_of_operands_of_every_kind(backend: str, dtype: torch.dtype) -> None:
    """Beside the columns themselves: of one value for each column, of one for each element, strided, and unaligned."""
    for length, count in ((60, 264), (3000, 264), (60, 77)):
        x = torch.randn(3, length, 2 * count, device="cuda").to(dtype)
        each, along = torch.rand(count, device="cuda").to(dtype), torch.rand(length, 1, device="cuda").to(dtype)

        def weighted(x: torch.Tensor, each: torch.Tensor, along: torch.Tensor) -> Any:
            product = x * each + along
            return product.sum(1), F.softmax(product, 1), (x * along).amax(1) - each

        for view in (x[..., :count], x[..., 1 : count + 1], x[..., ::2], x.transpose(0, 2)[:count].transpose(0, 2)):
            got = jitgen.jit(backend=backend)(weighted)(view, each, along)
            want = weighted(view.double(), each.double(), along.double())
            for ours, theirs in zip(got, want, strict=True):
                close(ours, theirs, dtype, 16, length, 8.0 * length**0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.quick(where=lambda dtype: dtype in (torch.int8, torch.int64))
def test_columns_of_integers(backend: str, dtype: torch.dtype) -> None:
    for shape in ((3, 1003, 37), (1, 20_003, 64), (2, 50, 1024)):
        x = torch.randint(0, 2 if dtype == torch.bool else 100, shape, device="cuda").to(dtype)
        for function in (
            lambda x: (x.sum(1), x.any(1), x.all(1)),
            lambda x: (x.amax(1), x.max(1)[1], x[:, :7].prod(1)),
        ):
            for ours, theirs in zip(jitgen.jit(backend=backend)(function)(x), function(x), strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
def test_degenerate_columns(backend: str, shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda")
    for function in (lambda x: x.sum(1), lambda x: x.prod(1), lambda x: F.softmax(x, 1), lambda x: (x > 0).all(1)):
        assert torch.equal(jitgen.jit(backend=backend)(function)(x), function(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 64, 2048), (1, 9000, 520), (1, 40_000, 4096)])
def test_the_same_call_gives_the_same_bits(backend: str, shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda")
    for function in (lambda x: F.softmax(x, 1), lambda x: x.sum(1), lambda x: x.var(1)):
        jitted = jitgen.jit(backend=backend)(function)
        first = jitted(x)
        assert all(torch.equal(first, jitted(x)) for _ in range(5))
