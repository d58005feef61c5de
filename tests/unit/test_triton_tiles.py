"""Which programs of Triton have rows for wgmma: those whose tiles are copied to shared memory asynchronously."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.attention.rule.blocks import MMA_SYNC_ROWS


def rows(function: Any, *shapes: tuple[int, ...], target: str = "sm_90a", dtype: torch.dtype = torch.bfloat16) -> int:
    specs = [TensorSpec((2, 4, *shape), dtype) for shape in shapes]
    low = jitgen.jit(function).lower(*specs, backend="triton", target=target)
    return low.lowered.schedules[0].block_m


def transposed(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k, -1) @ v


@pytest.mark.parametrize(
    ("depth", "width", "copied"), [(64, 64, True), (34, 34, True), (17, 64, False), (64, 33, False)]
)
def test_tiles_of_odd_rows_have_no_wgmma(depth: int, width: int, copied: bool) -> None:
    found = rows(F.scaled_dot_product_attention, (300, depth), (300, depth), (300, width))
    assert (found > MMA_SYNC_ROWS) == copied


def test_strided_tiles_have_none_and_other_targets_are_as_they_were() -> None:
    assert rows(transposed, (300, 64), (64, 300), (300, 64)) == MMA_SYNC_ROWS
    assert rows(transposed, (300, 64), (64, 300), (300, 64), target="sm_80") > MMA_SYNC_ROWS
    # A run of one float32 is the 4 bytes that cp.async copies.
    shapes = (300, 17), (300, 17), (300, 33)
    assert rows(F.scaled_dot_product_attention, *shapes, dtype=torch.float32) > MMA_SYNC_ROWS
