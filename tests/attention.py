"""Attention as plain functions: rules of scores and masks to compose, and a bound on the error of a kernel's result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

INF = math.inf

Rule = Callable[[Any, Any, Any], Any]
"""(scores, column of rows' indices, row of keys' indices) -> scores."""

RULES: dict[str, Rule] = {
    "scale": lambda s, i, j: s * 0.25,
    "cap": lambda s, i, j: 4 * torch.tanh(s / 4),
    "distance": lambda s, i, j: s - 0.05 * (i - j).abs(),
    "alternate": lambda s, i, j: torch.where((i + j) * 3 < 40, s, -s),
}
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "causal": lambda i, j: j > i,
    "bottom": lambda i, j: j > i + 9,
    "window": lambda i, j: (i - j > 11) | (j - i > 5),
    "prefix": lambda i, j: (j > i) & (j >= 7),
    "blocks": lambda i, j: i // 32 != j // 32,
    "product": lambda i, j: i * j > 300,
    "extrema": lambda i, j: torch.minimum(i, j) + 3 < torch.maximum(-i, j - 20),
    "outside": lambda i, j: ~((j <= i) & (j >= i - 30)),
    "bits": lambda i, j: ((i >> 4 ^ j >> 4) & 6) > (j & 3),
    "chosen": lambda i, j: torch.where(j > i, j - i, (i << 1) % 50) > 31,
}


def formula(rules: Sequence[str], masks: Sequence[str]) -> Callable[..., Any]:
    """Attention with ``rules`` applied in order, and the keys hidden that one of ``masks`` says."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=q.device)
        for name in rules:
            s = RULES[name](s, i, j)
        for name in masks:
            s = s.masked_fill(MASKS[name](i, j), -INF)
        return torch.softmax(s.float() if s.dtype != torch.float64 else s, -1).to(v.dtype) @ v

    return attend


def sample(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(n * p for n, p in zip(shape, (3, 5, 7, 11, 13), strict=False)))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def operands(
    batch: Sequence[int], rows: int, keys: int, depth: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        sample((*batch, rows, depth), dtype, 1),
        sample((*batch, keys, depth), dtype, 2),
        sample((*batch, keys, width), dtype, 3),
    )


def failure(
    found: torch.Tensor,
    wanted: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rounded: bool = False,
) -> str | None:
    """What is wrong with ``found``, in words; None where nothing is.

    Sums of D products have an error of D + 1 roundings of the sum of their magnitudes, a rule of scores adds a few of a
    score's size. Weights have that error, relatively, twice (also in their sum), and the sums over N of them N
    roundings; then the result is rounded. If weights are ``rounded`` to the dtype of the values, each of them has half
    a unit in the last place more, and so has their sum with values, relatively to the largest of these. Rules here
    change no difference of scores by more than the product's own. The product with values has their dtype, so that a
    wider result of it, such as its quotient by a float32 sum, is as good as that dtype.
    """
    if found.shape != wanted.shape or not torch.equal(found.isnan(), wanted.isnan()):
        return f"shape {tuple(found.shape)}, NaN at {found.isnan().sum()} places; wanted {tuple(wanted.shape)}"
    if not found.numel() or not k.shape[-2]:
        return None if torch.equal(found.double(), wanted.double()) else "values without keys"
    eps = torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    size = (q.double().abs() @ k.double().abs().transpose(-1, -2)).amax() + q.shape[-2] + k.shape[-2]
    relative = eps * (2 * (q.shape[-1] + 12) * size + k.shape[-2] + 16)
    coarser = max(torch.finfo(found.dtype).eps, torch.finfo(v.dtype).eps)
    bound = relative * v.double().abs().amax() + coarser * wanted.abs()
    bound = bound + rounded * torch.finfo(v.dtype).eps / 2 * v.double().abs().amax()
    error = (found.double() - wanted).abs()
    excess = ((error > bound) & ~wanted.isnan()).sum()
    return f"{excess} elements off by up to {error[~wanted.isnan()].max():.3g}" if excess else None
