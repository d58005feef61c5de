"""What a cache of keys and values must give: float64 attention over its tokens, and how far codes may move it."""

from __future__ import annotations

import math

import torch

from tests.attention import INF

GROUPS, DEPTH = 2, 16
"""Heads of queries for each head of keys, and elements of a key."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, window: int) -> torch.Tensor:
    """float64 attention of each sequence by itself, over all tokens so far."""
    rows = []
    for number, first in enumerate(start.tolist()):
        keys, values = (x[number].double().repeat_interleave(GROUPS, 0)[:, : first + q.shape[2]] for x in (k, v))
        i, j = first + torch.arange(q.shape[2])[:, None], torch.arange(keys.shape[1])
        scores = q[number].double() @ keys.transpose(-1, -2) * DEPTH**-0.5
        rows.append(torch.softmax(scores.masked_fill((j > i) | (i - j >= window), -INF), -1) @ values)
    return torch.stack(rows)


def bound(dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """How far codes may move a result: each element of a key and of a value is off by its format's half step, scores by
    that times the magnitudes of a query, and weights by twice as much, relatively."""

    def step(x: torch.Tensor) -> float:
        most = x.abs().amax().item()
        return {torch.int8: most / 127 / 2, torch.float8_e4m3fn: most * 2**-4, torch.float8_e5m2: most * 2**-3}[dtype]

    moved = step(k) * q.abs().sum(-1).amax().item() * DEPTH**-0.5
    return math.expm1(2 * moved) * v.abs().amax().item() + step(v) + 1e-5
