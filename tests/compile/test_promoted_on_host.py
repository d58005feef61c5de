"""Products of 8-bit floats with scales of blocks, by tiles that are not chosen for so few rows: the kernels of sm_90a,
run on the CPU with the instructions of ``tests/host_wgmma.cuh``, where a wait that nobody ends is an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import wgmma_tables
from jitgen.families.gemm.mainloops import WgmmaBytes
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.compile.test_wgmma_bytes import blocks
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TILES = {
    "wide": (WgmmaBytes(2, 1, 256, stages=4),),
    "three": (WgmmaBytes(3, 1, 128, stages=5, staged=32),),
    "narrow": (WgmmaBytes(2, 1, 128, stages=6),),
    "across": (WgmmaBytes(1, 2, 256, stages=5, staged=32),),
    "in turn": (WgmmaBytes(1, 1, 128, stages=8, pingpong=True),),
}


@pytest.mark.parametrize(("rows", "columns", "length"), [(150, 256, 640), (129, 384, 128)])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.quick(where=lambda tiles, rows: tiles == "wide" and rows == 150)
def test_scales_of_blocks(tiles: str, rows: int, columns: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warpgroup of the last tile may have no rows. Wide tiles add up a slice of their columns after another."""
    monkeypatch.setattr(wgmma_tables, "PROMOTED", TILES[tiles])
    x, w = (torch.randn(size, length).to(torch.float8_e4m3fn) for size in (rows, columns))
    s, t = torch.rand(rows, length // 128) + 0.5, torch.rand(columns // 128, length // 128) + 0.5
    (found,) = run(blocks, x, w, s, t, headers=wgmma_headers())
    wide = x.double() * s.double().repeat_interleave(128, 1)
    exact = wide @ (w.double() * t.double().repeat_interleave(128, 0).repeat_interleave(128, 1)).T
    assert (found.double() - exact).norm() <= 2**-8 * exact.norm()  # results are bfloat16


def rowwise(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.silu((x.float() @ w.float().T) * s * t).to(s.dtype)


WIDTHS = {
    "wide": WgmmaBytes(2, 1, 256, stages=4),
    "two slices": WgmmaBytes(2, 1, 192, stages=4),
    "odd": WgmmaBytes(2, 1, 160, stages=5, staged=32),
    "three": WgmmaBytes(3, 1, 112, stages=5, staged=16),
    "in turn": WgmmaBytes(2, 1, 128, stages=6, pingpong=True),
}


@pytest.mark.parametrize(("rows", "columns", "length"), [(133, 321, 144), (66, 264, 272)])
@pytest.mark.parametrize("tiles", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.quick(where=lambda tiles, rows, dtype: tiles == "odd" and rows == 133 and dtype == torch.float16)
def test_results_in_pairs(
    tiles: str, rows: int, columns: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of 16 bits are computed two columns at a time, of which the last of an odd number has one."""
    monkeypatch.setattr(wgmma_tables, "PROMOTED", (WIDTHS[tiles],))
    x, w = (torch.randn(size, length).to(torch.float8_e4m3fn) for size in (rows, columns))
    s, t = (torch.rand(rows, 1) + 0.5).to(dtype), torch.rand(columns) + 0.5
    assert "in_pairs = true" in jitgen.jit(backend="cuda")(rowwise).lower(x, w, s, t, target="sm_90a").source
    (found,) = run(rowwise, x, w, s, t, headers=wgmma_headers())
    exact = F.silu((x.double() @ w.double().T) * s.double() * t.double())
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
