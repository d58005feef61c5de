"""Ranges of integers hold every value that an operation has for operands within their ranges."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitgen.ir import intervals
from jitgen.ir.intervals import Range
from jitgen.ir.ops import OPS

INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "neg": operator.neg,
    "abs": torch.abs,
    "floor_divide": torch.floor_divide,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "bitwise_not": torch.bitwise_not,
}
COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
RANGES = st.tuples(st.integers(-40, 40), st.integers(0, 20)).map(lambda ends: (ends[0], ends[0] + ends[1]))
TRUTHS = st.sampled_from([(0, 0), (0, 1), (1, 1)])
COARSE = ("remainder", "bitwise_and", "bitwise_or", "bitwise_xor")
"""Whose ranges may have more than one value for operands that have one."""


def values(ranges: tuple[Range, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Every combination of values within ``ranges``."""
    columns = [torch.arange(low, high + 1) for low, high in ranges]
    grids = torch.meshgrid(*columns, indexing="ij")
    return tuple(grid.flatten().to(dtype) for grid in grids)


def check(op: str, function: Callable[..., Any], ranges: tuple[Range, ...], dtype: torch.dtype) -> None:
    result = "bool" if op in COMPARISONS or dtype == torch.bool else "int64"
    ends = intervals.of_result(op, result, ranges)
    if ends is None:
        assert op not in ("add", "sub", "mul", "minimum", "maximum", "neg", "abs", "where", *COMPARISONS)
        return
    if ends[1] > torch.iinfo(torch.int64).max or ends[0] < torch.iinfo(torch.int64).min:
        return  # some values of torch's are others by 2^64
    computed = function(*values(ranges, dtype)).long()
    assert ends[0] <= computed.min() <= computed.max() <= ends[1], (op, ranges, ends)
    if (op not in COARSE or dtype == torch.bool) and all(low == high for low, high in ranges):
        assert ends == (computed.min(), computed.max()), (op, ranges, ends)


@pytest.mark.parametrize("op", [*INTEGERS, *COMPARISONS])
@settings(deadline=None, max_examples=60)
@given(RANGES, RANGES)
def test_integers(op: str, left: Range, right: Range) -> None:
    check(op, (INTEGERS | COMPARISONS)[op], (left, right)[: OPS[op].arity], torch.int64)


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"])
@given(TRUTHS, TRUTHS)
def test_conditions(op: str, left: Range, right: Range) -> None:
    check(op, INTEGERS[op], (left, right)[: OPS[op].arity], torch.bool)


@settings(deadline=None)
@given(TRUTHS, RANGES, RANGES)
def test_selections(condition: Range, left: Range, right: Range) -> None:
    check("where", lambda c, a, b: torch.where(c.bool(), a, b), (condition, left, right), torch.int64)
    assert intervals.of_result("where", "int64", (None, left, right)) == intervals.hull([left, right])


def test_what_is_not_known() -> None:
    assert intervals.of_result("add", "int64", ((0, 1), None)) is None
    assert intervals.of_result("exp", "float32", ((0, 1),)) is None
    assert intervals.of_result("floor_divide", "int64", ((1, 9), (-1, 3))) is None
    assert intervals.of_result("left_shift", "int64", ((1, 9), (0, 64))) is None
