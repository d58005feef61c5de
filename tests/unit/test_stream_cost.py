"""The cost of streamed products is that of all numbers of rows of their bucket, as is the cost of wgmma's tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.gemm import FAMILY
from jitgen.families.gemm.mainloops import MmaQuantized, MmaRows


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
