"""Activations of int8 times weights of four bits: the kernels of sm_90a, run on the CPU with the instructions of
``tests/host_wgmma.cuh``, by tiles that are not chosen for so few rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaQuantized
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


def linear(x: torch.Tensor, weight: jitgen.QTensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def swiglu(x: torch.Tensor, gate: jitgen.QTensor, up: jitgen.QTensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """The rows of ``x`` as int8 activations have them, in float64."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / step).round().double() * step


@pytest.mark.parametrize("tile", [(16, 2), (80, 2), (144, 2), (160, 2), (176, 2), (112, 3)], ids=str)
@pytest.mark.parametrize(("rows", "columns", "length"), [(150, 200, 256), (67, 131, 384)])
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("uint4", 64), ("int4", None)])
@pytest.mark.quick(where=lambda tile, rows, group: tile == (80, 2) and rows == 67 and group == 128)
def test_results_are_computed_in_registers(
    tile: tuple[int, int],
    rows: int,
    columns: int,
    length: int,
    format: str,
    group: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are staged some at a time, the last of them fewer, and rows and columns end within a tile."""
    tiles = WgmmaQuantized(tile[0], tile[1], 1, 2, stages=8)
    monkeypatch.setattr(wgmma_tiles, "candidates", lambda *_: [tiles])
    x = torch.randn(rows, length, dtype=torch.bfloat16)
    weight, bias = jitgen.quantize(torch.randn(columns, length), format, group, activation="int8"), torch.randn(columns)
    bias = bias.to(x.dtype)
    assert "in_pairs = true" in jitgen.jit(backend="cuda")(linear).lower(x, weight, bias, target="sm_90a").source
    (found,) = run(linear, x, weight, bias, headers=wgmma_headers())
    exact = quantised(x) @ weight.dequantize(torch.float64).T + bias.double()
    assert (found.double() - exact).norm() <= 2**-8 * exact.norm()  # the product is rounded to bfloat16, and the sum


@pytest.mark.slow
def test_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tiles, "candidates", lambda *_: [WgmmaQuantized(32, 2, 2, 2, 2, stages=8)])
    x = torch.randn(37, 256, dtype=torch.float16)
    weights = [jitgen.quantize(torch.randn(72, 256), "int4", 128, activation="int8") for _ in range(2)]
    (found,) = run(swiglu, x, *weights, headers=wgmma_headers())
    gate, up = (quantised(x) @ weight.dequantize(torch.float64).T for weight in weights)
    exact = F.silu(gate) * up
    assert (found.double() - exact).norm() <= 2**-9 * exact.norm()
