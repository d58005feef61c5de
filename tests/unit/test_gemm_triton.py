"""Matrix products in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import jitgen
from jitgen.families.gemm.schedule import ROW_BUCKETS
from tests import triton_matmuls
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_matmuls") as process:
        yield process


@pytest.mark.parametrize("check", triton_matmuls.CHECKS)
@pytest.mark.quick(where=triton_matmuls.is_quick)
def test_matmuls(check: str, failures: Interpreter) -> None:
    assert failures[check] == []


def test_all_numbers_of_rows_are_at_most_eight_sources() -> None:
    function = jitgen.jit(triton_matmuls.linear, backend="triton")
    weight = jitgen.TensorSpec((4096, 4096), torch.bfloat16, format="int4", group_size=128)
    keys = set()
    for rows in (*range(1, 70, 3), 16, 32, 64, *range(100, 3000, 250), 8192):
        x = jitgen.TensorSpec((rows, 4096), torch.bfloat16)
        keys.add(function.lower(x, weight, target="sm_90a")._lowered.schedules)
    assert len(keys) <= len(ROW_BUCKETS) + 1 == 8
