"""Dense products whose activation, or both operands, lie along their rows, as in the gradient ``dy.T @ x`` of a weight:
the kernels a GPU would get, run on the CPU with the instructions of ``tests/host_wgmma.cuh``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import orders, wgmma_tables
from jitgen.families.gemm.mainloops import WgmmaDense
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TILES = (
    WgmmaDense(2, 1, 128, stages=4),
    WgmmaDense(3, 1, 64, stages=4, staged=32),
    WgmmaDense(1, 2, 128, stages=4),
    WgmmaDense(2, 1, 64, stages=4, pingpong=True),
    WgmmaDense(1, 1, 64, stages=4, staged=32, blocks=2),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "both": lambda x, w: x.mT @ w,
    "x": lambda x, w: x.mT @ w.mT,
    "computed": lambda x, w: torch.relu(x * 0.5).mT @ w,
}


@pytest.mark.parametrize("of", FUNCTIONS)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.quick(where=lambda tile, of: (tile, of) in ((TILES[0], "both"), (TILES[3], "x")))
def test_against_float64(tile: WgmmaDense, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M is no multiple of a tile, and K none of a stage."""
    monkeypatch.setattr(wgmma_tables, "DENSE", (tile,))
    monkeypatch.setattr(wgmma_tables, "DENSE_OF_MANY_ROWS", ())
    monkeypatch.setattr(wgmma_tables, "ARRANGED", ())
    monkeypatch.setattr(wgmma_tables, "NARROW", ())
    rows, columns, length = 200, 136, 131 if of != "x" else 136
    x = torch.randn(length, rows, dtype=torch.bfloat16)
    w = torch.randn((columns, length) if of == "x" else (length, columns), dtype=torch.bfloat16)
    kernels = jitgen.jit(FUNCTIONS[of]).lower(x, w, backend="cuda", target="sm_90a").kernels
    assert "static constexpr bool x_transposed = true;" in kernels[-1].source
    wanted = FUNCTIONS[of](x.double(), w.double())
    (found,) = run(FUNCTIONS[of], x, w, headers=wgmma_headers())
    # Half a unit in the last place of bfloat16.
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-8


SLICES: dict[str, Callable[..., Any]] = {
    "begins at 8 bytes": lambda x: x[:, 4:204],
    "rows at multiples of 8 bytes": lambda x: F.pad(x, (0, 4))[:, :200],
    "no multiple of 8 columns": lambda x: x[:, :197],
    "step": lambda x: x[:, :200:2],
}


@pytest.mark.parametrize("of", SLICES)
@pytest.mark.parametrize("operand", ["activation", "weight"])
@pytest.mark.quick(where=lambda of: of == "begins at 8 bytes")
def test_slices(of: str, operand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are read as they lie or copied, whichever takes less; here copies cost nothing."""
    monkeypatch.setattr(wgmma_tables, "DENSE", TILES[:1])
    monkeypatch.setattr(wgmma_tables, "DENSE_OF_MANY_ROWS", ())
    monkeypatch.setattr(wgmma_tables, "ARRANGED", ())
    monkeypatch.setattr(wgmma_tables, "NARROW", ())
    monkeypatch.setattr(orders, "SLOWER", 1e9)
    x = SLICES[of](torch.randn(136, 208, dtype=torch.bfloat16))
    w = torch.randn(136, 136, dtype=torch.bfloat16)
    x, w = (x, w) if operand == "activation" else (w, x)
    low = jitgen.jit(FUNCTIONS["both"]).lower(x, w, backend="cuda", target="sm_90a")
    assert low.lowered.schedules[-1].path == "wgmma_dense"
    wanted = x.double().mT @ w.double()
    (found,) = run(FUNCTIONS["both"], x, w, headers=wgmma_headers())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-8


def test_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tables, "BATCHED", (WgmmaDense(2, 1, 64, stages=3, resident=2),))
    x, w = torch.randn(3, 72, 136, dtype=torch.bfloat16), torch.randn(3, 72, 64, dtype=torch.bfloat16)
    (found,) = run(FUNCTIONS["both"], x, w, headers=wgmma_headers())
    wanted = x.double().mT @ w.double()
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-8
