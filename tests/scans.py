"""Scans against float64 torch: what the tests of every dialect share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)

TILE = 2048
"""The longest run of a row that any dialect combines by itself before it joins what comes before it."""


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Values of which products over long rows stay finite, with equal ones among them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator, device=device) < 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -5
        return torch.randint(low, 6, shape, generator=generator, device=device).to(dtype)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def every_kind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """One kernel with a state for each kind; products of numbers near 1."""
    found = [torch.cumsum(x, dim), *torch.cummax(x, dim), *torch.cummin(x, dim)]
    if x.is_floating_point():
        found += [torch.cumprod(1 + x * 0.03125, dim), torch.logcumsumexp(x, dim)]
    else:
        found += [torch.cumprod(x, dim)]
    return tuple(found)


def roundings(length: int) -> float:
    """How often an element of a row of so many is rounded at most, in units of the compute dtype.

    Within a tile it is added to at most as many others as the tile has; the state before it is carried in float64, or
    (of products, and of exponentials' sums) is rounded once a tile.
    """
    return 4.0 + min(length, TILE) + length / 64


def wrong(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, spread: torch.Tensor) -> str | None:
    """How ``got`` differs from the exact ``want``; ``spread``: by which every element may, in the compute dtype."""
    if got.shape != want.shape:
        return f"{name}: shape {tuple(got.shape)} for {tuple(want.shape)}"
    if not dtype.is_floating_point:
        bad = got != want.to(got.dtype)
    else:
        half = torch.finfo(dtype).eps / 2
        exact = want.double()
        bound = spread + half * (exact.abs() + spread) + torch.finfo(dtype).smallest_normal
        stored = exact.to(dtype)
        bad = ((got.double() - exact).abs() > bound) & ~(got.isnan() & exact.isnan()) & (got != stored)
    if not bad.any():
        return None
    where = tuple(bad.nonzero()[0].tolist())
    return f"{name}: {int(bad.sum())} of {bad.numel()} wrong, first at {where}: {got[where]} for {want[where]}"


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place of what ``dtype`` is computed in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def failures(results: tuple[torch.Tensor, ...], x: torch.Tensor, dim: int) -> list[str]:
    """What is wrong with ``results``, those of ``every_kind`` of ``x``."""
    exact = x.double() if x.is_floating_point() else x
    like = every_kind(x, dim)
    want = every_kind(exact, dim)
    length = x.shape[dim] if x.dim() else 1
    names = ("cumsum", "cummax", "cummax places", "cummin", "cummin places", "cumprod", "logcumsumexp")
    found = []
    for name, got, plain, value in zip(names, results, like, want, strict=False):
        if got.dtype != plain.dtype:
            found.append(f"{name}: {got.dtype} for {plain.dtype}")
            continue
        spread = torch.zeros(())
        if got.is_floating_point() and name == "cumsum":
            spread = roundings(length) * unit(x.dtype) * exact.abs().cumsum(dim)
        elif got.is_floating_point() and name == "cumprod":
            spread = (roundings(length) + length) * unit(x.dtype) * value.abs()
        elif name == "logcumsumexp":
            spread = 4 * roundings(length) * unit(x.dtype) + 8 * unit(x.dtype) * value.abs()
        found.append(wrong(name, got, value, got.dtype, spread))
    return [text for text in found if text]


def halves(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts of one scan with what each alone is computed of; the second part overlaps the first and the third."""
    end = x.shape[1]
    scanned = x.cumsum(1)
    left, middle, right = scanned[:, : end // 2], scanned[:, end // 3 : end - 1], scanned[:, end // 2 :]
    return left.relu() * scale, middle * y[:, end // 3 : end - 1] + scale, right - y[:, :1]


def halves_from_the_other_end(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sums, greatest = (each.flip(1).chunk(2, 1) for each in (x.flip(1).cumsum(1), x.flip(1).cummax(1).values))
    return sums[0].relu() * scale, sums[1] - y[:, :1], *(each.exp() for each in greatest)


def joined_pieces(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pieces of a scan, each computed otherwise, as one tensor, and as a result all of it."""
    scanned = x.cumsum(1)
    first, second, *others = scanned.tensor_split(5, 1)
    return torch.cat([first * 2, second - y[:, :1], *(other.relu() for other in others)], 1), scanned


SLICES = (halves, halves_from_the_other_end, joined_pieces)
"""Functions of a tensor, another of the same shape and a scalar tensor; each is one kernel, or two of long rows."""


def wrong_slices(got: tuple[torch.Tensor, ...], function: Function, *tensors: torch.Tensor) -> list[str]:
    """What is wrong with the results of ``function``, one of ``SLICES``."""
    want = function(*(tensor.double() for tensor in tensors))
    x, _, scale = tensors
    factor = scale.abs().double() + 6  # no element of a normal sample is as far from 0
    spread = (roundings(x.shape[1]) + 8) * unit(x.dtype) * (x.double().abs().sum(1, keepdim=True) + 4) * factor
    found = [wrong(f"result {n}", a, b, a.dtype, spread) for n, (a, b) in enumerate(zip(got, want, strict=True))]
    return [text for text in found if text]


def special_rows(length: int) -> torch.Tensor:
    """Rows of -inf, NaN somewhere, infinities, equal values, signed zeros, one large element, a single -0."""
    rows = torch.randn(8, length)
    rows[0] = -math.inf
    rows[1, length // 2] = math.nan
    rows[1, -1] = math.nan
    rows[2, length // 3] = math.inf
    rows[3] = 3.0
    rows[4] = torch.tensor([0.0, -0.0]).repeat(length)[:length]
    rows[5, length // 2] = 80.0
    rows[6, : length // 2] = -math.inf
    rows[7] = 1.0
    rows[7, 0] = -0.0
    return rows


def same_special(results: tuple[torch.Tensor, ...], x: torch.Tensor, dim: int) -> list[str]:
    """What is wrong with scans of special values, compared with eager torch: of sums all but the signs of zeros."""
    names = ("cumsum", "cummax", "cummax places", "cummin", "cummin places", "cumprod", "logcumsumexp")
    want = every_kind(x.double(), dim)
    found = []
    for name, got, value in zip(names, results, want, strict=True):
        zero = (value == 0) & (got == 0)
        if name.startswith(("cummax", "cummin", "cumprod")) and not torch.equal(
            got.signbit() & zero, value.signbit() & zero
        ):
            found.append(f"{name}: the sign of {int(((got.signbit() != value.signbit()) & zero).sum())} zeros")
        if name == "cumprod" and got.isinf().any():
            continue  # Products of other orders overflow elsewhere.
        if not torch.allclose(got.double(), value.double(), rtol=1e-4, atol=1e-3, equal_nan=True):
            found.append(f"{name}: {got} for {value}")
    return found
