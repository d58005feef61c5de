"""Results of 16 bits that are computed as their sums lie in registers: kernels of sm_90a with dense weights, run on the
CPU with the instructions of ``tests/host_wgmma.cuh``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import wgmma_tables
from jitgen.families.gemm.mainloops import WgmmaDense
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TILES = {
    "wide": WgmmaDense(2, 1, 256, stages=4),
    "across": WgmmaDense(1, 2, 192, stages=6, staged=32),
    "in turn": WgmmaDense(1, 1, 192, stages=5, pingpong=True),
    "swapped": WgmmaDense(2, 1, 160, stages=5, staged=32, swapped=True),
    "swapped quarters": WgmmaDense(1, 1, 112, stages=5, staged=16, swapped=True),
    "swapped, two blocks": WgmmaDense(2, 1, 128, stages=3, staged=64, blocks=2, swapped=True),
    "swapped, in turn": WgmmaDense(2, 1, 128, stages=4, staged=64, swapped=True, pingpong=True),
}


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b)) * s


@pytest.mark.parametrize(("rows", "columns", "length"), [(133, 321, 136), (290, 264, 72)])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.quick(where=lambda tiles, rows, dtype: tiles == "swapped" and rows == 133 and dtype == torch.float16)
def test_results_in_pairs(
    tiles: str, rows: int, columns: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of two neighbouring columns of a row, or of two rows of a column where x and the weights are swapped."""
    monkeypatch.setattr(wgmma_tables, "DENSE", (TILES[tiles],))
    for others in ("DENSE_OF_MANY_ROWS", "ARRANGED", "NARROW"):
        monkeypatch.setattr(wgmma_tables, others, ())
    x, w = (torch.randn(size, length).to(dtype) for size in (rows, columns))
    b, s = torch.randn(columns).to(dtype), (torch.rand(rows, 1) + 0.5).to(dtype)
    assert "in_pairs = true" in jitgen.jit(backend="cuda")(biased).lower(x, w, b, s, target="sm_90a").source
    (found,) = run(biased, x, w, b, s, headers=wgmma_headers())
    exact = F.gelu(x.double() @ w.double().T + b.double()) * s.double()
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
