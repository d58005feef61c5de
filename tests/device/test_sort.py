"""Sorted rows on a GPU, in both dialects, against torch's stable sort on the CPU, to the bit.

On a GPU torch orders the two zeros of bfloat16, which are equal elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.families.rows.sort.schedule import MOST_ELEMENTS
from tests import sorts
from tests.selections import among_all
from tests.sorts import FLOATS, INTEGERS, both_ways, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ("cuda", "triton")


def failures(backend: str, x: torch.Tensor, dim: int) -> list[str]:
    got = jitgen.jit(lambda x: both_ways(x, dim), backend=backend)(x)
    return sorts.failures([tensor.cpu() for tensor in got], x.cpu(), dim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 2, 3, 31, 100, 1000, 1024, 1025, 4096, 4097, 32_000, 65_536, 200_001])
@pytest.mark.quick(where=lambda length: length in (3, 1000, 4097, 32_000))
def test_lengths(length: int, backend: str) -> None:
    """Around every change of tiles and chunks."""
    assert failures(backend, sample((7, length), torch.float32, length, "cuda"), 1) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.quick(where=lambda dtype: dtype in (torch.float64, torch.bfloat16, torch.int8, torch.int64))
def test_dtypes(dtype: torch.dtype, backend: str) -> None:
    for shape, dim in (((9, 100), 1), ((3, 9001), 1), ((700, 48), 0)):
        assert failures(backend, sample(shape, dtype, 0, "cuda"), dim) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_dimensions_and_strides(backend: str) -> None:
    x = sample((4, 3, 40, 6), torch.float32, 1, "cuda")
    for dim in range(4):
        assert failures(backend, x, dim) == []
    y = sample((120, 400), torch.float32, 2, "cuda")
    for view in (y.t(), y[:, ::2], y[::3, 1:], y.flip(1), y[:, :1].expand(120, 9), y[:1].expand(70, 400)):
        assert failures(backend, view, 1) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [50, 1500, 32_000])
def test_first_ranks_of_a_prologue(length: int, backend: str) -> None:
    x = sample((64, length), torch.bfloat16, length, "cuda")
    for k, largest in ((1, True), (50, True), (20, False), (min(length, MOST_ELEMENTS[backend] + 3), True)):
        function = jitgen.jit(lambda x, t, k=k, largest=largest: torch.topk(x / t, k, -1, largest), backend=backend)
        want = sorts.first_ranks(x / 0.5, k, 1, largest)
        assert all(sorts.same(got, expected) for got, expected in zip(function(x, 0.5), want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_pointwise_work_behind_ranks(dtype: torch.dtype, backend: str) -> None:
    """By a warp, by a block, and by what merges chunks."""
    for length, k in ((50, 7), (700, 3), (1000, 1000), (9001, 9001), (32_000, 50)):
        x, y = sample((9, length), dtype, length, "cuda"), sample((9, length), torch.bfloat16, 1, "cuda")
        got = jitgen.jit(lambda x, y, k=k: sorts.behind_ranks(x, y, k), backend=backend)(x, y)
        for mine, theirs in zip(got, sorts.behind_ranks(x.cpu(), y.cpu(), k), strict=True):
            assert sorts.same(mine.cpu(), theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_statistics(backend: str) -> None:
    x = sample((5, 3000), torch.float32, 3, "cuda")
    for function in (torch.median, torch.nanmedian, lambda x, dim: torch.kthvalue(x, 70, dim)):
        values, indices = jitgen.jit(lambda x, f=function: tuple(f(x, 1)), backend=backend)(x)
        assert torch.equal(values.nan_to_num(9e9), function(x, 1)[0].nan_to_num(9e9))
        assert torch.equal(x.gather(1, indices[:, None])[:, 0].nan_to_num(9e9), values.nan_to_num(9e9))
    y = x.nan_to_num(0.5, 1, -1)
    q = torch.tensor([0.0, 0.3, 1.0], device="cuda")
    got = jitgen.jit(lambda y, q: torch.quantile(y, q, 1), backend=backend)(y, q)
    assert torch.allclose(got, torch.quantile(y, q, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "numbers"), [("cuda", 5), ("cuda", 128), ("cuda", 300), ("cuda", 1024), ("triton", 5), ("triton", 300)]
)
def test_numbers_that_are_counted(backend: str, numbers: int) -> None:
    """The experts of tokens: their order, how many there are up to each, and where each token went."""

    def routed(x: Any) -> Any:
        ids = torch.topk(x, 4, -1)[1].reshape(-1)
        ordered, order = torch.sort(ids)
        counts = torch.histc(ordered.int(), bins=numbers, min=0, max=numbers - 1)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(order.shape[0], device=order.device)
        return ids, ordered, order, torch.cumsum(counts, 0, dtype=torch.int32), ranks

    run = jitgen.jit(backend=backend)(routed)
    for rows in (1, 7, 64, 1000, 16384):
        x = torch.randn(rows, numbers, device="cuda")
        x[: rows // 2, 3] = 9.0  # of one number there are many
        ids, ordered, order, ends, ranks = run(x)
        wanted = torch.sort(ids, stable=True)
        assert torch.equal(ordered, wanted[0])
        assert torch.equal(order, wanted[1])
        assert torch.equal(ranks, torch.argsort(wanted[1]))
        assert torch.equal(ends.long(), torch.bincount(ids, minlength=numbers).cumsum(0))
        assert "counted" in run.lower(x).explain()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_ranks_that_a_warp_selects(dtype: torch.dtype) -> None:
    for length, largest in ((12, True), (40, False), (128, True), (500, False)):
        x = sample((9, length), dtype, length, "cuda")
        run = jitgen.jit(lambda x, largest=largest: among_all(x, 12, largest), backend="cuda")
        for got, wanted in zip(run(x), sorts.first_ranks(x.cpu(), 12, 1, largest), strict=True):
            assert sorts.same(got.cpu(), wanted)
        assert "a warp selects" in run.lower(x).explain()
