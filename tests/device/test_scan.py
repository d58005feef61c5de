"""Scans on a GPU, in both dialects, against float64 torch on the same (rounded) data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.families.rows.scan.chunks import CHUNKS, LEAST_CHUNK, LEAST_COLUMN_CHUNK
from tests import scans
from tests.scans import FLOATS, INTEGERS, every_kind, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ("cuda", "triton")
LENGTHS = (1, 2, 3, 7, 8, 16, 17, 31, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 2048, 2049, 4097, 8192, 20001)
"""Around every change of threads, tiles and loops."""


def functions(backend: str, dim: int) -> Callable[..., Any]:
    return jitgen.jit(backend=backend)(lambda x: every_kind(x, dim))


def failures(backend: str, x: torch.Tensor, dim: int) -> list[str]:
    return scans.failures(functions(backend, dim)(x), x, dim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.quick(
    where=lambda length, dtype: length in (1, 17, 129, 1025, 4097) and (dtype == torch.float32) == (length != 129)
)
def test_lengths(length: int, dtype: torch.dtype, backend: str) -> None:
    assert failures(backend, sample((67, length), dtype, length, "cuda"), 1) == []
    assert failures(backend, sample((length, 70), dtype, length, "cuda"), 0) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.quick(where=lambda dtype: dtype in (torch.float16, torch.float64, torch.int8, torch.int64))
def test_dtypes(dtype: torch.dtype, backend: str) -> None:
    for shape, dim in (((9, 100), 1), ((5, 3001), 1), ((700, 48), 0), ((300, 3), 0)):
        assert failures(backend, sample(shape, dtype, 0, "cuda"), dim) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_dimensions(backend: str) -> None:
    for shape in ((2, 3, 4, 5), (3, 1, 40, 6), (5,), (4, 129, 33)):
        x = sample(shape, torch.float32, 1, "cuda")
        for dim in range(len(shape)):
            assert failures(backend, x, dim) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    x = sample((120, 400), torch.float32, 2, "cuda")
    views = (x.t(), x[:, ::2], x[::3, 1:], x.flip(1), x[:, :1].expand(120, 9), x[:1].expand(70, 400), x[1:, 3:])
    for view in (*views, x.view(6, 20, 400).permute(2, 0, 1), x.view(6, 20, 400)[:, ::2]):
        for dim in range(view.dim()):
            assert failures(backend, view, dim) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [2, 33, 1025, 5000, 2**17 + 5])
@pytest.mark.quick(where=lambda length: length in (33, 2**17 + 5))
def test_special_values(length: int, backend: str) -> None:
    x = scans.special_rows(length).cuda()
    assert scans.same_special(functions(backend, 1)(x), x, 1) == []
    assert scans.same_special(functions(backend, 0)(x.t().contiguous()), x.t(), 0) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_chunks(dtype: torch.dtype, backend: str) -> None:
    """Few long rows of each kind of cutting, with chunks that are not full, and the same bits every time."""
    for rows, chunks in CHUNKS:
        length = chunks * LEAST_CHUNK + 37
        x = sample((rows, length), dtype, rows, "cuda")
        function = jitgen.jit(backend=backend)(lambda x: (x.cumsum(1), *x.cummax(1)))
        assert len(function.lower(x).kernels) == 2
        got = function(x)
        exact = x.double() if dtype.is_floating_point else x
        spread = (
            scans.roundings(length) * scans.unit(dtype) * exact.abs().cumsum(1) if exact is not x else x[:1, :1] * 0
        )
        assert scans.wrong("cumsum", got[0], exact.cumsum(1), got[0].dtype, spread) is None
        assert all(map(torch.equal, got[1:], x.cummax(1)))
        assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(got, function(x), strict=True))
        columns = sample((chunks * LEAST_COLUMN_CHUNK + 5, 24), dtype, rows, "cuda")
        assert failures(backend, columns, 0) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_million_elements(backend: str) -> None:
    x = torch.full((1, 10_000_000), 0.1, device="cuda")
    exact = x.double().cumsum(1)
    got = jitgen.jit(backend=backend)(lambda x: x.cumsum(1))(x)
    assert ((got.double() - exact).abs() / exact).max() < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_and_after(backend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        index = torch.arange(x.shape[-1], device=x.device)
        ends = x.flip(1).cumsum(1).flip(1)
        return torch.cumsum(x * y, -1) * scale + x, ends + y[:, :1], torch.cumsum(x + index, -1) / (1 + index) + y[0]

    for shape in ((50, 33), (20, 3000), (8192, 512)):
        for turned in (False, True):
            x, y = (sample(shape, torch.float32, seed, "cuda") for seed in (1, 2))
            if turned:
                x, y = x.t().contiguous().t(), y.t().contiguous().t()
            got = jitgen.jit(backend=backend)(function)(x, y, 2.0)
            for mine, theirs in zip(got, function(x.double(), y.double(), 2.0), strict=True):
                assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", scans.SLICES)
def test_slices(function: Callable[..., Any], backend: str) -> None:
    for shape in ((50, 33), (20, 3000), (3, 300_000), (8192, 512), (8, 4), (70, 4096)):
        for turned in (False, True):
            x, y = (sample(shape, torch.float32, seed, "cuda") for seed in (1, 2))
            if turned:
                x, y = x.t().contiguous().t(), y.t().contiguous().t()
            scale = torch.tensor(2.5, device="cuda")
            got = jitgen.jit(backend=backend)(function)(x, y, scale)
            assert scans.wrong_slices(got, function, x, y, scale) == [], shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_and_into_memory_of_the_callers(backend: str) -> None:
    for shape in ((100, 300), (3, 300_000), (5000, 40)):
        for dim in (0, 1):
            x = sample(shape, torch.float32, 3, "cuda")
            own = x.clone()
            jitgen.jit(backend=backend)(lambda x, dim=dim: x.cumsum_(dim))(own)
            function = jitgen.jit(backend=backend)(lambda x, dim=dim: x.cumsum(dim))
            assert torch.equal(own, function(x))
            room = torch.full((shape[0] + 2, 2 * shape[1] + 4), 7.0, device="cuda")
            target = room[1:-1, 1 : 1 + 2 * shape[1] : 2]
            function.bind(x)(x, out=target)
            assert torch.equal(target, own)
            target.fill_(7.0)
            assert (room == 7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB")
    x = torch.ones(2**16, 2**15 + 16, dtype=torch.int8, device="cuda")
    got = jitgen.jit(backend=backend)(lambda x: x.cumsum(1, dtype=torch.int8))(x)
    want = torch.arange(1, x.shape[1] + 1, device="cuda").to(torch.int8)
    assert torch.equal(got[0], want)
    assert torch.equal(got[-1], want)
