"""The tiles of the wgmma mainloops: within the headers' limits for any shape, near the best where measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import jitgen
from jitgen import TensorSpec
from jitgen.families import registry
from jitgen.families.gemm import FAMILY
from jitgen.families.gemm.wgmma_tiles import (
    RESIDENT,
    TYPICAL_LENGTH,
    DenseTiles,
    Tiles,
    candidates,
    dense_candidates,
    dense_microseconds,
    microseconds,
)

MEASURED = [
    # rows, columns, length, the fastest tiles measured on an H200 and their microseconds
    (16, 4096, 4096, Tiles(16, 3, 1, 1, 5), 8.3),
    (64, 6144, 4096, Tiles(64, 2, 1, 2, 2), 11.9),
    (64, 4096, 4096, Tiles(64, 2, 1, 2, 3), 10.5),
    (64, 28672, 4096, Tiles(64, 2, 2, 2, 1), 28.4),
    (64, 4096, 14336, Tiles(64, 3, 1, 2, 5), 21.5),
    (64, 57344, 8192, Tiles(64, 2, 2, 2, 1), 101.6),
    (64, 8192, 28672, Tiles(64, 2, 1, 2, 2), 56.5),
    (256, 4096, 4096, Tiles(128, 2, 1, 2, 2), 16.9),
    (1024, 6144, 4096, Tiles(128, 3, 1, 2, 1), 70.4),
    (1024, 28672, 4096, Tiles(128, 2, 2, 1, 1), 319.4),
]


@pytest.mark.parametrize(("rows", "columns", "length", "best", "measured"), MEASURED)
def test_the_choice_is_near_the_best_measured(
    rows: int, columns: int, length: int, best: Tiles, measured: float
) -> None:
    found = candidates(rows, length, 1, 4, True)
    predicted = microseconds(best, rows, (columns,), length, 1)
    assert min(microseconds(tiles, rows, (columns,), length, 1) for tiles in found) <= predicted
    assert predicted == pytest.approx(measured, rel=0.25)


@given(
    rows=st.integers(1, 5000),
    length=st.integers(1, 30000),
    contractions=st.sampled_from([1, 2]),
    bits=st.sampled_from([4, 8]),
    light=st.booleans(),
)
def test_any_shape_has_tiles_within_the_header_s_limits(
    rows: int, length: int, contractions: int, bits: int, light: bool
) -> None:
    found = list(candidates(rows, length, contractions, bits, light))
    assert found
    for tiles in found:
        assert tiles.blocks % contractions == 0
        assert tiles.warpgroups * tiles.blocks * 4 <= 32
        assert tiles.span == 1 or bits == 4
        assert tiles.cluster_k_splits in RESIDENT
        assert tiles.tokens >= min(rows, 64)


@given(
    rows=st.integers(1, 5000),
    matrices=st.integers(1, 300),
    contractions=st.sampled_from([1, 2]),
    transposed=st.booleans(),
)
def test_dense_tiles_are_within_the_header_s_limits(
    rows: int, matrices: int, contractions: int, transposed: bool
) -> None:
    found = dense_candidates(rows, matrices, contractions, transposed)
    assert found
    for tiles in found:
        width = tiles.columns // tiles.across
        assert width in (16, 32, 64, 96, 128, 192, 256)
        assert width * contractions <= 256
        assert not transposed or (width % 64 == 0 and tiles.columns % (64 * tiles.multicast) == 0)
        assert tiles.columns % (8 * tiles.multicast) == 0


def test_dense_tiles_fill_the_chip() -> None:
    def choose_dense(rows: int, columns: tuple[int, ...], contractions: int, transposed: bool) -> DenseTiles:
        found = dense_candidates(rows, 1, contractions, transposed)
        return min(found, key=lambda tiles: dense_microseconds(tiles, rows, columns, TYPICAL_LENGTH, contractions))

    assert choose_dense(4096, (8192,), 1, False) == DenseTiles(2, 1, 256, 4, multicast=2)
    assert choose_dense(64, (28672,), 1, False) == DenseTiles(1, 2, 256, 5)
    assert choose_dense(64, (4096,), 1, False) == DenseTiles(1, 1, 32, 8, resident=2)
    assert choose_dense(64, (4096,), 1, True) == DenseTiles(1, 1, 64, 6, resident=2)
    assert choose_dense(1024, (5120,), 1, False) == DenseTiles(2, 1, 192, 5)


@pytest.mark.parametrize("case", ["dense", "batched", "quantised"])
def test_the_cheapest_candidate_is_taken(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the family's ``cost``. Another one takes another candidate, and its kernel is rendered as well."""

    def lowered() -> Any:
        lead = (64,) if case == "batched" else ()
        x = TensorSpec((*lead, 512, 4096), torch.bfloat16)
        if case == "batched":
            return jitgen.jit(torch.bmm).lower(x, TensorSpec((*lead, 4096, 4096), torch.bfloat16), target="sm_90a")
        format, group_size = ("int4", 128) if case == "quantised" else (None, None)
        weight = TensorSpec((4096, 4096), torch.bfloat16, format=format, group_size=group_size)
        return jitgen.jit(F.linear).lower(x, weight, target="sm_90a")

    cheapest = lowered()
    dearest = replace(FAMILY, cost=lambda *problem: -FAMILY.cost(*problem))
    monkeypatch.setattr(registry, "FAMILIES", [dearest, *registry.FAMILIES[1:]])
    assert lowered().source != cheapest.source
    assert "wgmma" in lowered().source
