"""The encoder of all-MiniLM-L6-v2 (a BERT of 6 layers) in plain PyTorch, its pieces decorated with `jitgen.jit`.

Everything but the two batched matrix products of attention and the look-up of words is a generated kernel: the fused
query, key and value projections; bias and GELU after the one projection, bias and the residual after the others;
LayerNorm; softmax; mean pooling. A weight may be a plain tensor or a `jitgen.QTensor`: the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import jitgen

HIDDEN, INNER, HEADS, LAYERS = 384, 1536, 12, 6
WORDS, POSITIONS, TYPES = 30522, 512, 2
EPS = 1e-12
Tensor = torch.Tensor


@jitgen.jit
def qkv(x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, wq, bq), F.linear(x, wk, bk), F.linear(x, wv, bv)


@jitgen.jit
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


@jitgen.jit
def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


@jitgen.jit
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, bias, EPS)


@jitgen.jit
def embedding_norm(words: Tensor, positions: Tensor, kind: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(words + positions + kind, (HIDDEN,), weight, bias, EPS)


@jitgen.jit
def attention_weights(scores: Tensor, scale: float, mask: Tensor) -> Tensor:
    return torch.softmax(scores * scale + mask, -1)


@jitgen.jit
def pooled(hidden: Tensor, present: Tensor) -> Tensor:
    """The mean of the words that are there, of length 1."""
    return F.normalize((hidden * present).sum(1), dim=-1)


PIECES = (qkv, linear_gelu, linear_residual, layer_norm, embedding_norm, attention_weights, pooled)

_eager = False


@contextmanager
def eager():
    """Within this context the pieces run in eager torch (`.reference`), as if they were not decorated."""
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before


def run(piece: Any, *args: Any) -> Any:
    call: Callable[..., Any] = piece.reference if _eager else piece
    return call(*args)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.attention_norm = nn.LayerNorm(HIDDEN, EPS)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, EPS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        projections = [(layer.weight, layer.bias) for layer in (self.query, self.key, self.value)]
        q, k, v = map(heads, run(qkv, x, *(part for pair in projections for part in pair)))
        weights = run(attention_weights, q @ k.transpose(-1, -2), (HIDDEN // HEADS) ** -0.5, mask)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        x = run(linear_residual, attended, self.output.weight, self.output.bias, x)
        x = run(layer_norm, x, self.attention_norm.weight, self.attention_norm.bias)
        inner = run(linear_gelu, x, self.up.weight, self.up.bias)
        x = run(linear_residual, inner, self.down.weight, self.down.bias, x)
        return run(layer_norm, x, self.norm.weight, self.norm.bias)


def heads(x: Tensor) -> Tensor:
    """[batch, words, hidden] to [batch, heads, words, hidden / heads]."""
    return x.unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2)


class Encoder(nn.Module):
    """Tokens to embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN)
        self.types = nn.Embedding(TYPES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, EPS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        """tokens: int64[batch, words]; present: bool[batch, words], False for padding. Returns [batch, HIDDEN]."""
        positions = self.positions.weight[: tokens.shape[1]]
        x = run(embedding_norm, self.words(tokens), positions, self.types.weight[0], self.norm.weight, self.norm.bias)
        mask = torch.zeros_like(present, dtype=x.dtype).masked_fill_(~present, float("-inf"))[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return run(pooled, x, present.to(x.dtype)[:, :, None])
