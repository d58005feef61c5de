"""Sorted rows in Triton against torch's stable sort, under Triton's interpreter on CPU tensors.

``tests/unit/test_sort_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

import jitgen
from tests import sorts
from tests.interpreter import Check, serve
from tests.sorts import FLOATS, INTEGERS, both_ways, sample

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def of_both_ways(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return jitgen.jit(lambda x: both_ways(x, dim), backend="triton")(x)


@check
def lengths() -> Iterator[str | None]:
    for shape, dim in (((3, 1), 1), ((2, 2), 1), ((37, 5), 1), ((2, 100), 1), ((40, 3), 0), ((600,), 0)):
        x = sample(shape, torch.float32, sum(shape))
        yield from sorts.failures(of_both_ways(x, dim), x, dim)


@check
def dtypes() -> Iterator[str | None]:
    for dtype in (*FLOATS, *INTEGERS):
        x = sample((5, 23), dtype)
        yield from sorts.failures(of_both_ways(x, 1), x, 1)


@check
def dimensions_and_strides() -> Iterator[str | None]:
    x = sample((2, 3, 4, 5), torch.float32)
    for dim in range(4):
        yield from sorts.failures(of_both_ways(x, dim), x, dim)
    x = sample((12, 20), torch.float32)
    for view in (x.t(), x[1:, ::2], x.flip(1), x[:, :1].expand(12, 9), x[:1].expand(7, 20)):
        yield from sorts.failures(of_both_ways(view, 1), view, 1)


@check
def chunks() -> Iterator[str | None]:
    with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", triton=16):
        for shape, dim, dtype in (((3, 50), 1, torch.float32), ((70, 2), 0, torch.int16), ((2, 33), 1, torch.float16)):
            x = sample(shape, dtype)
            yield from sorts.failures(of_both_ways(x, dim), x, dim)


@check
def first_ranks_of_a_prologue() -> Iterator[str | None]:
    x = sample((4, 90), torch.float32)
    for most in (16, 1024):
        with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", triton=most):
            for k, largest in ((1, True), (5, False), (40, True)):
                function = jitgen.jit(
                    lambda x, t, k=k, largest=largest: torch.topk(x / t, k, -1, largest), backend="triton"
                )
                low = function.lower(x, 0.5)
                yield None if len(low.kernels) == (2 if most == 16 else 1) else f"{len(low.kernels)} kernels"
                for got, want in zip(function(x, 0.5), sorts.first_ranks(x / 0.5, k, 1, largest), strict=True):
                    yield None if sorts.same(got, want) else f"{k} ranks, largest {largest}, at most {most}"


@check
def pointwise_work_behind_ranks() -> Iterator[str | None]:
    x, y = sample((3, 50), torch.float32), sample((3, 50), torch.int16, 1)
    for most, k, count in ((1024, 50, 1), (1024, 7, 1), (16, 50, 3), (16, 7, 3)):
        with patch.dict("jitgen.families.rows.sort.schedule.MOST_ELEMENTS", triton=most):
            function = jitgen.jit(lambda x, y, k=k: sorts.behind_ranks(x, y, k), backend="triton")
            found = len(function.lower(x, y).kernels)
            yield None if found == count else f"{found} kernels"
            for number, pair in enumerate(zip(function(x, y), sorts.behind_ranks(x, y, k), strict=True)):
                yield None if sorts.same(*pair) else f"result {number} of {k} ranks, at most {most}"


@check
def numbers_that_are_counted() -> Iterator[str | None]:
    """Of one number there are many; a piece of columns begins within those that are counted at once."""

    def routed(x: Any) -> Any:
        ids = torch.topk(x, 2, -1)[1].reshape(-1)
        ordered, order = torch.sort(ids)
        counts = torch.histc(ordered.float(), bins=x.shape[1], min=0, max=x.shape[1] - 1)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(order.shape[0])
        return ordered, order, torch.cumsum(counts, 0, dtype=torch.int32), ranks

    run, schedules = jitgen.jit(routed, backend="triton"), "jitgen.families.rows.sort.schedule."
    for rows, numbers in ((1, 7), (11, 40), (45, 7)):
        x = torch.randn(rows, numbers)
        x[rows // 2 :, 2] = 5.0
        ids = torch.topk(x, 2, -1)[1].reshape(-1)
        order = torch.sort(ids, stable=True)[1]
        ends = torch.bincount(ids, minlength=numbers).cumsum(0).int()
        wanted = (ids[order], order, ends, torch.argsort(order))
        with patch(schedules + "TRITON_COUNTED", 64), patch(schedules + "TRITON_COMPARED", 1024):
            found, kernels = run(x), len(run.lower(x).kernels)
        for name, got, want in zip(("values", "order", "ends", "ranks"), found, wanted, strict=True):
            yield None if torch.equal(got, want) else f"{name} of {rows} rows, {numbers} numbers"
        yield None if kernels == 2 else f"{kernels} kernels"


@check
def random_numbers_are_those_of_cpp() -> Iterator[str | None]:
    """Both take seeds from torch's CPU generator."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.rand_like(x.t()), torch.nn.functional.dropout(x, 0.4)

    x = torch.randn(5, 37)
    found = []
    for backend in ("cpp", "triton"):
        torch.manual_seed(11)
        found.append(jitgen.jit(function, backend=backend)(x))
    for number, (left, right) in enumerate(zip(*found, strict=True)):
        yield None if torch.equal(left, right) else f"result {number} differs"


if __name__ == "__main__":
    serve(CHECKS)
