"""Scan kernels compile for every target, without any of its devices, and CUDA's run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host, nvrtc
from jitgen.families.rows.scan.chunks import CHUNKS, LEAST_CHUNK, chunks_of
from tests import scans
from tests.cuda_on_host import run
from tests.scans import every_kind, sample

Case = tuple[Callable[..., Any], tuple[Any, ...], int]


def fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * y, -1) * 2 + x


def of_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return every_kind(x, -1)


def of_columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return every_kind(x, 0)


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


CASES: dict[str, Case] = {
    "fused": (fused, 2 * (TensorSpec(("M", 4096), torch.bfloat16),), 1),
    "short": (sums, (TensorSpec((100_000, 7), torch.float16),), 1),
    "ragged": (sums, (TensorSpec((1000, 1025), torch.float32),), 1),
    "wide": (sums, (TensorSpec((2**17, 2**15), torch.float16),), 1),
    "chunks": (of_rows, (TensorSpec((2, 2**20), torch.float32),), 2),
    "chunks of columns": (of_columns, (TensorSpec((2**16, 24), torch.float32),), 2),
    "rows-float32": (of_rows, (TensorSpec((64, 1000), torch.float32),), 1),
    "rows-float64": (of_rows, (TensorSpec((64, 4000), torch.float64),), 1),
    "rows-bool": (of_rows, (TensorSpec((64, 1000), torch.bool),), 1),
    "rows-int8": (of_rows, (TensorSpec((64, 4000), torch.int8),), 1),
    "columns-bfloat16": (of_columns, (TensorSpec((1000, 4096), torch.bfloat16),), 1),
    "columns-int64": (of_columns, (TensorSpec((1000, 4096), torch.int64),), 1),
}


def compiled(case: str, backend: str, target: str) -> Any:
    function, arguments, count = CASES[case]
    executable = jitgen.jit(function).lower(*arguments, target=target, backend=backend).compile()
    assert len(executable.report) == count
    return executable


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.quick(where=lambda case, target: target == "sm_90a" and case.partition("-")[2] == "")
def test_cuda(case: str, target: str) -> None:
    report = compiled(case, "cuda", target).report
    assert not any(row["spill_bytes"] for row in report)


@pytest.mark.parametrize(
    "case",
    [c if c == "fused" else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_triton(case: str, target: str) -> None:
    compiled(case, "triton", target)


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_accesses_are_16_bytes_wide() -> None:
    sass = compiled("fused", "cuda", "sm_90a").asm["sass"]
    accesses = re.findall(r"\b(?:LDG|STG)\.\S+", sass)
    assert accesses
    assert all("128" in access for access in accesses)


def test_chunks_are_few_kinds() -> None:
    """Of any number of rows and any length there are as many programs as rows of the table, and one more."""
    found = {chunks_of(rows, length, False) for rows in range(1, 200) for length in (10, 10**5, 10**6, 10**8)}
    assert found == {1, *(chunks for _, chunks in CHUNKS)}
    assert chunks_of(1, LEAST_CHUNK - 1, False) == 1


# ------------------------------------------------------------------------------------------------ CUDA on the CPU

ON_HOST = [
    ((5, 7), 1, torch.float32, {}),
    ((2, 1025), 1, torch.bfloat16, {}),
    ((260, 40), 0, torch.float32, {"CHUNKS": ((16, 4),), "LEAST_COLUMN_CHUNK": 8}),
]
SLOW_ON_HOST = [
    ((300, 33), 0, torch.float32, {}),
    ((3, 500), 1, torch.float32, {"CHUNKS": ((16, 4),), "LEAST_CHUNK": 16}),
    ((3, 5000), 1, torch.float64, {}),
    ((3, 2500), 1, torch.int8, {}),
    ((70, 6), 0, torch.int64, {}),
    ((3, 20, 10), 1, torch.float16, {}),
    ((1, 6000), 1, torch.float32, {"CHUNKS": ((2, 64),), "LEAST_CHUNK": 16}),
    ((3000, 2), 0, torch.bfloat16, {"CHUNKS": ((2, 64),), "LEAST_COLUMN_CHUNK": 8}),
]


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "chunks"), [*ON_HOST, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW_ON_HOST)]
)
def test_cuda_on_the_cpu(shape: tuple[int, ...], dim: int, dtype: torch.dtype, chunks: dict[str, Any]) -> None:
    with patch.multiple("jitgen.families.rows.scan.chunks", **({"CHUNKS": CHUNKS} | chunks)):
        x = sample(shape, dtype)
        assert scans.failures(run(lambda x: every_kind(x, dim), x), x, dim) == []


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_special_values_on_the_cpu() -> None:
    x = scans.special_rows(1100)
    assert scans.same_special(run(lambda x: every_kind(x, 1), x), x, 1) == []


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_before_and_after_on_the_cpu() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(x.shape[-1])
        return torch.cumsum(x * y, -1) * 2 + x, torch.cumsum(x + index, -1) / (1 + index) + y[:, :1]

    for views in ((lambda t: t.t().contiguous().t()), (lambda t: t.flip(1)[:, ::2])):
        x, y = views(sample((37, 90), torch.float32, 1)), views(sample((37, 90), torch.float32, 2))
        for got, want in zip(run(function, x, y), function(x.double(), y.double()), strict=True):
            assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-3)
