"""Attention by five rules of scores, each a plain function and one kernel.

Run:   python examples/13_attention_rules.py
Shows: causal, sliding window, ALiBi, a soft cap and documents, checked against float64; the time of each beside eager
       torch, F.scaled_dot_product_attention with a mask in memory (it has no soft cap) and, on a GPU, FlexAttention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HEADS, DEPTH, WINDOW = 512, 8, 64, 100


def indices(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.arange(q.shape[-2], device=q.device)[:, None],
        torch.arange(k.shape[-2], device=q.device),
    )


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) * DEPTH**-0.5


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = indices(q, k)
    return torch.softmax(scores(q, k).masked_fill(j > i, -math.inf), -1) @ v


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = indices(q, k)
    return torch.softmax(scores(q, k).masked_fill((j > i) | (i - j > WINDOW), -math.inf), -1) @ v


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = indices(q, k)
    slopes = 2.0 ** -(1 + torch.arange(q.shape[1], device=q.device)[:, None, None])
    return torch.softmax((scores(q, k) + slopes * (j - i)).masked_fill(j > i, -math.inf), -1) @ v


def soft_cap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(20 * torch.tanh(scores(q, k) / 20), -1) @ v


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = indices(q, k)
    return torch.softmax(scores(q, k).masked_fill(i // 128 != j // 128, -math.inf), -1) @ v


def flex_rules(heads: int) -> dict[str, tuple[Any, Any]]:
    """(score_mod, mask_mod) of FlexAttention for each rule."""
    slopes = 2.0 ** -(1 + torch.arange(heads, device=DEVICE))

    def is_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    return {
        "causal": (None, is_causal),
        "window": (None, lambda b, h, i, j: (j <= i) & (i - j <= WINDOW)),
        "alibi": (lambda s, b, h, i, j: s + slopes[h] * (j - i), is_causal),
        "soft_cap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), None),
        "documents": (None, lambda b, h, i, j: i // 128 == j // 128),
    }


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: str) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    score, mask = flex_rules(q.shape[1])[rule]
    block = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=DEVICE) if mask else None
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, score_mod=score, block_mask=block)


def milliseconds(function: Callable[[], torch.Tensor], repeats: int = 5) -> float:
    function()
    times = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def main() -> None:
    q, k, v = (torch.randn(1, HEADS, ROWS, DEPTH, device=DEVICE) for _ in range(3))
    i, j = indices(q, k)
    slopes = 2.0 ** -(1 + torch.arange(HEADS, device=DEVICE)[:, None, None])
    shown = {
        causal: j <= i,
        window: (j <= i) & (i - j <= WINDOW),
        alibi: (slopes * (j - i)).masked_fill(j > i, -math.inf),
        documents: i // 128 == j // 128,
    }
    print(f"(1, {HEADS}, {ROWS}, {DEPTH}) float32 on {DEVICE}; times in ms")
    print(f"{'rule':10} {'kernels':>7} {'error':>8} {'jitgen':>7} {'eager':>7} {'sdpa':>7} {'flex':>7}")
    for rule in (causal, window, alibi, soft_cap, documents):
        compiled = jitgen.jit(rule, backend="triton" if DEVICE == "cuda" else "cpp")
        error = (compiled(q, k, v).double() - rule(q.double(), k.double(), v.double())).abs().max().item()
        mask = shown.get(rule)
        peer = "      -"
        if mask is not None:
            peer = f"{milliseconds(lambda m=mask: F.scaled_dot_product_attention(q, k, v, m)):7.2f}"
        others = f"{milliseconds(flex(q, k, v, rule.__name__)):7.2f}" if DEVICE == "cuda" else "      -"
        kernels = len(compiled.lower(q, k, v).kernels)
        ours, eager = milliseconds(lambda f=compiled: f(q, k, v)), milliseconds(lambda f=rule: f(q, k, v))
        print(f"{rule.__name__:10} {kernels:7} {error:8.1e} {ours:7.2f} {eager:7.2f} {peer} {others}")
        assert error < 1e-5, rule.__name__


if __name__ == "__main__":
    main()
