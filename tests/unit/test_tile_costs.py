"""The models of Triton's tiles and of the ``simt`` mainloop's: what they choose, and how well they know its time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm import simt_tiles, tile_times, triton_tiles
from jitgen.families.gemm.mainloops import Simt, TritonMainloop
from jitgen.families.gemm.schedule import MOST_ROWS, ROW_BUCKETS
from jitgen.schedule import chips
from jitgen.spec import Target

MEASURED = (
    ("triton dense", 1, 144, 128, 1.34),
    ("triton dense", 1, 512, 128, 1.376),
    ("triton dense", 3, 1280, 128, 1.588),
    ("triton dense", 3, 36048, 128, 4.446),
    ("triton dense", 10, 256, 2432, 3.872),
    ("triton dense", 15, 6144, 256, 3.078),
    ("triton dense", 29, 16016, 15232, 130.728),
    ("triton dense", 59, 256, 384, 2.418),
    ("triton dense", 72, 2512, 256, 3.486),
    ("triton dense", 101, 4112, 2944, 13.197),
    ("triton dense", 331, 256, 1152, 4.39),
    ("triton dense", 342, 80, 1664, 4.496),
    ("triton dense", 1169, 27184, 384, 80.214),
    ("triton dense", 1261, 112, 256, 2.826),
    ("triton dense", 3910, 512, 31104, 172.373),
    ("triton dense", 4714, 43264, 2176, 1573.72),
    ("triton int4", 1, 11264, 1152, 6.414),
    ("triton int4", 1, 19984, 896, 6.528),
    ("triton int4", 3, 5776, 256, 3.9),
    ("triton int4", 4, 432, 128, 1.652),
    ("triton int4", 10, 880, 52608, 18.953),
    ("triton int4", 16, 1968, 2688, 5.984),
    ("triton int4", 26, 1360, 384, 3.288),
    ("triton int4", 35, 656, 768, 4.288),
    ("triton int4", 104, 256, 256, 2.468),
    ("triton int4", 152, 592, 512, 3.778),
    ("triton int4", 219, 4112, 3200, 23.798),
    ("triton int4", 335, 1424, 1024, 8.94),
    ("triton int4", 617, 1536, 14080, 96.888),
    ("triton int4", 1159, 1712, 128, 5.63),
    ("triton int4", 2028, 9984, 512, 48.918),
    ("triton int4", 2747, 256, 256, 4.074),
    ("simt", 17, 256, 1536, 11.298),
    ("simt", 31, 1536, 384, 8.056),
    ("simt", 190, 2544, 13952, 416.752),
    ("simt", 190, 5888, 256, 28.588),
    ("simt", 265, 256, 1280, 18.716),
    ("simt", 324, 368, 256, 9.64),
    ("simt", 1243, 20224, 128, 186.746),
    ("simt", 1374, 112, 55424, 780.992),
    ("simt", 2076, 4816, 384, 228.514),
    ("simt", 2584, 3840, 2944, 1659.59),
)
"""(kind, M, N, K, microseconds of the fastest schedule that was timed), on an H200: some of the timings that the models
were fitted to (``bench/schedule_timings.py``)."""
BUCKETS = (*ROW_BUCKETS, MOST_ROWS)


def estimate(kind: str, rows: int, columns: int, length: int) -> float:
    """The least estimate of all candidates, in microseconds."""
    bucket = next(end for end in (*BUCKETS, 8192) if rows <= end)
    sizes = ((columns,), length)
    if kind == "simt":
        found = simt_tiles.candidates(bucket, length, True)
        return min(simt_tiles.microseconds(tiles, rows, *sizes, chips.H200) for tiles in found)
    quantized = kind == "triton int4"
    return min(
        triton_tiles.microseconds(tiles, rows, *sizes, splits, 4.125 if quantized else 16, chips.H200)
        for tiles in triton_tiles.candidates(bucket, quantized)
        for splits in triton_tiles.splits(tiles, bucket, length)
    )


@pytest.mark.parametrize("kind", ["triton dense", "triton int4", "simt"])
def test_the_estimates_are_near_what_was_measured(kind: str) -> None:
    ratios = [estimate(*case[:4]) / case[4] for case in MEASURED if case[0] == kind]
    assert len(ratios) > 8
    assert 0.85 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.15
    assert min(ratios) > 0.55
    assert max(ratios) < 1.8


def lowered(rows: int, columns: int, length: int, format: str | None, backend: str, target: str = "sm_90a") -> Any:
    dtype = torch.float32 if backend == "cuda" else torch.bfloat16
    x = jitgen.TensorSpec((rows, length), dtype)
    w = jitgen.TensorSpec((columns, length), dtype, format=format, group_size=128 if format else None)
    return jitgen.jit(F.linear, backend=backend).lower(x, w, target=target).lowered


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 100, 300, 777, 5000])
def test_a_product_whose_k_is_split_has_the_tiles_of_that_number_of_ranges(rows: int, format: str | None) -> None:
    for columns, length in ((256, 8192), (8192, 1024)):
        low = lowered(rows, columns, length, format, "triton")
        (contraction,) = low.program.kernels[0].bodies[0].contractions
        schedule = low.schedules[0]
        assert isinstance(schedule, TritonMainloop)
        assert schedule.k_splits == contraction.k_splits
        assert len(low.program.kernels) == 1 + (schedule.k_splits > 1)
        assert rows <= triton_tiles.SPLIT_ROWS or schedule.k_splits == 1


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_few_columns_of_a_long_k_occupy_the_device(backend: str) -> None:
    """100 rows of 64 columns were one tile or two, which walked all of K alone."""
    for rows in (33, 100, 777):
        low = lowered(rows, 64, 16384, None, backend)
        schedule = low.schedules[0]
        launch = low.launch(0)
        assert math.prod(launch.grid) >= 8, schedule


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100a", "gfx942"])
@pytest.mark.parametrize("quantized", [False, True])
def test_every_bucket_has_candidates_that_fit_the_target(target: str, quantized: bool) -> None:
    for rows in BUCKETS:
        low = lowered(rows, 4096, 4096, "int4" if quantized else None, "triton", target)
        schedule = low.schedules[0]
        stage = schedule.block_k * (schedule.block_m * 2 + schedule.block_n * (0.5 if quantized else 2))
        assert schedule.stages <= max(2, Target.parse(target).shared_bytes // stage)


def test_the_cost_is_that_of_all_rows_of_a_bucket() -> None:
    assert tile_times.sampled_rows(1, 1) == [1]
    assert tile_times.sampled_rows(17, 64) == [17, 24, 33, 46, 64]


@pytest.mark.parametrize("tiles", simt_tiles.TILES, ids=repr)
def test_simt_threads_have_whole_tiles(tiles: Simt) -> None:
    assert tiles.block_m * tiles.block_n % (32 * tiles.warps * 8) == 0
