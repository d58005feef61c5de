"""Rows of 16-bit floats that exponentials less the maximum are hard for, and how far a rounded result may be off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = (torch.bfloat16, torch.float16)
BITS = {torch.bfloat16: 8, torch.float16: 11}

ERROR, SMALLEST = 2.0**-16, 2.0**-149
"""Of the float32 value that is rounded, at most: what ``codegen/dialect.py`` says of coarse rows; and the last place of
a float32, which is more than that where it is subnormal."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x * 30


def _far_from_zero(x: torch.Tensor) -> torch.Tensor:
    return x * 5 + torch.randint(-3000, 3000, (len(x), 1), device=x.device)


def _of_every_size(x: torch.Tensor) -> torch.Tensor:
    return x * torch.exp2(torch.randint(-20, 127, (len(x), 1), device=x.device).float())


def _not_finite(x: torch.Tensor) -> torch.Tensor:
    x[::3, ::2] = -math.inf
    x[1::3] = -math.inf
    x[2::7, x.shape[1] // 2] = math.inf
    x[5::9, x.shape[1] // 3] = math.nan
    return x


def _ends_of_the_range(x: torch.Tensor) -> torch.Tensor:
    x[:, x.shape[1] // 2] = torch.finfo(torch.float16).max
    x[1::2, x.shape[1] // 2] = torch.finfo(torch.bfloat16).max
    x[::2, x.shape[1] // 3] = -torch.finfo(torch.bfloat16).max
    return x


def _equal(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand_as(x) * 100


def _confident(x: torch.Tensor) -> torch.Tensor:
    x[:, x.shape[1] // 2] += 20
    return x


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "wide": _wide,
    "far from zero": _far_from_zero,
    "of every size": _of_every_size,
    "not finite": _not_finite,
    "ends of the range": _ends_of_the_range,
    "equal": _equal,
    "confident": _confident,
}


def _exponentials(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers, powers / powers.sum(-1, keepdim=True), (powers * 3).sum(-1), powers * 1e-35


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax of half": lambda x: F.softmax(x * 0.5, -1),
    "exponentials": _exponentials,
    "softmax and extremes": lambda x: (F.softmax(x, -1), x.amin(-1), x.amax(-1), x - x.amin(-1, keepdim=True)),
}


def rows(kind: str, count: int, length: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return KINDS[kind](torch.randn(count, length, device=device)).to(dtype).contiguous()


def mismatch(got: Any, exact: Any, plain: Any) -> str | None:
    """How results differ from ``exact``, in float64, by more than rounding ``ERROR`` off; None where they do not.

    ``plain``: torch's own results, which tell where there are none.
    """
    for place, ours in enumerate(_as_tuple(got)):
        want, theirs = _as_tuple(exact)[place], _as_tuple(plain)[place]
        if not torch.equal(ours.isnan(), theirs.isnan()):
            return f"result {place}: {int(ours.isnan().sum())} are NaN where torch has {int(theirs.isnan().sum())}"
        smallest = torch.finfo(ours.dtype).smallest_normal
        exponent = torch.frexp(want.abs().clamp(min=smallest)).exponent.double()
        allowed = 0.5 * torch.exp2(exponent - BITS[ours.dtype]) + ERROR * want.abs() + SMALLEST
        fine = (
            (ours.double() == want.to(ours.dtype).double()) | ours.isnan() | ((ours.double() - want).abs() <= allowed)
        )
        if not fine.all():
            where = int((~fine).flatten().nonzero()[0])
            pair = ours.flatten()[where].item(), want.flatten()[where].item()
            return f"result {place}: {pair[0]!r} for {pair[1]!r}; {int((~fine).sum())} are off"
    return None


def _as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
