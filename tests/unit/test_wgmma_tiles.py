"""The choice of tiles for the wgmma mainloops: within the headers' limits for any shape, and its model near what was
measured on shapes to which it was not fitted."""

from __future__ import annotations

import math
import statistics
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
from jitgen.families.gemm import FAMILY, wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaDense, WgmmaQuantized
from jitgen.families.gemm.schedule import bucket, fewest_rows
from jitgen.families.gemm.wgmma_fits import QUANTIZED
from jitgen.families.gemm.wgmma_model import Times, tile_rounds
from jitgen.families.gemm.wgmma_tiles import (
    MOST_SUMS,
    TALL_TOKENS,
    WGMMA_SIZES,
    candidates,
    complementary,
    cost,
)
from jitgen.families.gemm.wgmma_times import Weights, estimate
from jitgen.schedule.chips import H200
from jitgen.schedule.tuned import SCHEDULE_LIMIT


def tiles(tokens: int, warpgroups: int, blocks: int, span: int, splits: int) -> WgmmaQuantized:
    return WgmmaQuantized(tokens, warpgroups, blocks, span, stages=2, cluster_k_splits=splits)


def quantized(
    columns: tuple[int, ...], length: int, contractions: int = 1, bits: int = 4, light: bool = True
) -> Weights:
    return Weights(columns, length, contractions, H200, bits, light)


def dense(columns: tuple[int, ...], length: int, contractions: int = 1, transposed: bool = False) -> Weights:
    return Weights(columns, length, contractions, H200, transposed=transposed)


MEASURED = [
    # rows, columns, length, the fastest tiles measured on an H200 and their microseconds
    (64, 6144, 4096, tiles(64, 2, 1, 2, 2), 11.9),
    (64, 4096, 4096, tiles(64, 2, 1, 2, 3), 10.5),
    (64, 28672, 4096, tiles(64, 2, 2, 2, 1), 28.4),
    (64, 4096, 14336, tiles(64, 3, 1, 2, 5), 21.5),
    (64, 57344, 8192, tiles(64, 2, 2, 2, 1), 101.6),
    (64, 8192, 28672, tiles(64, 2, 1, 2, 2), 56.5),
    (256, 4096, 4096, tiles(128, 2, 1, 2, 2), 16.9),
    (1024, 6144, 4096, tiles(128, 3, 1, 2, 1), 70.4),
    (1024, 28672, 4096, tiles(128, 2, 2, 1, 1), 319.4),
]
"""Taken before the model was fitted, of shapes that are not among those of the fit, which are of 17 rows and more."""


@pytest.mark.parametrize(("rows", "columns", "length", "best", "measured"), MEASURED)
def test_the_model_is_near_what_was_measured(
    rows: int, columns: int, length: int, best: WgmmaQuantized, measured: float
) -> None:
    weights = quantized((columns,), length)
    assert estimate(best, rows, weights)[1] == pytest.approx(measured, rel=0.25)


def choose(fewest: int, most: int, weights: Weights) -> Any:
    return min(candidates(fewest, most, weights), key=lambda tiling: cost((tiling,), fewest, most, weights))


def _time(rows: int, weights: Weights) -> float:
    """The time of the fastest of a bucket's tilings."""
    fewest, most = fewest_rows(rows), bucket(rows)
    several = complementary(candidates(fewest, most, weights), fewest, most, weights)[:SCHEDULE_LIMIT]
    return min(estimate(tiling, rows, weights)[1] for tiling in several)


def test_tiles_of_a_bucket_are_near_those_of_its_calls() -> None:
    """A bucket has one source, so that some of its calls do not have the best tiles."""
    ratios = []
    for columns, length in ((27648, 5120), (5120, 27648), (3584, 18944), (4096, 4096)):
        weights = quantized((columns,), length)
        for rows in (9, 17, 33, 65, 100, 129, 200, 257, 400, 777, 1025, 2000, 4096):
            best = estimate(choose(rows, rows, weights), rows, weights)[1]
            ratios.append(best / _time(rows, weights))
    assert max(ratios) <= 1
    assert statistics.geometric_mean(ratios) > 0.9
    assert min(ratios) > 0.6


@given(
    rows=st.integers(1, 5000),
    columns=st.lists(st.integers(1, 60000), min_size=1, max_size=3),
    length=st.integers(1, 30000),
    contractions=st.sampled_from([1, 2]),
    bits=st.sampled_from([4, 8]),
    light=st.booleans(),
)
def test_any_shape_has_tiles_within_the_header_s_limits(
    rows: int, columns: list[int], length: int, contractions: int, bits: int, light: bool
) -> None:
    weights = quantized(tuple(columns), length, contractions, bits, light)
    tiles = choose(fewest_rows(rows), bucket(rows), weights)
    assert tiles.blocks_of_rows % contractions == 0
    assert tiles.warpgroups * tiles.blocks_of_rows * 4 <= 32
    assert tiles.tokens in WGMMA_SIZES
    assert tiles.span in (1, 2)
    assert tiles.cluster_k_splits in H200.resident_clusters
    light = light or bits == 8
    most = TALL_TOKENS[-1] if tiles.warpgroups == 3 and light else MOST_SUMS[tiles.warpgroups, tiles.resident]
    assert tiles.blocks_of_rows * tiles.tokens <= most
    assert light or tiles.warpgroups * tiles.resident <= 2
    assert estimate(tiles, rows, weights)[0] <= tiles.cluster_k_splits


def test_large_products_of_bytes_decode_a_weight_for_many_rows() -> None:
    """Tiles of 128 rows of x by 256 columns, which they had before, took 1.2 to 1.6 times as long."""
    for columns, length in ((3192, 18144), (4096, 4096), (28672, 4096), (5632, 512), (8192, 28672)):
        weights = quantized((columns,), length, bits=8, light=False)
        chosen = choose(fewest_rows(4096), bucket(4096), weights)
        assert chosen.blocks_of_rows == 1
        assert chosen.warpgroups * chosen.tokens >= 2 * 192


@given(
    rows=st.integers(1, 5000),
    columns=st.lists(st.integers(1, 60000), min_size=1, max_size=3),
    length=st.integers(1, 30000),
    contractions=st.sampled_from([1, 2]),
    transposed=st.booleans(),
)
def test_dense_tiles_are_within_the_header_s_limits(
    rows: int, columns: list[int], length: int, contractions: int, transposed: bool
) -> None:
    weights = dense(tuple(columns), length, contractions, transposed)
    tiles = choose(fewest_rows(rows), bucket(rows), weights)
    width = tiles.columns // tiles.across
    assert width in WGMMA_SIZES
    assert width * contractions <= 256
    row_shares, _ = tiles.shares[::-1] if tiles.swapped else tiles.shares
    assert not transposed or tiles.swapped or width % 64 == 0
    assert (transposed and tiles.swapped) or tiles.height % (8 * row_shares) == 0
    assert tiles.cluster_k_splits == 1 or tiles.multicast in (1, tiles.cluster_k_splits)
    splits, microseconds = estimate(tiles, rows, weights)
    assert math.isfinite(microseconds)
    alone = tiles.pingpong or tiles.multicast > tiles.cluster_k_splits
    assert tiles.multicast <= splits <= tiles.cluster_k_splits or splits == (1 if alone else tiles.multicast)


@pytest.mark.parametrize("sizes", [(300, 4608, 15384), (1000, 10504, 12544)], ids=str)
def test_partial_sums_fit_where_the_stages_of_a_tile_are(sizes: tuple[int, int, int]) -> None:
    rows, columns, length = sizes
    specs = (TensorSpec((size, length), torch.bfloat16) for size in (rows, columns))
    low = jitgen.jit(F.linear, backend="cuda").lower(*specs, target="sm_90a").lowered
    kernel, geometries, device = low.program.kernels[0], low.laid_out.geometries[0], low.route.device
    problem = FAMILY.problem(kernel, low.layouts[0], geometries, device)
    dense = [tile for tile in FAMILY.candidates(problem, device) if isinstance(tile, WgmmaDense)]
    assert len(dense) > 20
    for tile in dense:
        stages = tile.stages * (tile.block_m + tile.block_n) * 128
        assert tile.cluster_k_splits == 1 or tile.block_m * (tile.block_n + 8) * 4 <= stages, tile
        assert stages < tile.shared_bytes <= problem.target.shared_bytes


@given(items=st.integers(0, 10_000), splits=st.integers(1, 8))
def test_rounds_compute_every_tile(items: int, splits: int) -> None:
    clusters = H200.resident_clusters[splits]
    whole, rounds = tile_rounds(items, splits, clusters)
    assert whole * clusters * splits + rounds * clusters >= items
    assert rounds < splits  # else blocks that compute a tile each would take no longer


@pytest.mark.parametrize(
    ("clusters", "splits", "resident", "sharing"),
    [(15, 7, 2, 1), (18, 7, 2, 2), (18, 7, 1, 1), (66, 2, 2, 1), (67, 2, 2, 2), (200, 2, 3, 3)],
)
def test_clusters_share_multiprocessors_where_a_gpc_is_full(
    clusters: int, splits: int, resident: int, sharing: int
) -> None:
    """18 clusters of 7 blocks have 126 of the 132 multiprocessors of an H200 by their number alone."""
    times = Times(QUANTIZED, 10, lambda blocks, split: 1.0, lambda blocks: 1.0, resident, 1.0)
    assert times.sharing_of_clusters(H200, clusters, splits) == sharing


@pytest.mark.parametrize(("columns", "widths"), [(136, {80, 144}), (256, {128, 256}), (500, {256}), (600, set())])
def test_few_columns_have_tiles_as_wide_as_they_need(columns: int, widths: set[int]) -> None:
    """Of one product of more than 64 rows whose weights are contiguous along K."""
    narrow = wgmma_tiles._narrow(dense((columns,), 4096))
    assert {tile.columns for tile in narrow} == widths
    assert {tile.shares for tile in narrow} <= {(1, 1), (1, 2), (1, 4)}
    assert not wgmma_tiles._narrow(dense((columns,), 4096, transposed=True))
    chosen = choose(7698, 7698, dense((136,), 14080))
    assert chosen.columns in (144, 160)  # 192 takes 1.28 times as long


def test_many_rows_have_the_tallest_tiles() -> None:
    chosen = choose(4096, 4096, dense((8192,), 8192))
    assert (chosen.height, chosen.columns) == (128, 256)
    assert choose(64, 64, dense((4096,), 4096, transposed=True)).columns % 64 == 0
    assert isinstance(chosen, WgmmaDense)


def test_large_products_have_the_tiles_that_were_fastest() -> None:
    """128 rows of x by 256 columns, or 144 to 176 by 192: which of them depends on the last round of blocks. 128 by 128
    took 4 to 11 % longer for timed products of more than 120 GFLOP."""
    for columns, length in ((4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672)):
        chosen = choose(fewest_rows(4096), bucket(4096), quantized((columns,), length))
        assert (chosen.tokens, chosen.warpgroups, chosen.blocks_of_rows) in ((128, 2, 2), (160, 3, 1), (176, 3, 1))


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


def test_a_launch_takes_the_fastest_of_several_tilings() -> None:
    """Each number of rows launches the entry whose estimate is least, with its own grid."""
    spec = jitgen.TensorSpec
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda")
    weights = dense((3000,), 4096)
    taken = set()
    for rows in range(513, 1537, 73):
        program = function.lower(
            spec((rows, 4096), torch.bfloat16), spec((3000, 4096), torch.bfloat16), target="sm_90a"
        ).lowered
        (schedule,) = program.schedules
        estimates = [estimate(each, rows, weights)[1] for each in schedule.tilings]
        launch = program.launch(0)
        number = int(launch.entry.removeprefix("_") or 0)
        assert estimates[number] == min(estimates)
        assert launch.block[0] == 32 * schedule.tilings[number].warps
        assert launch.shared_bytes == schedule.tilings[number].shared_bytes
        tiling, maps = schedule.tilings[number], program.arguments(0).maps
        of_x, of_weights = tiling.shares
        assert [each.box for each in maps] == [
            (-(-tiling.block_m // (8 * of_x)) * 8, 64),
            (-(-tiling.block_n // (8 * of_weights)) * 8, 64),
        ]
        source, _ = program.render(0)
        assert f"{source.name}{launch.entry}(" in source.text
        assert source.text.count('extern "C"') == len(schedule.tilings)
        taken.add(launch.entry)
    assert len(taken) > 1
