"""Matrix products for tests: operands, exact results, and what rounding may do to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

ROWS = (0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 257)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GROUPS = (32, 64, 128, None)
FORMATS = ("int4", "uint4", "int8")
VARIED_FORMATS = (
    *("int4.float16", "uint4.floatzeros", "uint3.float16.floatzeros", "uint8.float16.floatzeros", "int4.e8m0"),
    "uint4.float32.floatzeros",
    *("fp8_e4m3.rows128", "fp8_e4m3.tensor", "int8.tensor", "nf4.bfloat16", "int6.e4m3"),
)
"""Formats with qualifiers: each kind of scales, zero-points and shared scales with some row."""

ROUNDINGS = 32
"""Of the accumulator, in units of the sum of absolute products. Errors of a long sum are of either sign, so that their
number hardly counts; a short one has no more of them than this."""

Epilogue = Callable[..., torch.Tensor]


def operands(
    rows: int, columns: int, length: int, dtype: torch.dtype, format: str | None = None, group: int | None = None
) -> tuple[torch.Tensor, Any]:
    """A random activation (rows, length) and weight (columns, length), dense where ``format`` is None."""
    x = torch.randn(rows, length).to(dtype)
    w = torch.randn(columns, length, dtype=torch.float64) / max(length, 1) ** 0.5
    # Rows of different magnitudes, so that a scale of another row or group shows.
    w = (w * torch.logspace(-1, 1, columns, dtype=torch.float64)[:, None]).to(dtype)
    return x, w if format is None else jitgen.quantize(w, format, group)


def dequantized(weight: Any) -> torch.Tensor:
    """The weight in float64, exactly."""
    return weight.dequantize(torch.float64) if isinstance(weight, jitgen.QTensor) else weight.double()


def product(x: torch.Tensor, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x @ weight.T exactly, and how far an accumulator may be from it."""
    wide, exact = x.double(), dequantized(weight)
    unit = 2.0 ** (-53 if x.dtype == torch.float64 else -24)
    return F.linear(wide, exact), ROUNDINGS * unit * F.linear(wide.abs(), exact.abs())


def bounds(
    epilogue: Epilogue, products: Sequence[tuple[torch.Tensor, torch.Tensor]], extras: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The epilogue of exact accumulators, and how far that of rounded ones may be from it."""
    wide = [extra.double() for extra in extras]
    exact = epilogue(*(value for value, _ in products), *wide)
    spread = torch.zeros_like(exact)
    for signs in itertools.product((-1, 1), repeat=len(products)):
        moved = [value + sign * error for sign, (value, error) in zip(signs, products, strict=True)]
        spread = torch.maximum(spread, (epilogue(*moved, *wide) - exact).abs())
    return exact, 1.5 * spread


def assert_near(found: torch.Tensor, exact: torch.Tensor, spread: torch.Tensor, operations: int = 0) -> None:
    """``found`` is ``exact`` but for ``spread``, ``operations`` roundings of float32 and the rounding to its dtype."""
    assert found.shape == exact.shape
    limits = torch.finfo(found.dtype)
    unit = 2.0 ** (-53 if found.dtype == torch.float64 else -24)
    allowed = spread + exact.abs() * (limits.eps * 0.51 + operations * unit) + limits.smallest_normal * limits.eps
    excess = (found.double() - exact).abs() - allowed
    wrong = ~(excess <= 0)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements are off, first at {wrong.nonzero()[0].tolist()}: "
        f"{found[wrong][:3].tolist()} for {exact[wrong][:3].tolist()}, allowed {allowed[wrong][:3].tolist()}"
    )


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output in which an element that is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def run(function: Any, arguments: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``function`` of ``arguments``, written into a poisoned output."""
    out = poisoned(*shape, dtype=dtype)
    function.bind(*arguments)(*arguments, out=out)
    return out
