"""Grouped products in Triton against float64 torch, under Triton's interpreter.

``tests/unit/test_grouped.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

import jitgen
from tests.grouped import (
    COLUMNS,
    GROUPS,
    LENGTH,
    OFFSETS,
    ROWS,
    chosen,
    failure,
    gated,
    lengths_of_groups,
    of_lengths,
    offsets,
    product,
    rows_of_groups,
)
from tests.interpreter import Check, serve

CHECKS: dict[str, Check] = {}
compiled = jitgen.jit(backend="triton")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def rows() -> Iterator[str | None]:
    run = compiled(product)
    for dtype, format in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "int4"),
        (torch.float16, "mxfp4"),
    ):
        x, dense = torch.randn(ROWS, LENGTH, dtype=dtype), torch.randn(GROUPS, COLUMNS, LENGTH, dtype=dtype)
        weight = jitgen.quantize(dense, format, group_size=32) if format else dense
        exact = weight.dequantize(torch.float64) if format else dense
        for name, ends in OFFSETS.items():
            yield failure(run(x, weight, offsets(name)), rows_of_groups(x, exact, ends), f"{dtype} {format} {name}")


@check
def epilogues() -> Iterator[str | None]:
    run = compiled(gated)
    x, weight = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    scales = torch.rand(ROWS)
    gate, up = rows_of_groups(x, weight, OFFSETS["ragged"]).chunk(2, -1)
    yield failure(run(x, weight, offsets("ragged"), scales), F.silu(gate) * up * scales.double()[:, None], "gated")


@check
def lengths() -> Iterator[str | None]:
    run = compiled(of_lengths)
    x, weight = torch.randn(20, ROWS), torch.randn(ROWS, 24)
    for name, ends in OFFSETS.items():
        wanted = lengths_of_groups(x, weight, ends)
        yield failure(run(x, weight, offsets(name, torch.int64)), wanted, name)
        yield failure(run(x.T.contiguous().T, weight.T.contiguous().T, offsets(name, torch.int64)), wanted, name)


@check
def ids() -> Iterator[str | None]:
    run = compiled(chosen)
    x, dense = torch.randn(7, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    numbers = torch.tensor([0, 4, 3, 3, -1, 2, 0])
    for weight in (dense, jitgen.quantize(dense, "int4", group_size=32)):
        exact = weight.dequantize(torch.float64) if isinstance(weight, jitgen.QTensor) else dense.double()
        wanted = 2 * torch.einsum("snk,sk->sn", exact[numbers], x.double())
        yield failure(run(x, weight, numbers), wanted, "chosen by ids")


@check
def bad_offsets() -> Iterator[str | None]:
    """What is written behind the rows, or not at all, is as it was: groups are cut to the rows."""
    run = compiled(product)
    x, weight = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    memory = torch.full((3 * ROWS, COLUMNS), 7.0)
    plan = run.bind(x, weight, offsets("ragged"))
    for ends in ((9, 3, 30, 12, 30), (-5, 3, 300, 100, 7), (500, 500, 500, 500, 500)):
        plan(x, weight, torch.tensor(ends, dtype=torch.int32), out=memory[ROWS : 2 * ROWS])
        outside = torch.cat([memory[:ROWS], memory[2 * ROWS :]])
        yield None if (outside == 7).all() else f"{ends}: written outside"


if __name__ == "__main__":
    serve(CHECKS)
