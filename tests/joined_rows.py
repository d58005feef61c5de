"""Functions of rows that are joined of lengths of themselves, as rotary embeddings are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated into one another, as Llama does."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours rotated into one another."""
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], cos[..., 0::2], sin[..., 0::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def normal(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def halves(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(normal(x, weight), cos, sin)


def pairs(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated_pairs(normal(x, weight), cos, sin)


def of_layer_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(F.layer_norm(x, x.shape[-1:], weight), cos, sin)


def of_softmax(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(torch.softmax(x * weight, -1), cos, sin)


def of_extremes(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    return rotated(x / scale * weight, cos, sin)


def quarters(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = normal(x, weight)
    a, b, c, d = n.chunk(4, -1)
    return torch.cat([d, -a, b * 2, c], -1) * cos + n * sin


def unequal(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = normal(x, weight)
    quarter = x.shape[-1] // 4
    return torch.cat([-n[..., quarter:], n[..., :quarter]], -1) * cos + sin


def half_of_a_row(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half of a row rotated and the other half not: joined of what is joined."""
    n, half = normal(x, weight), x.shape[-1] // 2
    return torch.cat([rotated(n[..., :half], cos[..., :half], sin[..., :half]), n[..., half:]], -1)


def of_other_rows(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two rows beside one another, each over its own sum."""
    return torch.cat([x / (1 + x.abs().sum(-1, keepdim=True)), cos * x / (1 + x.abs().amax(-1, keepdim=True))], -1)


def one_row_only(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A length that is computed of no reduction."""
    return torch.cat([normal(x, weight)[..., ::2], x[..., 1::2]], -1)


ONE_KERNEL: dict[str, Function] = {
    function.__name__: function for function in (halves, pairs, of_layer_norm, of_softmax, of_extremes)
}
OTHERS: dict[str, Function] = {
    function.__name__: function for function in (quarters, unequal, half_of_a_row, of_other_rows, one_row_only)
}


def arguments(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, _, length = shape
    cos, sin = torch.randn(2, rows, 1, length).to(dtype)
    return torch.randn(shape).to(dtype), torch.randn(length).to(dtype), cos, sin
