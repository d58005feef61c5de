"""How many tiles groups of rows are expected to take, beside divisions that are drawn."""

from __future__ import annotations

import pytest
import torch

from jitgen.families.gemm.groups import Groups


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
