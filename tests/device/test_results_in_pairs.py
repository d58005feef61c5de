"""Epilogues of the wgmma mainloops on a device, against float64: results of 16 bits that are computed as their sums lie
in registers, and matrices that are read, of which the copying warp brings a tile's share to the cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.runtime import cuda
from jitgen.spec import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = [(133, 321, 136), (70, 3000, 1024), (1000, 2056, 256)]
"""(M, N, K): an odd N, blocks that may share K, and several tiles of a block."""


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b)) * s


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("format", [None, "int4", "int8", "fp8_e4m3", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_pairs(sizes: tuple[int, int, int], format: str | None, dtype: torch.dtype) -> None:
    if cuda.target_of(0) != Target("cuda", "sm_90a"):
        pytest.skip("wgmma is sm_90a's alone")
    rows, columns, length = sizes
    x, dense = (torch.randn(size, length, device="cuda").to(dtype) for size in (rows, columns))
    b, s = torch.randn(columns, device="cuda").to(dtype), (torch.rand(rows, 1, device="cuda") + 0.5).to(dtype)
    w = jitgen.quantize(dense / length**0.5, format, 32) if format else dense / length**0.5
    wide = w.dequantize(dtype).double() if format else w.double()  # a weight is rounded once to the dtype of x
    function = jitgen.jit(backend="cuda")(biased)
    found = function(x, w, b, s)
    exact = F.gelu(x.double() @ wide.T + b.double()) * s.double()
    assert "in_pairs = true" in function.source(x, w, b, s)
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("masked", [False, True])
def test_matrices_are_read(sizes: tuple[int, int, int], format: str | None, masked: bool) -> None:
    """A residual, of which the columns that the last tile of a row lacks are not there, and a mask of a byte each."""
    if cuda.target_of(0) != Target("cuda", "sm_90a"):
        pytest.skip("wgmma is sm_90a's alone")
    rows, columns, length = sizes
    x, dense, r = (
        torch.randn(*size, device="cuda").bfloat16() for size in ((rows, length), (columns, length), (rows, columns))
    )
    mask = torch.rand(rows, columns, device="cuda") < 0.5
    w = jitgen.quantize(dense / length**0.5, format, 32) if format else dense / length**0.5
    wide = w.dequantize(torch.bfloat16).double() if format else w.double()

    def added(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        total = F.linear(x, w) + r
        return torch.where(mask, total, 0.0) if masked else total

    function = jitgen.jit(backend="cuda")(added)
    found = function(x, w, r, mask)
    exact = x.double() @ wide.T + r.double()
    exact = torch.where(mask, exact, 0.0) if masked else exact
    assert "reads_matrices = true" in function.source(x, w, r, mask)
    assert (found.double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()
