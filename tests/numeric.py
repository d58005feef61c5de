"""Sample values, references and tolerances that several tests compare kernels by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

OPERATIONS = 16
"""Roundings a row may add up to: half of them in the longest chains (GELU), and half for the functions themselves."""


def sample(dtype: torch.dtype, seed: int, count: int = 200) -> torch.Tensor:
    """Special values (NaN, infinities, zeros, subnormals, extremes) and random ones of several magnitudes, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        special = torch.tensor([limits.min, limits.max, 0, 1, limits.min + 1, 2, 3], dtype=dtype)
        small = torch.randint(max(limits.min, -9), 10, (count // 2,), generator=generator).to(dtype)
        low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
        large = torch.randint(low, high, (count - count // 2 - len(special),), generator=generator).to(dtype)
        values = torch.cat([special, small, large])
    else:
        limits = torch.finfo(dtype)
        special = torch.tensor(
            [
                *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0),
                *(limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal * limits.eps),
            ],
            dtype=dtype,
        )
        unit = torch.rand(count // 2, generator=generator) * 2 - 1
        wide = torch.randn(count - count // 2 - len(special), generator=generator) * 8
        values = torch.cat([special, unit.to(dtype), wide.to(dtype)])
    return values[torch.randperm(len(values), generator=generator)]


def widened(value: Any) -> Any:
    """``value`` as float64 where it is a floating tensor (inside containers too), else as it is."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(widened, value))
    return value


def reference(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` in eager torch on float64 copies of its floating arguments."""
    return function(*map(widened, arguments))


def mismatch(
    got: torch.Tensor, want: torch.Tensor, eager: torch.Tensor | None = None, magnitude: Any = 0.0
) -> str | None:
    """How ``got`` differs from the exact ``want`` by more than its dtype explains; None where it does not.

    Args:
        want: computed in float64 (in the same dtype, for integers and bool).
        eager: eager torch's result in float32 or better; an element may equal it instead, where an intermediate
            value overflows what the kernel computes in.
        magnitude: of what is added and subtracted on the way; a result can be wrong by some roundings of that.
    """
    if not got.is_floating_point():
        wrong = got.double() != want.to(got.dtype).double()
    else:
        wrong = ~_close(got, want, magnitude)
        if eager is not None:
            wrong &= ~_close(got, eager, magnitude)
    if not wrong.any():
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {where}: {got[where]!r} for {want[where].item()!r}"


def _close(got: torch.Tensor, want: torch.Tensor, magnitude: Any) -> torch.Tensor:
    compute = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    storage = torch.finfo(got.dtype)
    stored = want.to(got.dtype).double()
    got, want = got.double(), want.double()
    spread = OPERATIONS * compute.eps * (want.abs() + magnitude) + OPERATIONS * compute.smallest_normal * compute.eps
    if storage.eps > compute.eps:
        spread = spread + storage.eps / 2 * (1 + storage.eps) * want.abs() + storage.smallest_normal * storage.eps / 2
    same = (got == stored) | (got.isnan() & stored.isnan())
    # Where the largest finite number is within the spread, so is infinity.
    edge = stored.isinf() | got.isinf()
    near = torch.where(edge, (got == stored) | ((want.abs() + spread >= storage.max) & (got * want > 0)), False)
    return same | near | ((got - want).abs() <= spread)


def failures(names: Sequence[str], results: Sequence[str | None]) -> str:
    return "\n".join(f"{name}: {result}" for name, result in zip(names, results, strict=True) if result)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, terms: float, length: int, size: float) -> None:
    """Within the storage format's half unit, and ``terms`` roundings of float32 (growing with the row's logarithm)."""
    assert got.shape == want.shape
    half = torch.finfo(dtype).eps / 2 if dtype != torch.float64 else 0.0
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bound = (half + terms * unit * (4 + math.log2(length))) * (want.abs() + size) + 1e-40
    error = (got.double() - want).abs()
    fine = (error <= bound) | (got.double() == want) | (got.isnan() & want.isnan())
    assert fine.all(), f"{int((~fine).sum())} differ, the worst by {error[~fine].max().item()}"


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
