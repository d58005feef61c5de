"""Sort kernels compile for every target, without any of its devices, and CUDA's run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host, nvrtc
from tests import sorts
from tests.cuda_on_host import run
from tests.sorts import both_ways, sample

Case = tuple[Callable[..., Any], tuple[Any, ...], int]


def of_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return both_ways(x, -1)


def first_ranks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(x / 0.7, 50)
    return values.float() * 0.7, indices


CASES: dict[str, Case] = {
    "rows": (of_rows, (TensorSpec((64, 100), torch.float32),), 2),
    "chunks": (first_ranks, (TensorSpec(("M", 32_000), torch.bfloat16),), 2),
    "long rows": (of_rows, (TensorSpec((4, 65_536), torch.float64),), 4),
    "noise": (lambda x: torch.topk(x + torch.rand_like(x), 5).values, (TensorSpec((64, 500), torch.float32),), 1),
}


def compiled(case: str, backend: str, target: str) -> Any:
    function, arguments, count = CASES[case]
    executable = jitgen.jit(function).lower(*arguments, target=target, backend=backend).compile()
    assert len(executable.report) == count
    return executable


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.quick(where=lambda target: target == "sm_90a")
def test_cuda(case: str, target: str) -> None:
    assert not any(row["spill_bytes"] for row in compiled(case, "cuda", target).report)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_triton(case: str, target: str) -> None:
    compiled(case, "triton", target)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "most"),
    [
        ((5, 7), 1, torch.float32, 4096),
        ((40, 3), 0, torch.int8, 4096),
        ((3, 50), 1, torch.bfloat16, 16),
        pytest.param((2, 3, 33), 1, torch.float64, 4096, marks=pytest.mark.slow),
        pytest.param((70, 3), 0, torch.float64, 16, marks=pytest.mark.slow),
    ],
)
def test_cuda_on_the_cpu(shape: tuple[int, ...], dim: int, dtype: torch.dtype, most: int) -> None:
    x = sample(shape, dtype)
    with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", cuda=most):
        assert sorts.failures(run(lambda x: both_ways(x, dim), x), x, dim) == []


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize(("most", "k", "count"), [(4096, 7, 1), (4096, 50, 1), (16, 50, 3)])
def test_pointwise_work_behind_ranks_on_the_cpu(most: int, k: int, count: int) -> None:
    """A warp selects few ranks, a block sorts a row, and chunks of one are merged; then elements of another row are
    gathered by a kernel of their own."""
    x, y = sample((3, 50), torch.bfloat16), sample((3, 50), torch.float64, 1)
    function = partial(sorts.behind_ranks, k=k)
    with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", cuda=most):
        assert len(jitgen.jit(function).lower(x, y, backend="cuda", target="sm_90a").kernels) == count
        assert all(map(sorts.same, run(function, x, y), function(x, y)))


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_first_ranks_of_chunks_on_the_cpu() -> None:
    x = sample((4, 200), torch.float32)
    with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", cuda=16):
        for k, largest in ((5, True), (30, False)):
            got = run(lambda x, k=k, largest=largest: torch.topk(x, k, 1, largest), x)
            assert all(map(sorts.same, got, sorts.first_ranks(x, k, 1, largest)))
