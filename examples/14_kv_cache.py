"""A decoder's cache of keys and values: a prompt, then one token after another.

Run:   python examples/14_kv_cache.py
Shows: one kernel that rotates, splits and appends, and one of attention, over places that a tensor of lengths names;
       the same with the modules of jitgen.nn, contiguous, in pages and in int8 codes, checked against float64.
"""

from __future__ import annotations

import math

import torch

import jitgen
from jitgen.nn import KVCache, PagedKVCache, functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KEY_HEADS, DEPTH, PLACES, PROMPT, TOKENS = 2, 8, 2, 64, 128, 37, 12


@jitgen.jit(backend="triton" if DEVICE == "cuda" else "cpp")
def step(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    widths = [HEADS * DEPTH, KEY_HEADS * DEPTH, KEY_HEADS * DEPTH]
    q, k, v = (x.unflatten(-1, (-1, DEPTH)).transpose(1, 2) for x in qkv.split(widths, -1))
    functional.append(keys, functional.rotary(k, cos, sin), start)
    functional.append(values, v, start)
    return functional.attend(functional.rotary(q, cos, sin), keys, values, start)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float64 attention of the last rows over all tokens so far."""
    k, v = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], device=DEVICE).triu(k.shape[2] - q.shape[2] + 1) > 0
    scores = q.double() @ k.transpose(-1, -2) * DEPTH**-0.5
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


def main() -> None:
    steps = [PROMPT] + [1] * TOKENS
    angles = torch.arange(PLACES, device=DEVICE)[:, None] * 10000.0 ** -torch.linspace(0, 1, DEPTH // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    keys, values = torch.zeros(2, BATCH, KEY_HEADS, PLACES, DEPTH, device=DEVICE)
    start = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)

    contiguous = KVCache(BATCH, KEY_HEADS, PLACES, DEPTH, device=DEVICE)
    codes = KVCache(BATCH, KEY_HEADS, PLACES, DEPTH, dtype=torch.int8, device=DEVICE)
    paged = PagedKVCache(BATCH, KEY_HEADS, 64, 16, PLACES // 16, DEPTH, device=DEVICE)
    paged.table.copy_(torch.randperm(64, device=DEVICE)[: paged.table.numel()].view_as(paged.table))
    caches = {"contiguous": contiguous, "in pages": paged, "in int8": codes}

    worst = dict.fromkeys(("one function", *caches), 0.0)
    k, v = torch.empty(2, BATCH, KEY_HEADS, 0, DEPTH, device=DEVICE)
    for tokens in steps:
        qkv = torch.randn(BATCH, tokens, (HEADS + 2 * KEY_HEADS) * DEPTH, device=DEVICE)
        here = slice(k.shape[2], k.shape[2] + tokens)
        q, new_k, new_v = (x.unflatten(-1, (-1, DEPTH)).transpose(1, 2) for x in qkv.split([512, 128, 128], -1))
        q, new_k = (functional.rotary(x, cos[here], sin[here]) for x in (q, new_k))
        k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        wanted = reference(q, k, v)

        found = {"one function": step(qkv, cos[here], sin[here], keys, values, start)}
        kernels = len(step.lower(qkv, cos[here], sin[here], keys, values, start).kernels)
        start += tokens
        for name, cache in caches.items():
            cache.append(new_k, new_v)
            found[name] = cache.attend(q)
            cache.advance(tokens)
        for name, result in found.items():
            worst[name] = max(worst[name], (result - wanted).abs().max().item())

    print(f"{PROMPT} tokens at once, then {TOKENS} one by one, {BATCH} sequences on {DEVICE}; {kernels} kernels a step")
    for name, error in worst.items():
        print(f"{name:14} largest difference from float64 {error:.1e}")
        assert error < (0.1 if name == "in int8" else 1e-5), name


if __name__ == "__main__":
    main()
