"""Dense products whose tiles have rows of x for columns, or warpgroups several blocks of rows, and batches of them: the
kernels a GPU would get, run on the CPU with the instructions of ``tests/host_wgmma.cuh``. Clusters are tested on a
device alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

TILES = (
    WgmmaDense(2, 1, 80, stages=4, staged=16, swapped=True),
    WgmmaDense(1, 1, 112, stages=4, staged=16, swapped=True, pingpong=True),
    WgmmaDense(1, 1, 64, stages=4, staged=32, swapped=True, blocks=2),
    WgmmaDense(1, 1, 64, stages=4, staged=32, blocks=2),
)
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]
CASES: dict[str, Case] = {
    "bias": (F.linear, ((133, 264), (200, 264), (200,))),
    "weight across": (lambda x, w: x @ w, ((133, 264), (264, 200))),
    "both across": (lambda x, w: x.mT @ w, ((264, 136), (264, 200))),
    "batch": (lambda x, w: torch.relu(torch.bmm(x, w)), ((3, 70, 136), (3, 136, 200))),
    "batch, one x for several": (lambda x, w: x @ w.mT, ((2, 1, 70, 136), (2, 2, 136, 136))),
}


TIMES = [(tile, case) for tile in TILES for case in CASES if case != "both across" or tile.columns % 64 == 0]
QUICK = ((TILES[0], "bias"), (TILES[0], "batch"), (TILES[1], "weight across"))


@pytest.mark.parametrize(("tile", "case"), TIMES, ids=str)
@pytest.mark.quick(where=lambda tile, case: (tile, case) in QUICK)
def test_against_float64(tile: WgmmaDense, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("DENSE", "DENSE_OF_MANY_ROWS", "BATCHED", "ARRANGED", "NARROW"):
        monkeypatch.setattr(wgmma_tables, table, (tile,) if table == "DENSE" else ())
    function, shapes = CASES[case]
    operands = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    kernels = jitgen.jit(function).lower(*operands, backend="cuda", target="sm_90a").kernels
    said = [f"columns = {tile.columns};", *(["swapped = true;"] if tile.swapped else ["transposed"])]
    for words in (*said, *([f"blocks = {tile.blocks};"] if tile.blocks > 1 else ())):
        assert all(words in kernel.source for kernel in kernels)
    wanted = function(*(operand.double() for operand in operands))
    (found,) = run(function, *operands, headers=wgmma_headers())
    # Half a unit in the last place of bfloat16, of numbers that are about 16.
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-8
