"""Dense products whose tiles have rows of x for columns, or warpgroups several blocks of rows: the kernels a GPU
would get, run on the CPU with the instructions of ``tests/host_wgmma.cuh``. Clusters are tested on a device alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaDense
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TILES = (
    WgmmaDense(2, 1, 80, stages=4, staged=16, swapped=True),
    WgmmaDense(1, 1, 112, stages=4, staged=16, swapped=True, pingpong=True),
    WgmmaDense(1, 1, 64, stages=4, staged=32, swapped=True, blocks=2),
    WgmmaDense(1, 1, 64, stages=4, staged=32, blocks=2),
)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.quick(where=lambda tile: tile is TILES[0])
def test_against_float64(tile: WgmmaDense, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tiles, "_DENSE", (tile,))
    monkeypatch.setattr(wgmma_tiles, "_DENSE_OF_MANY_ROWS", ())
    monkeypatch.setattr(wgmma_tiles, "ARRANGED", ())
    x, weight = torch.randn(133, 264, dtype=torch.bfloat16), torch.randn(200, 264, dtype=torch.bfloat16)
    bias = torch.randn(200, dtype=torch.bfloat16)
    kernels = jitgen.jit(F.linear).lower(x, weight, bias, backend="cuda", target="sm_90a").kernels
    for words in (f"swapped = {str(tile.swapped).lower()};", f"blocks = {tile.blocks};", f"columns = {tile.columns};"):
        assert all(words in kernel.source for kernel in kernels)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    (found,) = run(F.linear, x, weight, bias, headers=wgmma_headers())
    # Half a unit in the last place of bfloat16, of numbers that are about 16.
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-8
