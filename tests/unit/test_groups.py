"""How many tiles groups of rows are expected to take, beside divisions that are drawn."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen.families.gemm import wgmma, wgmma_tiles
from jitgen.families.gemm.groups import Groups
from jitgen.schedule.chips import H200
from tests.grouped import product


@pytest.mark.parametrize("count", [1, 8, 128])
@pytest.mark.parametrize("rows", [1, 5, 40, 3000])
def test_tiles_lie_between_the_bounds(rows: int, count: int) -> None:
    """As many tiles as rows alone would take at least, and a tile that is not full for each group besides at most."""
    groups = Groups(rows, count)
    assert groups.tiles(1) == pytest.approx(rows)
    for height in (2, 8, 64):
        assert max(1, rows / height) - 1e-9 <= groups.tiles(height) <= min(rows, rows / height + count) + 1e-9
    assert 1 <= groups.used <= min(rows, count)
    assert Groups(rows * count, count, even=True).tiles(64) == pytest.approx(count * max(1, rows / 64 + 0.5))


def test_tiles_are_those_of_uneven_choices() -> None:
    """Divisions of a Zipf law of exponent 0.8 take the estimated number of tiles within an eighth."""
    generator = torch.Generator().manual_seed(5)
    for count, rows in ((8, 128), (32, 64), (128, 128), (128, 2400)):
        law = torch.arange(1, count + 1).double() ** -0.8
        drawn = torch.multinomial(law.expand(200, -1), rows, replacement=True, generator=generator)
        sizes = torch.nn.functional.one_hot(drawn, count).sum(1)
        for height in (8, 16, 64):
            tiles = (-(-sizes // height)).sum(1).double().mean().item()
            assert Groups(rows, count).tiles(height) == pytest.approx(tiles, rel=0.125), (count, rows, height)


def test_tiles_are_those_of_rows_that_choose_any_group() -> None:
    """Within a twelfth of 200 divisions: a number of rows is taken to be normal, and is binomial."""
    generator = torch.Generator().manual_seed(6)
    for count, rows in ((8, 128), (32, 1000), (32, 4096), (128, 2400), (4, 9000)):
        drawn = torch.randint(0, count, (200, rows), generator=generator)
        sizes = torch.nn.functional.one_hot(drawn, count).sum(1)
        for height in (16, 64, 96, 160):
            tiles = (-(-sizes // height)).sum(1).double().mean().item()
            assert Groups(rows, count, random=True).tiles(height) == pytest.approx(tiles, rel=1 / 12), (count, rows)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_a_launch_takes_tiles_by_its_rows(format: str) -> None:
    """Of one kernel: average groups of 70 and of 190 rows have other tiles, which one launch does not."""
    weight = jitgen.TensorSpec((32, 2048, 4096), torch.bfloat16, format=format, group_size=None)
    run, heights, kernels = jitgen.jit(backend="cuda")(product), set(), set()
    for average in (70, 100, 130, 160, 190):
        x, ends = jitgen.TensorSpec((32 * average, 4096), torch.bfloat16), jitgen.TensorSpec((32,), torch.int32)
        low = run.lower(x, weight, ends, target="sm_90a")
        assert "a launch takes the tiles that are estimated to be the fastest for its rows" in low.explain()
        kernels.add(low.kernels[0].source)
        (launch,) = low._lowered.settled
        heights.add(launch.tiling.tokens)
        weights = wgmma.weights_of(low._lowered.program.kernels[0].bodies[0].contractions, (2048,), 4096, H200)
        times = [
            wgmma_tiles.of_groups(tiling, Groups(32 * average, 32), weights)
            for tiling in low._lowered.schedules[0].tilings
        ]
        assert times[launch.entry] == min(times)
    assert len(kernels) == 1
    assert len(heights) > 1
