"""Batched products on a GPU against float64 on the same rounded numbers: shapes, strides, broadcasting, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.families.gemm import wgmma_tables
from jitgen.families.gemm.mainloops import WgmmaDense
from tests.rounding import of_subnormals

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20, torch.float64: 2.0**-45}
"""As in ``test_gemm.py``: of the norm of the difference, relative to the result's."""
SHAPES = [(1, 1, 1, 1), (3, 1, 70, 33), (2, 3, 100, 100), (5, 8, 256, 512), (7, 17, 300, 333), (64, 128, 128, 128)]
SHAPES += [(3, 129, 257, 640), (2, 300, 512, 64), (9, 777, 96, 1000), (40000, 3, 5, 8), (2, 512, 1000, 128)]
BACKENDS = ("cuda", "triton")


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cuda").to(dtype)


def check(function: Callable[..., Any], *arguments: torch.Tensor, backend: str, kernels: int | None = 1) -> None:
    made = jitgen.jit(backend=backend)(function)
    if kernels is not None:
        assert len(made.lower(*arguments).kernels) == kernels
    found, dtype = made(*arguments), arguments[0].dtype
    exact = function(*(argument.double() for argument in arguments))
    assert found.shape == exact.shape
    assert found.dtype == dtype
    if exact.numel():
        error, size = (found.double() - exact).norm(), exact.norm()
        assert error <= TOLERANCE[dtype] * size + of_subnormals(dtype, exact.numel()), f"{error / size:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bmm(dtype: torch.dtype, backend: str) -> None:
    for b, m, n, k in SHAPES:
        x, weight = random(b, m, k, dtype=dtype), random(b, k, n, dtype=dtype)
        check(torch.bmm, x, weight, backend=backend)
        check(lambda x, w: x @ w.mT, x, random(b, n, k, dtype=dtype), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    """Heads side by side, transposed and sliced operands, broadcast batches, rows that are not aligned."""
    dtype = torch.bfloat16
    q, k = random(2, 100, 8, 64, dtype=dtype), random(2, 77, 8, 64, dtype=dtype)
    check(lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1), q, k, backend=backend)
    check(lambda a, b: a.mT @ b, random(4, 64, 40, dtype=dtype), random(4, 64, 33, dtype=dtype), backend=backend)
    check(lambda a, b: a @ b, random(3, 1, 50, 64, dtype=dtype), random(5, 64, 70, dtype=dtype), backend=backend)
    check(lambda a, b: a @ b, random(50, 64, dtype=dtype), random(5, 64, 70, dtype=dtype), backend=backend)
    check(
        lambda a, b: a[1:, :, 1:] @ b[::2],
        random(4, 9, 65, dtype=dtype),
        random(6, 64, 70, dtype=dtype),
        backend=backend,
    )
    check(lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b), q, k, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_prologues_and_epilogues(rows: int, backend: str) -> None:
    dtype = torch.bfloat16
    x, w, v = random(6, rows, 128, dtype=dtype), random(6, 128, 96, dtype=dtype), random(6, 128, 96, dtype=dtype)
    bias, scale = random(6, 1, 96, dtype=dtype), random(rows, 1, dtype=dtype)
    check(lambda x, w, b, s: torch.relu(x @ w * s + b), x, w, bias, scale, backend=backend)
    check(lambda x, w, v: torch.sigmoid(x @ w) * (x @ v), x, w, v, backend=backend)
    check(lambda x, w: (x * 0.5) @ w, x, w, backend=backend, kernels=None)
    check(
        lambda c, x, w: torch.baddbmm(c, x, w, beta=0.5, alpha=2),
        random(6, rows, 96, dtype=dtype),
        x,
        w,
        backend=backend,
    )
    check(
        lambda x, w: (x @ w) * torch.arange(x.shape[0], device=x.device)[:, None, None],
        x,
        w,
        backend=backend,
        kernels=None,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_degenerate_sizes(backend: str) -> None:
    dtype = torch.bfloat16
    for a, b in (
        ((3, 7, 0), (3, 0, 5)),
        ((0, 7, 4), (0, 4, 5)),
        ((3, 0, 4), (3, 4, 5)),
        ((70000, 1, 8), (70000, 8, 1)),
    ):
        check(torch.bmm, random(*a, dtype=dtype), random(*b, dtype=dtype), backend=backend, kernels=None)


TILES = (*wgmma_tables.DENSE, *wgmma_tables.DENSE_OF_MANY_ROWS, *wgmma_tables.BATCHED, *wgmma_tables.ARRANGED)


@pytest.mark.parametrize("tile", [*dict.fromkeys(TILES), *wgmma_tables.FEW_ROWS], ids=str)
@pytest.mark.quick(where=lambda tile: tile in (*TILES[:2], *wgmma_tables.ARRANGED[:2], wgmma_tables.FEW_ROWS[0]))
def test_candidates(tile: WgmmaDense, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile, with weights along K and along N, for rows that fill no tile, and for fewer and more tiles than
    multiprocessors, so that clusters share K too."""
    for table in ("DENSE", "DENSE_OF_MANY_ROWS", "BATCHED", "ARRANGED", "FEW_ROWS"):
        monkeypatch.setattr(wgmma_tables, table, (tile,) if table == "DENSE" else ())
    few = tile in wgmma_tables.FEW_ROWS or tile.columns <= 32
    for b, m, n, k in ((3, 13, 200, 328), (60, 5, 264, 136)) if few else ((3, 193, 264, 1096), (40, 267, 520, 136)):
        x, w = random(b, m, k, dtype=torch.bfloat16), random(b, k, n, dtype=torch.bfloat16)
        check(torch.bmm, x, w, backend="cuda")
        check(lambda x, w: torch.relu(x @ w.mT), x[:1], w.mT.contiguous(), backend="cuda")
        assert torch.equal(jitgen.jit(torch.bmm)(x, w), jitgen.jit(torch.bmm)(x, w))
