"""Batched products, compared with ``torch.bmm``. Calls cycle through copies of the operands, which exceed the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitgen
from bench.measurement import Bench, Measurement, attempted, relative_error
from bench.timing import medians
from jitgen.spec import dtype_name

SHAPES = ((64, 512, 512, 64), (32, 2048, 128, 2048), (32, 2048, 2048, 128), (256, 128, 128, 128), (64, 1, 4096, 128))
"""(batch, M, N, K) of y[b, m, n] = sum over k of x[b, m, k] * w[b, k, n]."""
ODD_SHAPES = ((48, 333, 1000, 72), (7, 1500, 600, 1111), (200, 77, 77, 64), (31, 100, 3000, 264))
"""The same, with sizes for which nothing was tuned: no powers of two, and rows that are not aligned."""
MAX_COPIES = 8
"""The most copies of the operands, since each also takes memory for a result."""


def bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight)


def run(bench: Bench) -> Iterator[Measurement]:
    dtypes = (torch.bfloat16,) if bench.device == "cuda" else (torch.bfloat16, torch.float32)
    with torch.no_grad():
        for dtype in dtypes:
            for shape in (*SHAPES, *ODD_SHAPES):
                name = name_of(*shape)
                yield from attempted(measure(shape, dtype, bench), bench, "batched", name, dtype_name(dtype), shape)


def name_of(batch: int, rows: int, columns: int, length: int) -> str:
    return f"bmm of {batch} x ({rows}, {columns}, {length})"


def measure(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bench: Bench, group: str = "batched"
) -> Iterator[Measurement]:
    """Measure one product on each backend. The error is that of the first and the last matrix."""
    batch, rows, columns, length = shape
    moved = batch * (rows * length + length * columns + rows * columns) * dtype.itemsize
    copies = max(2, min(MAX_COPIES, 16 * bench.elements // moved))
    operands = [
        (
            torch.randn(batch, rows, length, device=bench.device).to(dtype),
            torch.randn(batch, length, columns, device=bench.device).to(dtype),
            torch.full((batch, rows, columns), float("nan"), dtype=dtype, device=bench.device),
        )
        for _ in range(copies)
    ]
    x, weight, out = operands[0]
    for backend in bench.backends:
        plan = jitgen.jit(backend=backend)(bmm).bind(x, weight)
        plan(x, weight, out=out)
        ends = [0, -1]
        error = relative_error(out[ends], x[ends].double() @ weight[ends].double())
        calls = [partial(plan, x, weight, out=out) for x, weight, out in operands]
        peers = [partial(torch.bmm, x, weight, out=out) for x, weight, out in operands]
        seconds = medians({"jitgen": calls, "torch.bmm": peers}, bench.device, bench.budget)
        yield Measurement(
            group=group,
            name=name_of(*shape),
            device=bench.device,
            backend=backend,
            dtype=dtype_name(dtype),
            shape=shape,
            seconds=seconds,
            error=error,
            moved=moved,
            flops=2 * batch * rows * columns * length,
        )
