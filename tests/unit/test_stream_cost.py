"""Tiles of streamed products: their cost is that of all numbers of rows of their bucket, and those of a pair of rows
fit shared memory as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec, spec
from jitgen.families.gemm import FAMILY, stream_tiles
from jitgen.families.gemm.mainloops import MmaQuantized, MmaRows
from jitgen.families.gemm.stream_tiles import StreamWeights
from jitgen.schedule.chips import H200


@pytest.mark.parametrize(("rows", "fewest"), [(1, 1), (5, 2), (16, 9)])
@pytest.mark.parametrize("format", [None, "int4"])
def test_the_cost_is_the_mean_over_the_bucket(format: str | None, rows: int, fewest: int) -> None:
    quantized: Any = {"format": format, "group_size": 128} if format else {}
    w = TensorSpec((28672, 4096), torch.bfloat16, **quantized)
    low = jitgen.jit(F.linear).lower(TensorSpec((rows, 4096), torch.bfloat16), w, target="sm_90a").lowered
    device = low.route.device
    problem = FAMILY.problem(low.program.kernels[0], low.layouts[0], low.laid_out.geometries[0], device)
    assert problem.fewest_rows == fewest
    streamed = [each for each in FAMILY.candidates(problem, device) if isinstance(each, MmaQuantized | MmaRows)]
    assert len(streamed) > 5
    for each in streamed:
        cost = FAMILY.cost(problem, each, device)
        least, most = (
            FAMILY.cost(replace(problem, rows=number, fewest_rows=number), each, device)
            for number in (fewest, problem.rows)
        )
        assert least <= cost * (1 + 1e-9)
        assert cost <= most * (1 + 1e-9)
        assert fewest == problem.rows or least < cost < most


@pytest.mark.parametrize("kib", [48, 163])
def test_tiles_of_a_pair_fit_shared_memory(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of a short weight have 64 KiB."""
    monkeypatch.setattr(spec, "_SHARED_KIB", {80: kib})
    w = TensorSpec((64, 14336), torch.bfloat16, format="int4", group_size=128)
    low = jitgen.jit(F.linear, backend="cuda").lower(TensorSpec((8, 14336), torch.bfloat16), w, target="sm_80").lowered
    schedule = low.schedules[0]
    assert schedule.pair.tokens == 2
    assert max(schedule.shared_bytes, schedule.pair.shared_bytes) <= kib * 1024
    assert (schedule.pair.shared_bytes > 48 * 1024) == (kib == 163)


def test_no_pair_of_rows_has_tiles_of_its_own_where_none_fit() -> None:
    weights = StreamWeights(64, 1, 4096, bits=4.125, quantized=True, light=True, chip=H200)
    assert stream_tiles.for_a_pair(weights, True, 1024) is None
