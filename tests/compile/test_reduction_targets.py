"""Rendered row kernels compile for every target, without any of its devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec

TRITON_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
ROW = TensorSpec(("M", 4096), torch.bfloat16)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, F.rms_norm(total, w.shape, w, 1e-6)


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def every_kind(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each reduction of one row; of the sum and the product those that torch makes of the dtype."""
    found = (x.sum(-1), x.prod(-1), x.amax(-1), x.amin(-1), x.any(-1), x.all(-1))
    return found if x.dtype == torch.bool else (*found, x.argmax(-1), x.argmin(-1))


def column_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


Case = tuple[Callable[..., Any], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "softmax": (softmax, (ROW,)),
    "softmax_long": (softmax, (TensorSpec(("M", 32768), torch.bfloat16),)),
    "softmax_longest": (softmax, (TensorSpec(("M", 151936), torch.bfloat16),)),
    "ragged": (softmax, (TensorSpec(("M", 1001), torch.float32),)),
    "short": (softmax, (TensorSpec(("M", 5), torch.float16),)),
    "rms_norm": (rms_norm, (ROW, TensorSpec((4096,), torch.bfloat16))),
    "add_rms_norm": (add_rms_norm, (ROW, ROW, TensorSpec((4096,), torch.float32))),
    "int8_rows": (int8_rows, (ROW,)),
    "fp8_rows": (fp8_rows, (TensorSpec(("M", 40000), torch.bfloat16),)),
    "column_sum": (column_sum, (TensorSpec((2000, 4096), torch.bfloat16),)),
    **{
        f"kinds-{str(dtype)[6:]}-{length}": (every_kind, (TensorSpec((64, length), dtype),))
        for dtype in (torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool)
        for length in (100, 40000)
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.quick(
    where=lambda case, target: (
        case == "softmax"
        or (target == "sm_90" and case in ("softmax_longest", "rms_norm", "column_sum", "kinds-float32-40000"))
    )
)
def test_triton_compiles_to_one_kernel(case: str, target: str) -> None:
    function, arguments = CASES[case]
    executable = jitgen.jit(function).lower(*arguments, target=target, backend="triton").compile()
    assert len(executable.report) == 1
    assert not any(row["spill_bytes"] for row in executable.report)


def triton_sass(case: str) -> str:
    function, arguments = CASES[case]
    return jitgen.jit(function).lower(*arguments, target="sm_90", backend="triton").compile().asm["sass"]


@pytest.mark.parametrize("case", ["softmax", "softmax_long", "softmax_longest", "rms_norm", "add_rms_norm"])
@pytest.mark.quick(where=lambda case: case in ("softmax_long", "add_rms_norm"))
def test_triton_accesses_are_16_bytes_wide(case: str) -> None:
    accesses = re.findall(r"\b(?:LDG|STG)\.\S+", triton_sass(case))
    assert accesses
    assert all("128" in access for access in accesses)


@pytest.mark.parametrize(("length", "width"), [(104, ".128"), (100, ".64"), (102, ""), (101, ".U16")])
def test_triton_accesses_are_as_wide_as_rows_are_aligned(length: int, width: str) -> None:
    rows = TensorSpec((100_000, length), torch.bfloat16)
    low = jitgen.jit(lambda x: x.sum(-1)).lower(rows, target="sm_90", backend="triton")
    assert set(re.findall(r"\bLDG\.E(\.128|\.64|\.U16|)\b", low.compile().asm["sass"])) == {width}


def test_triton_reads_neighbouring_columns_together() -> None:
    loads = re.findall(r"\bLDG(?:STS)?\.\S+", triton_sass("column_sum"))
    assert loads
    assert all("128" in load for load in loads)


@pytest.mark.parametrize("case", ["softmax", "softmax_long", "rms_norm", "add_rms_norm", "int8_rows"])
@pytest.mark.quick(where=lambda case: case in ("softmax_long", "add_rms_norm"))
def test_triton_keeps_a_resident_row_in_registers(case: str) -> None:
    sass = triton_sass(case)
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    assert len(re.findall(r"\bLDG\b", sass)) <= 12


def test_triton_wide_rows_use_64_bit_indices() -> None:
    spec = TensorSpec((2**17, 2**15), torch.float16)
    lowered = jitgen.jit(softmax).lower(spec, target="sm_90", backend="triton")
    assert "tl.program_id(0).to(tl.int64)" in lowered.source
    assert lowered.compile().report[0]["elements"] == 2**32
