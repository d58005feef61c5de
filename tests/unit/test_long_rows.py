"""Rows too few to keep a GPU busy, or too long for a CPU's caches, are reduced in chunks: which, in how many kernels,
and what lies in memory between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.rows.reduction.row_chunks import (
    CHUNKED_COLUMN,
    CHUNKED_COLUMNS,
    CHUNKED_ROW,
    CHUNKED_ROWS,
    CHUNKS,
    COLUMN_CHUNKS,
    CPU_CHUNKED_ROW,
    SINGLE_BLOCK_ROW,
    SINGLE_BLOCK_ROWS,
)
from tests.numeric import close, results


def lowered(function: Callable[..., Any], shape: tuple[int, ...], backend: str = "cuda", target: str = "sm_90a") -> Any:
    return jitgen.jit(function).lower(TensorSpec(shape, torch.bfloat16), target=target, backend=backend)._lowered


def temporaries(low: Any) -> list[tuple[int, ...]]:
    first = len(low.program.inputs)
    return [memory.view.sizes for memory in low.memories[first : first + len(low.program.temporaries)]]


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


@pytest.mark.parametrize(
    ("function", "backend", "most"),
    [
        (total, "cuda", CHUNKED_ROWS),
        (softmax, "cuda", 0),
        (total, "triton", SINGLE_BLOCK_ROWS),
        (softmax, "triton", SINGLE_BLOCK_ROWS),
    ],
)
def test_few_long_rows(function: Callable[..., Any], backend: str, most: int) -> None:
    """Where blocks can share a row, elements that are needed again are left to them up to ``CHUNKED_ROW``."""

    def chunks(rows: int, length: int) -> list[tuple[int, ...]]:
        return temporaries(lowered(function, (rows, length), backend))

    assert (CHUNKED_ROWS, CHUNKS) in chunks(CHUNKED_ROWS, CHUNKED_ROW)
    assert chunks(CHUNKED_ROWS + 1, CHUNKED_ROW) == []
    assert chunks(most + 1, CHUNKED_ROW - 1) == []
    assert chunks(2, SINGLE_BLOCK_ROW - 1) == []
    if most:
        assert (most, CHUNKS) in chunks(most, SINGLE_BLOCK_ROW)


@pytest.mark.parametrize("length", [SINGLE_BLOCK_ROW + 1, 40001, 151936, CHUNKED_ROW + 1])
def test_chunks_are_aligned_and_the_last_is_shorter(length: int) -> None:
    rest = lowered(total, (3, length))
    (rows, count), last = temporaries(rest)
    assert (rows, last) == (3, (3, 1))
    assert len(rest.program.kernels) == 3
    each, shorter = (geometry.length for (geometry,) in rest.laid_out.geometries[:2])
    assert (each % 8, count * each + shorter) == (0, length)
    assert shorter < each
    assert count <= CHUNKS


@pytest.mark.parametrize(
    ("function", "coarse"),
    [
        (lambda x: x.logsumexp(-1), [True] * 2),
        (lambda x: x.float().logsumexp(-1), [False] * 2),
        (lambda x: (x.logsumexp(-1), x.float().exp().sum(-1)), [False] * 2),
    ],
)
def test_temporaries_are_as_exact_as_what_becomes_of_them(function: Callable[..., Any], coarse: list[bool]) -> None:
    low = lowered(function, (2, CHUNKED_ROW))
    assert [body.coarse for kernel in low.program.kernels for body in kernel.bodies] == coarse


def test_what_rows_have_is_computed_once_for_each() -> None:
    """Softmax of chunks: the kernel that writes it reads a maximum and a quotient, and takes one exponential."""
    low = lowered(softmax, (2, CHUNKED_ROW))
    (last,) = low.program.kernels[-1].bodies
    assert [i.op for i in last.instructions if i.op in ("exp", "reciprocal", "where", "maximum")] == ["exp"]
    assert {buffer.dtype for buffer in low.program.temporaries} == {"float32"}


@pytest.mark.parametrize(
    ("backend", "target", "blocks"), [("cuda", "sm_90a", 8), ("cuda", "sm_80", 1), ("triton", "sm_90a", 1)]
)
def test_long_columns(backend: str, target: str, blocks: int) -> None:
    """Rows that a cluster of blocks can share are reduced in chunks only from a greater length on."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)

    some = CHUNKED_COLUMNS - 8
    long = CHUNKED_COLUMN * blocks
    assert temporaries(lowered(total, (long, some), backend, target)) == [(COLUMN_CHUNKS, some)]
    assert temporaries(lowered(total, (long, CHUNKED_COLUMNS), backend, target)) == []
    assert temporaries(lowered(total, (long - 1, some), backend, target)) == []


def test_columns_that_are_needed_again_are_reduced_in_chunks_only_where_they_are_few() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, 0)

    assert temporaries(lowered(softmax, (8 * CHUNKED_COLUMN, 4096))) == []
    assert len(temporaries(lowered(softmax, (8 * CHUNKED_COLUMN, 500)))) >= 2
    assert len(temporaries(lowered(softmax, (8 * CHUNKED_COLUMN, 4096), "triton"))) >= 2


@pytest.mark.parametrize("shape", [(2**20,), (1, 2**20), (2**20, 64)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(0), x.amax(0)),
        lambda x: x.argmin(0),
        lambda x: x.max(0),
        lambda x: x.var(0),
        lambda x: torch.std(x, 0, correction=0),
        lambda x: x.logsumexp(0),
    ],
)
def test_chunks_are_read_once(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    low = lowered(lambda x: function(x[0] if len(x) == 1 else x), shape)
    assert len(low.program.kernels) == 2
    assert sum(operand.buffer == 0 for k in low.program.kernels for b in k.bodies for operand in b.operands) == 1


@pytest.mark.parametrize("shape", [(2**20, 64), (64, 2**20)])
def test_what_is_reduced_in_chunks_is_computed_again_not_stored(shape: tuple[int, int]) -> None:
    """Exponentials of a softmax, whose maximum is known by then."""
    low = lowered(lambda x: F.softmax(x, 0 if shape[0] > shape[1] else 1), shape)
    sizes = temporaries(low)
    assert len(sizes) == 4
    assert all(torch.Size(size).numel() <= 64 * CHUNKS for size in sizes)
    assert len(low.program.kernels) <= 4


@pytest.mark.parametrize(
    "function",
    [total, softmax, lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.max(-1), lambda x: x.sum(0)],
)
@pytest.mark.parametrize("shape", [(8 * CHUNKED_COLUMN, 500), (1, 4 * CPU_CHUNKED_ROW)])
def test_a_cpu_shares_its_rows_itself(function: Callable[..., Any], shape: tuple[int, int]) -> None:
    assert temporaries(lowered(function, shape, "cpp", "x86-64-v3")) == []


def test_columns_on_a_cpu_stay_whole() -> None:
    assert temporaries(lowered(lambda x: x.var(0), (CPU_CHUNKED_ROW, 16), "cpp", "x86-64-v3")) == []


@pytest.mark.parametrize("function", [lambda x: x.var(-1), lambda x: x.logsumexp(-1)])
def test_a_cpu_takes_long_rows_in_chunks_where_one_reduction_waits_for_another(function: Callable[..., Any]) -> None:
    """Each part is then read from memory once, and from the cache the second time."""

    def chunks(rows: int, length: int) -> list[tuple[int, ...]]:
        return temporaries(lowered(function, (rows, length), "cpp", "x86-64-v3"))

    assert set(chunks(1, CPU_CHUNKED_ROW)) == {(1, CHUNKS)}
    assert (CHUNKED_ROWS, CHUNKS) in chunks(CHUNKED_ROWS, CPU_CHUNKED_ROW)
    assert chunks(CHUNKED_ROWS + 1, CPU_CHUNKED_ROW) == []
    assert chunks(1, CPU_CHUNKED_ROW - 1) == []


LONG: dict[str, Callable[..., Any]] = {
    "variance": lambda x: x.var(-1),
    "moments": lambda x: (x.std(-1, correction=0), x.mean(-1), x.amax(-1)),
    "of everything": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) * 1000, reduction="none"),
}


@pytest.mark.parametrize("shape", [(1, CPU_CHUNKED_ROW), (3, CPU_CHUNKED_ROW + 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.quick(where=lambda name, shape, dtype: shape[0] > 1 and dtype == torch.float32 and name == "variance")
def test_long_rows_on_a_cpu(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 5).to(dtype)
    wanted = results(LONG[name](x.double()))
    for got, want in zip(results(jitgen.jit(LONG[name])(x)), wanted, strict=True):
        assert got.dtype == dtype
        close(got, want, dtype, 16, x.numel(), 8.0)


def test_special_long_rows_on_a_cpu() -> None:
    x = torch.randn(5, CPU_CHUNKED_ROW + 5)
    x[0] = -torch.inf
    x[1, 12345], x[2, -1], x[3, -3] = torch.nan, torch.inf, -torch.inf
    x[4] = 1e4 + x[4]
    for function in (lambda x: x.logsumexp(-1), lambda x: x.var(-1)):
        got, want = jitgen.jit(function)(x), function(x.double())
        close(got, want, torch.float32, 16, x.shape[1], 1.0)


def test_what_rows_have_may_be_long_in_the_making() -> None:
    """Each step reads the one before twice: looked at path by path it would never end."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((0, 2), keepdim=True)
        for _ in range(60):
            mean = mean * mean + mean * 0.5
        return x * mean

    x = torch.randn(4, 5, 6) * 0.1
    torch.testing.assert_close(jitgen.jit(scaled)(x).double(), scaled(x.double()), rtol=1e-4, atol=1e-9)
