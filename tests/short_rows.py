"""Short rows of several tensors, as norms of the heads of queries and keys are, and what is appended to a cache of
them: what tests of kernels on the CPU and on a GPU share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from jitgen.nn import functional
from tests.joined_rows import normal, rotated, rotated_pairs

Tensor = torch.Tensor


def heads(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(normal(q, of_q), cos, sin), rotated(normal(k, of_k), cos, sin)


def pairs(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated_pairs(normal(q, of_q), cos, sin), normal(k, of_k)


def in_two_passes(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    centred = k - k.mean(-1, keepdim=True)
    return F.layer_norm(q, q.shape[-1:], of_q), centred / (1 + centred.abs().amax(-1, keepdim=True)) * of_k


def of_extremes(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    scale = q.abs().amax(-1, keepdim=True) - q.amin(-1, keepdim=True)
    return q / scale * of_q, rotated(normal(k, of_k), cos, sin)


def appended(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor, v: Tensor, keys: Tensor, values: Tensor,
    start: Tensor
) -> Tensor:  # fmt: skip
    """Batch, tokens, heads and elements; the caches have heads before positions."""
    functional.append(keys, rotated(normal(k, of_k), cos, sin).transpose(1, 2), start)
    functional.append(values, v.transpose(1, 2), start)
    return rotated(normal(q, of_q), cos, sin)


def copied(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor, v: Tensor, keys: Tensor, values: Tensor,
    start: Tensor
) -> Tensor:  # fmt: skip
    keys.index_copy_(2, start, rotated(normal(k, of_k), cos, sin).transpose(1, 2))
    values.index_copy_(2, start, v.transpose(1, 2))
    return normal(q, of_q)


def tensors(
    batch: int, tokens: int, length: int, dtype: torch.dtype, heads_of_q: int = 4, heads_of_k: int = 2
) -> list[Tensor]:
    q, k = torch.randn(batch, tokens, heads_of_q, length), torch.randn(batch, tokens, heads_of_k, length)
    of_q, of_k = torch.randn(2, length)
    cos, sin = torch.randn(2, tokens, 1, length)
    return [tensor.to(dtype) for tensor in (q, k, of_q, of_k, cos, sin)]


def cache(batch: int, tokens: int, length: int, dtype: torch.dtype, start: Sequence[int]) -> list[Tensor]:
    v, keys, values = torch.randn(batch, tokens, 2, length), *torch.randn(2, batch, 2, 19, length)
    return [*(tensor.to(dtype) for tensor in (v, keys, values)), torch.tensor(start)]
