"""Attention kernels compile for every target, without any of its devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from tests.attention import formula


def attend(q: Any, k: Any, v: Any) -> Any:
    return formula(["scale", "distance"], ["causal"])(q, k, v)


@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "gfx942"])
@pytest.mark.quick(where=lambda target, depth: (target, depth) == ("sm_90a", 128))
def test_triton_compiles_without_spills(target: str, depth: int) -> None:
    spec = TensorSpec((2, 8, 1000, depth), torch.bfloat16)
    report = jitgen.jit(attend).lower(spec, spec, spec, backend="triton", target=target).compile().report
    assert not any(each["spill_bytes"] for each in report)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v2"])
@pytest.mark.quick(where=lambda target, rows: (target, rows) == ("x86-64-v4", 100))
def test_cpp_compiles_for_every_level(target: str, rows: int) -> None:
    spec, keys = TensorSpec((2, 8, rows, 64), torch.bfloat16), TensorSpec((2, 8, 1000, 64), torch.bfloat16)
    jitgen.jit(attend).lower(spec, keys, keys, backend="cpp", target=target).compile()


def test_the_cuda_dialect_says_that_it_has_no_kernel() -> None:
    spec = TensorSpec((2, 8, 1000, 64), torch.bfloat16)
    low = jitgen.jit(attend).lower(spec, spec, spec, backend="cuda", target="sm_90a")
    assert "the cuda dialect has no attention kernel; backend='triton' has one" in low.explain()
    assert len(low.kernels) == 3
