"""The kernel of an attention stores what a backward reads of its rows, be its result read through views or not."""

from __future__ import annotations

import math

import pytest
import torch

import jitgen
from tests.projected_attention import LIMITS, arguments, error, projected


@pytest.mark.parametrize(("batch", "heads", "shared", "rows"), [(1, 4, 2, 37), (2, 3, 1, 16)])
def test_gradients(batch: int, heads: int, shared: int, rows: int) -> None:
    assert error("cpp", arguments(batch, heads, shared, rows, 16, torch.float32)) <= LIMITS[torch.float32]


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "x86-64-v3")])
@pytest.mark.parametrize("shared", [1, 4])
def test_no_scores_in_memory(backend: str, target: str, shared: int) -> None:
    given = arguments(1, 4, shared, 512, 128, torch.bfloat16)
    lowered = jitgen.jit(projected).lower(*given, backend=backend, target=target)._lowered
    elements = [math.prod(memory.view.sizes) for memory in lowered.memories]
    assert max(elements) < 4 * 512 * 512
    assert [kernel.family for kernel in lowered.program.kernels].count("reduction") == 0
