"""The schedules of row kernels: a class for each form of execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.rows.reduction.forms import (
    SCHEDULES,
    ColumnBlocks,
    HostRows,
    LoopedRows,
    PersistentRows,
    ResidentRows,
    TritonRows,
)
from jitgen.ir.program import plain


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def softmax_of_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 0)


CHOSEN: list[tuple[type, Any, tuple[int, int], torch.dtype, str, str]] = [
    (HostRows, softmax, (64, 4096), torch.bfloat16, "cpp", "x86-64-v3"),
    (TritonRows, softmax, (64, 4096), torch.bfloat16, "triton", "gfx942"),
    (TritonRows, softmax_of_columns, (4096, 64), torch.bfloat16, "triton", "sm_80"),
    (LoopedRows, lambda x: x.sum(-1), (64, 4096), torch.bfloat16, "cuda", "sm_80"),
    (ResidentRows, softmax, (64, 4096), torch.bfloat16, "cuda", "sm_80"),
    (ResidentRows, softmax, (64, 151936), torch.bfloat16, "cuda", "sm_90a"),
    (PersistentRows, layer_norm, (64, 151936), torch.float32, "cuda", "sm_90a"),
    (ColumnBlocks, softmax_of_columns, (4096, 64), torch.bfloat16, "cuda", "sm_90a"),
]
"""A problem for each class."""


@pytest.mark.parametrize(("cls", "function", "shape", "dtype", "backend", "target"), CHOSEN)
def test_every_form_is_chosen_and_described(
    cls: type, function: Any, shape: tuple[int, int], dtype: torch.dtype, backend: str, target: str
) -> None:
    vectors = [jitgen.TensorSpec(shape[1:], dtype)] * (2 if function is layer_norm else 0)
    low = jitgen.jit(function).lower(jitgen.TensorSpec(shape, dtype), *vectors, target=target, backend=backend)
    schedule = low.lowered.schedules[0]
    assert type(schedule) is cls
    words = str(schedule)
    assert ("persistent clusters" in words) == (cls is PersistentRows)
    assert ("in registers" in words) == getattr(schedule, "resident", False)
    if not isinstance(schedule, HostRows):
        assert "64-bit indices" in str(replace(schedule, wide=True))
        assert plain(schedule) != plain(replace(schedule, wide=True))
        assert words in " ".join(low.explain().split())


def test_every_class_is_covered() -> None:
    assert {cls for cls, *_ in CHOSEN} == set(SCHEDULES)
