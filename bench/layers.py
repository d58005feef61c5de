"""Decoder layers as families of models write them, in plain PyTorch, with the specs of their arguments.

Each has a product of its own for each of its weights, heads by ``view`` and ``transpose``, and a rotary embedding.
``bench/balances.py`` and ``tests/unit/test_balance.py`` count the kernels that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jitgen import TensorSpec

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER = 4096, 32, 8, 128, 14336
QUERIES, KEYS = HEADS * WIDTH, KV_HEADS * WIDTH
WINDOW = 256
"""Keys that a query of a sliding window sees."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def heads(x: Tensor, weight: Tensor, count: int, bias: Tensor | None = None, norm: Tensor | None = None) -> Tensor:
    y = F.linear(x, weight, bias).view(x.shape[0], x.shape[1], count, WIDTH)
    return (y if norm is None else F.rms_norm(y, (WIDTH,), norm, 1e-6)).transpose(1, 2)


def projected(o: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(o.transpose(1, 2).flatten(2), weight, bias)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def offset_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's: the weight is that of 1 + weight, and all is float32 until the end."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1 + weight.float())).type_as(x)


def gated(h, gate, up, down):
    return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def llama(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin):
    h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, KV_HEADS), heads(h, wv, KV_HEADS)
    x = x + projected(attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True), wo)
    return x + gated(F.rms_norm(x, (HIDDEN,), second, 1e-5), gate, up, down)


def qwen2(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin, bq, bk, bv):
    """Queries, keys and values have biases."""
    h = F.rms_norm(x, (HIDDEN,), first, 1e-6)
    q, k, v = heads(h, wq, HEADS, bq), heads(h, wk, KV_HEADS, bk), heads(h, wv, KV_HEADS, bv)
    x = x + projected(attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True), wo)
    return x + gated(F.rms_norm(x, (HIDDEN,), second, 1e-6), gate, up, down)


def qwen3(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin, norm_q, norm_k):
    """Heads of queries and keys are normalised."""
    h = F.rms_norm(x, (HIDDEN,), first, 1e-6)
    q, k = heads(h, wq, HEADS, norm=norm_q), heads(h, wk, KV_HEADS, norm=norm_k)
    q, k, v = rotated(q, cos, sin), rotated(k, cos, sin), heads(h, wv, KV_HEADS)
    x = x + projected(attention(q, k, v, is_causal=True), wo)
    return x + gated(F.rms_norm(x, (HIDDEN,), second, 1e-6), gate, up, down)


def mistral(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin):
    """A query sees a sliding window of keys."""
    h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, KV_HEADS), heads(h, wv, KV_HEADS)
    i = torch.arange(x.shape[1], device=x.device)
    seen = (i[:, None] >= i) & (i[:, None] - i < WINDOW)
    x = x + projected(attention(rotated(q, cos, sin), rotated(k, cos, sin), v, attn_mask=seen), wo)
    return x + gated(F.rms_norm(x, (HIDDEN,), second, 1e-5), gate, up, down)


def granite(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin):
    """Scores and what is added to the residual stream have factors."""
    h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, KV_HEADS), heads(h, wv, KV_HEADS)
    attended = attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, scale=0.0078125)
    x = x + 0.22 * projected(attended, wo)
    return x + 0.22 * gated(F.rms_norm(x, (HIDDEN,), second, 1e-5), gate, up, down)


def gemma(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin):
    h = offset_norm(x, first)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, KV_HEADS), heads(h, wv, KV_HEADS)
    x = x + projected(attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True), wo)
    h = offset_norm(x, second)
    return x + F.linear(F.gelu(F.linear(h, gate), approximate="tanh") * F.linear(h, up), down)


def gemma2(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin, third, fourth):
    """Scores are capped, and what is added to the residual stream is normalised."""
    h = offset_norm(x, first)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, KV_HEADS), heads(h, wv, KV_HEADS)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    i = torch.arange(x.shape[1], device=x.device)
    scores = torch.tanh(q @ k.mT * 0.0625 / 50) * 50
    scores = scores.masked_fill(i > i[:, None], -torch.inf)
    x = x + offset_norm(projected(torch.softmax(scores, -1) @ v, wo), third)
    h = offset_norm(x, second)
    h = F.linear(F.gelu(F.linear(h, gate), approximate="tanh") * F.linear(h, up), down)
    return x + offset_norm(h, fourth)


def falcon(x, weight, bias, wqkv, wo, up, down, cos, sin):
    """Attention and the MLP read one norm, and both are added to the residual stream."""
    h = F.layer_norm(x, (HIDDEN,), weight, bias)
    qkv = F.linear(h, wqkv).view(x.shape[0], x.shape[1], HEADS + 2 * KV_HEADS, WIDTH)
    q, k, v = (each.transpose(1, 2) for each in qkv.split([HEADS, KV_HEADS, KV_HEADS], 2))
    attended = attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
    return x + projected(attended, wo) + F.linear(F.gelu(F.linear(h, up)), down)


def phi(x, weight, bias, wq, bq, wk, bk, wv, bv, wo, bo, up, bu, down, bd, cos, sin):
    """Like Falcon's, with biases, and a half of each head is rotated."""
    half = WIDTH // 2

    def partly(y: Tensor) -> Tensor:
        return torch.cat([rotated(y[..., :half], cos[..., :half], sin[..., :half]), y[..., half:]], -1)

    h = F.layer_norm(x, (HIDDEN,), weight, bias)
    q, k, v = heads(h, wq, HEADS, bq), heads(h, wk, KV_HEADS, bk), heads(h, wv, KV_HEADS, bv)
    attended = attention(partly(q), partly(k), v, is_causal=True)
    inner = F.gelu(F.linear(h, up, bu), approximate="tanh")
    return x + projected(attended, wo, bo) + F.linear(inner, down, bd)


def phi3(x, first, wqkv, wo, second, gate_up, down, cos, sin):
    """Queries, keys and values are one product, and so are gate and up."""
    h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
    q, k, v = (
        each.view(x.shape[0], x.shape[1], -1, WIDTH).transpose(1, 2)
        for each in F.linear(h, wqkv).split([QUERIES, KEYS, KEYS], -1)
    )
    x = x + projected(attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True), wo)
    gate, up = F.linear(F.rms_norm(x, (HIDDEN,), second, 1e-5), gate_up).chunk(2, -1)
    return x + F.linear(up * F.silu(gate), down)


def residual_blocks(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.linear(F.silu(F.linear(x, up)), down)
    return x


def normed_blocks(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, x.shape[-1:]), up)), down)
    return x


_PRODUCTS = ((QUERIES, HIDDEN), *2 * ((KEYS, HIDDEN),), (HIDDEN, QUERIES))
_GATED = ((HIDDEN,), *_PRODUCTS, (HIDDEN,), *2 * ((INNER, HIDDEN),), (HIDDEN, INNER))
_FUSED = (QUERIES + 2 * KEYS, HIDDEN)
_BLOCKS = 8 * ((2 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN))


@dataclass(frozen=True)
class Layer:
    """A layer, or a chain of blocks.

    Attributes:
        weights: the shapes of its weights, in their order behind the hidden states.
        is_rotated: whether the cosines and sines of a rotary embedding follow.
        last: the shapes of what follows these.
        kernels: how many it is for sm_90a.
    """

    function: Callable[..., Tensor]
    weights: Sequence[tuple[int, ...]]
    is_rotated: bool
    last: Sequence[tuple[int, ...]]
    kernels: int

    def specs(self, rows: int) -> list[TensorSpec]:
        """The specs of the arguments for ``rows`` new tokens, in bfloat16."""
        angles = 2 * [(rows, WIDTH)] if self.is_rotated else []
        shapes = [(1, rows, HIDDEN), *self.weights, *angles, *self.last]
        return [TensorSpec(shape, torch.bfloat16) for shape in shapes]


LAYERS = {
    "Llama": Layer(llama, _GATED, True, (), 8),
    "Qwen2": Layer(qwen2, _GATED, True, ((QUERIES,), (KEYS,), (KEYS,)), 8),
    "Qwen3": Layer(qwen3, _GATED, True, 2 * ((WIDTH,),), 8),
    "Mistral": Layer(mistral, _GATED, True, (), 8),
    "Granite": Layer(granite, _GATED, True, (), 8),
    "Gemma": Layer(gemma, _GATED, True, (), 8),
    "Gemma2": Layer(gemma2, _GATED, True, 2 * ((HIDDEN,),), 9),
    "Falcon": Layer(
        falcon,
        (*2 * ((HIDDEN,),), _FUSED, (HIDDEN, QUERIES), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)),
        True,
        (),
        6,
    ),
    "Phi": Layer(
        phi,
        (
            *2 * ((HIDDEN,),),
            *(shape for rows, columns in _PRODUCTS for shape in ((rows, columns), (rows,))),
            *((4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,)),
        ),
        True,
        (),
        6,
    ),
    "Phi3": Layer(
        phi3, ((HIDDEN,), _FUSED, (HIDDEN, QUERIES), (HIDDEN,), (2 * INNER, HIDDEN), (HIDDEN, INNER)), True, (), 8
    ),
    "eight residual blocks": Layer(residual_blocks, _BLOCKS, False, (), 16),
    "eight residual blocks with norms": Layer(normed_blocks, _BLOCKS, False, (), 24),
}
