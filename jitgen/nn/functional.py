"""Provides plain functions for decoders, to compose within ``@jitgen.jit``: rotary embedding, caches, attention over
them.

Shapes: B sequences, H heads of queries and Hkv of keys (H a multiple of it), T new tokens, N positions of a cache, D
elements of a head. ``start`` (B) says how many tokens each sequence had before these T: integers in memory, so that one
kernel, and one captured CUDA graph, serves every length up to N.

Every update is in place. With B sequences whose tokens are at consecutive positions, no two of them have one place, and
an append is one pointwise kernel beside whatever else the function stores, such as rotated queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates the first R elements of ``x`` (..., D) by angles, and keeps the others (Su et al., "RoFormer").

    Args:
        cos, sin: of the angles, (..., R / 2), broadcast to ``x``.
        interleaved: whether the elements 2i and 2i + 1 are a pair; otherwise i and R / 2 + i are.
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, first * sin + second * cos)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.to(x.dtype), rest), -1) if rest.shape[-1] else rotated.to(x.dtype)


def append(cache: torch.Tensor, new: torch.Tensor, start: torch.Tensor, ring: bool = False) -> None:
    """Writes ``new`` (B, Hkv, T, ...) to ``cache`` (B, Hkv, N, ...) at the positions from ``start`` (B) on.

    Args:
        ring: whether position p is in place p % N.
    """
    batch, heads, tokens = new.shape[:3]
    slots = start[:, None, None] + torch.arange(tokens, device=new.device)
    slots = slots % cache.shape[2] if ring else slots
    sequences = torch.arange(batch, device=new.device)[:, None, None]
    cache[sequences, torch.arange(heads, device=new.device)[:, None], slots] = new


def slots_in_pages(
    table: torch.Tensor, start: torch.Tensor, tokens: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Locates the T ``tokens`` from ``start`` (B) on: their page and their place in it, (B, T) each.

    Args:
        table: (B, blocks), the page of the positions from ``page_size`` times the block's number on.
    """
    positions = start[:, None] + torch.arange(tokens, device=start.device)
    return torch.gather(table, 1, positions // page_size), positions % page_size


def append_pages(pages: torch.Tensor, new: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> None:
    """Writes ``new`` (B, Hkv, T, ...) to ``pages`` (pages, Hkv, P, ...) at ``slot`` of ``page``, (B, T) each."""
    pages[page, :, slot] = new.transpose(1, 2)


def paged(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Gathers the cache (B, Hkv, blocks * P, ...) that ``table`` (B, blocks) makes of ``pages`` (pages, Hkv, P, ...).

    Within a kernel of attention it is not copied: the kernel looks up the page of each key.
    """
    return pages[table].transpose(1, 2).flatten(2, 3)


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``x`` (..., D) to codes of ``dtype`` (int8 or a float8) and float32 scales (...), one scale for each
    row.

    A code times its scale is off by half a scale (int8), or by half a unit in the last place of the code (float8).
    """
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    x = x.float()
    scale = x.abs().amax(-1) / limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = x / scale[..., None]
    if dtype == torch.int8:
        codes = torch.round(codes)
    return codes.clamp(-limit, limit).to(dtype), scale


def dequantized(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises what ``quantized`` returned, to ``dtype``. A kernel of attention computes them of each tile that it
    reads."""
    return (codes.float() * scale[..., None]).to(dtype)


def _for_each_head(q: torch.Tensor, *shared: torch.Tensor) -> list[torch.Tensor]:
    """Returns keys and values, whose heads several heads of ``q`` share, with one head for each of these."""
    groups = q.shape[1] // shared[0].shape[1]
    return [tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in shared]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    *,
    window: int | None = None,
    ring: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes causal attention (B, H, T, E) of the T newest tokens over a cache that holds them already.

    Args:
        q: (B, H, T, D); row i is at position ``start + i``.
        k, v: (B, Hkv, N, D) and (B, Hkv, N, E).
        start: (B), tokens before these T. Positions behind the last row's are not read.
        window: positions that a row sees at most, its own included; None for all.
        ring: whether position p is in place p % N, so that of old positions only the last N are there.
        scale: of the products; None for 1 / sqrt(D).
    """
    k, v = _for_each_head(q, k, v)
    i = start[:, None, None, None] + torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    if ring:
        newest = start[:, None, None, None] + q.shape[2] - 1
        j = newest - (newest - j) % k.shape[2]
    hidden = (j > i) | (j < 0) if ring else j > i
    if window is not None:
        hidden = hidden | (i - j >= window)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1).to(v.dtype) @ v


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes attention (total_q, H, E) of sequences that are packed one after another, each over its own keys.

    A causal row sees the keys up to its own place from the end, as in FlashAttention: the last row sees all keys. A row
    that sees no key is zero.

    Args:
        q: (total_q, H, D). k, v: (total_k, Hkv, D) and (total_k, Hkv, E).
        cu_q, cu_k: (sequences + 1), int32 or int64, where each sequence's rows and keys begin, and their number.
        scale: of the products; None for 1 / sqrt(D).
    """
    k, v = _for_each_head(q, k, v)
    i = torch.arange(q.shape[0], device=q.device, dtype=cu_q.dtype)
    j = torch.arange(k.shape[0], device=q.device, dtype=cu_k.dtype)
    row, key = (torch.searchsorted(ends[1:], at, right=True) for ends, at in ((cu_q, i), (cu_k, j)))
    seen = row[:, None] == key
    if causal:
        from_end = i - cu_q[1:][row]
        seen = seen & (j - cu_k[1:][key] <= from_end[:, None])
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale).transpose(0, 1)
