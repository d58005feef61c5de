"""The schedules of products: a class for each mainloop, none with a field that another mainloop reads differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm.cutlass_mainloops import CutlassTile
from jitgen.families.gemm.mainloops import (
    SCHEDULES,
    CppDecoded,
    CppTiles,
    Dense,
    DenseBytes,
    MmaBytes,
    MmaCodes,
    MmaColumns,
    MmaQuantized,
    MmaRows,
    Simt,
    Stream,
    StreamOuter,
    TritonSlices,
    TritonTokens,
    TritonWeights,
    WgmmaBytes,
    WgmmaDense,
    WgmmaQuantized,
    WgmmaTilings,
    blocks,
)
from jitgen.ir.program import plain

CHOSEN: list[tuple[type, int, str, str | None, bool, str]] = [
    (CppTiles, 1, "bfloat16", None, False, "x86-64-v3"),
    (CppDecoded, 64, "bfloat16", "int4", False, "x86-64-v3"),
    (MmaQuantized, 1, "bfloat16", "int4", False, "sm_90a"),
    (MmaRows, 1, "bfloat16", None, False, "sm_90a"),
    (MmaColumns, 1, "bfloat16", None, True, "sm_90a"),
    (Dense, 64, "bfloat16", None, False, "sm_80"),
    (Stream, 1, "float32", None, False, "sm_80"),
    (StreamOuter, 1, "float32", None, True, "sm_80"),
    (Simt, 64, "float32", None, False, "sm_80"),
    (MmaBytes, 1, "int8", None, False, "sm_90a"),
    (MmaCodes, 1, "int8", "int4", False, "sm_90a"),
    (DenseBytes, 64, "int8", None, True, "sm_90a"),
    (WgmmaBytes, 24, "int8", None, False, "sm_90a"),
    (WgmmaQuantized, 24, "bfloat16", "int4", False, "sm_90a"),
    (WgmmaTilings, 1000, "bfloat16", "int4", False, "sm_90a"),
    (WgmmaDense, 40, "bfloat16", None, False, "sm_90a"),
    (TritonTokens, 512, "bfloat16", None, False, "gfx942"),
    (TritonWeights, 64, "bfloat16", "int4", False, "gfx942"),
    (TritonSlices, 1, "bfloat16", None, False, "gfx942"),
]
"""A problem for each class: rows, dtype, format, whether the weight is contiguous along N, and a target."""


def schedule_of(rows: int, dtype: str, format: str | None, transposed: bool, target: str, **options: Any) -> Any:
    activation = dtype if format and dtype == "int8" else None  # which the call quantises
    element = torch.bfloat16 if activation else getattr(torch, dtype)
    shape = (4096, 1024) if transposed else (1024, 4096)
    group = 128 if format else None
    weight = jitgen.TensorSpec(shape, element, format=format, group_size=group, activation=activation)
    function = (lambda x, w: x @ w) if transposed else (lambda x, w: F.linear(x, w))
    backend = {"x": "cpp", "s": "cuda", "g": "triton"}[target[0]]
    run, x = jitgen.jit(function, **options), jitgen.TensorSpec((rows, 4096), element)
    low = run.lower(x, weight, target=target, backend=backend)
    return low.lowered.schedules[-1 if activation else 0]  # after what quantises


@pytest.mark.parametrize(("cls", "rows", "dtype", "format", "transposed", "target"), CHOSEN, ids=lambda v: str(v))
def test_every_mainloop_is_chosen_and_described(
    cls: type, rows: int, dtype: str, format: str | None, transposed: bool, target: str
) -> None:
    one_tiling = {"batch_invariant": True} if cls is WgmmaQuantized else {}  # others have a set for a bucket of rows
    schedule = schedule_of(rows, dtype, format, transposed, target, **one_tiling)
    assert type(schedule) is cls
    text = str(schedule)
    tiling = schedule.tilings[0] if isinstance(schedule, WgmmaTilings) else schedule
    assert text.startswith(f"{schedule.path} mainloop, tiles of {tiling.block_m} x {tiling.block_n}, ")
    assert "64-bit" not in text
    wide = replace(tiling, wide=True)
    wide = WgmmaTilings((wide, wide)) if isinstance(schedule, WgmmaTilings) else wide
    assert "64-bit indices" in str(wide)
    assert plain(schedule) != plain(wide)


@pytest.mark.parametrize(("rows", "cls"), [(8, MmaColumns), (9, WgmmaDense), (16, WgmmaDense)])
def test_weights_along_n_are_copied_for_more_than_eight_rows(rows: int, cls: type) -> None:
    schedule = schedule_of(rows, "bfloat16", None, True, "sm_90a")
    assert all(type(tiling) is cls for tiling in getattr(schedule, "tilings", (schedule,)))


def test_every_class_is_covered() -> None:
    by_name = {CutlassTile}  # of a backend that is chosen by its name alone (test_cutlass.py)
    assert {cls for cls, *_ in CHOSEN} == set(SCHEDULES) - by_name


def test_a_class_is_part_of_the_key() -> None:
    numbers = (8, 1, 2, 4, 2)
    assert plain(MmaRows(*numbers)) != plain(MmaColumns(*numbers))


@pytest.mark.parametrize("shares_x", [False, True])
def test_blocks_of_a_cluster_that_shares_tiles_are_whole_clusters(shares_x: bool) -> None:
    shape = {"down": 2, "across": 1, "columns": 256, "stages": 4, "cluster_k_splits": 2}
    schedule = WgmmaDense(**shape, multicast=2, shares_x=shares_x)
    for rows, columns in ((128, 256), (129, 256), (128, 257), (1000, 1000), (1, 2600)):
        count = blocks(schedule, [(rows, columns)])
        assert count % 2 == 0
        assert count >= -(-rows // 128) * -(-columns // 256)
