"""Samples and judgement for sorted rows: what every dialect's tests share. torch's stable sort is the reference, and
results are the same bits."""

from __future__ import annotations

import math
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Elements of which many are equal, with NaN of both signs, infinities and both zeros among floats, the extremes
    among ints."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul(8).round().div(4)
    if dtype == torch.bool:
        return (x > 0).to(device)
    if dtype.is_floating_point:
        nan, inf = math.nan, math.inf
        special = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0], dtype=torch.float64)
    else:
        x = x.abs() if dtype == torch.uint8 else x
        limits = torch.iinfo(dtype)
        low, high = max(limits.min, -(2**53)), min(limits.max, 2**53)
        special = torch.tensor([low, high, low, high, 0], dtype=torch.float64)
    chosen = torch.randint(0, 40, shape, generator=generator)
    for number, value in enumerate(special):
        x = torch.where(chosen == number, value, x)
    return x.to(dtype).to(device)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal in dtype, shape and bits; of NaN any."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, want)
    numbers = torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(0), want.nan_to_num(0))
    return numbers and torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def both_ways(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return (*torch.sort(x, dim=dim, stable=True), *torch.sort(x, dim=dim, descending=True, stable=True))


def failures(got: Any, x: torch.Tensor, dim: int) -> list[str]:
    """What is wrong with ``got``, which should be ``both_ways(x, dim)``."""
    names = ("values", "indices", "values descending", "indices descending")
    found = zip(names, got, both_ways(x, dim), strict=True)
    return [f"{name} of {x.dtype} {tuple(x.shape)} along {dim}" for name, mine, want in found if not same(mine, want)]


def behind_ranks(x: torch.Tensor, y: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """What is computed pointwise of the first ``k`` ranks of rows of ``x``, and elements of ``y`` at their places:
    twice a number, and numbers that are chosen, all of it exact."""
    values, indices = (ranks.narrow(-1, 0, k) for ranks in x.sort(stable=True))
    others = values, values * 2, indices.int() % 7, torch.where(indices > 3, values, 0), values > 0
    return (*others, y.gather(-1, indices))


def first_ranks(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk with the least index among equals."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
