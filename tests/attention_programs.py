"""Random attention: shapes, strides, and a rule, a mask, a softmax and results that a grammar composes.

``program(seed)`` is a function in plain PyTorch with its arguments. The grammar:

    scores  := product | scores * 0.7 | scores / temperature | 4 * tanh(scores / 4) | scores + bias
             | scores + slopes * (j - i) | where(condition, scores, -scores)
    mask    := atom | mask and mask | mask or mask | not mask
    atom    := causal | bottom | window | prefix | dilated | documents | lengths | a boolean tensor | a table of blocks
    softmax := torch's | log_softmax and exp | exponentials over their sum | with a sink | times factors of keys
    result  := the product | gated | transposed and merged | beside logsumexp
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 96, 97, 130, 193)
"""Numbers of rows and keys at and beside the edges of tiles, beside random ones."""
Step = Callable[..., Any]


@dataclass
class Program:
    """A function and its arguments, of which the first three are queries, keys and values.

    Attributes:
        words: what the grammar composed.
    """

    function: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    words: str


class _Drawn:
    """What is drawn for one program: its extra tensors, by their numbers, and words."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.extra: list[torch.Tensor] = []
        self.words: list[str] = []

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def tensor(self, value: torch.Tensor) -> int:
        self.extra.append(value)
        return len(self.extra) - 1

    def choose(self, name: str, *options: str) -> str:
        found = self.random.choice(options)
        self.words.append(f"{name} {found}")
        return found

    def size(self) -> int:
        return self.random.choice(SIZES) if self.random.random() < 0.7 else self.random.randint(1, 200)


def program(seed: int, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)) -> Program:
    """The program that ``seed`` stands for."""
    drawn = _Drawn(seed)
    draw = drawn.random
    batch, heads, groups = draw.randint(1, 3), draw.randint(1, 3), draw.choice((1, 1, 2, 3))
    rows, keys = drawn.size(), 0 if draw.random() < 0.02 else drawn.size()
    depth, width = draw.randint(1, 80), draw.randint(1, 80)
    dtype = draw.choice(dtypes)
    drawn.words.append(f"({batch}, {heads} x {groups}, {rows} to {keys}, {depth}, {width}) {dtype}")
    q = _strided(drawn, batch, heads * groups, rows, depth).to(dtype)
    k, v = (_strided(drawn, batch, heads, keys, size).to(dtype) for size in (depth, width))
    shape = (batch, heads * groups, rows, keys)
    share = drawn.choose("heads", "repeated", "expanded") if groups > 1 else ""
    rule = [_scores(drawn, shape) for _ in range(draw.randint(0, 3))]
    mask = _mask(drawn, shape, draw.choice((0, 1, 1, 2))) if draw.random() < 0.7 and keys else None
    softmax = _softmax(drawn, shape)
    result = drawn.choose("result", "plain", "gated", "merged", "beside")
    gate = drawn.tensor(drawn.normal(batch, heads * groups, rows, width)) if result == "gated" else -1

    def function(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        if share == "repeated":
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        elif share:
            k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1) for x in (k, v))
            k, v = (x.reshape(batch, heads * groups, *x.shape[3:]) for x in (k, v))
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q @ k.transpose(-1, -2)).to(wide) * depth**-0.5
        for step in rule:
            scores = step(scores, i, j, extra)
        if mask is not None:
            scores = scores.masked_fill(mask(i, j, extra), -math.inf)
        found = softmax(scores, v, extra)
        if result == "gated":
            found = found * torch.sigmoid(extra[gate])
        if result == "merged":
            return found.transpose(1, 2).reshape(batch, rows, heads * groups * width)
        return (found, torch.logsumexp(scores, -1)) if result == "beside" else found

    return Program(function, (q, k, v, *drawn.extra), ", ".join(drawn.words))


def _strided(drawn: _Drawn, *shape: int) -> torch.Tensor:
    """A tensor (B, H, N, D) in one of several orders in memory."""
    batch, heads, rows, depth = shape
    order = drawn.random.choice(("contiguous", "tokens first", "packed", "depth first"))
    if order == "tokens first":
        return drawn.normal(batch, rows, heads, depth).transpose(1, 2)
    if order == "packed":
        return drawn.normal(batch, rows, 3, heads, depth)[:, :, 1].transpose(1, 2)
    if order == "depth first":
        return drawn.normal(batch, heads, depth, rows).transpose(2, 3)
    return drawn.normal(*shape)


def _scores(drawn: _Drawn, shape: tuple[int, int, int, int]) -> Step:
    batch, heads, rows, keys = shape
    kind = drawn.choose("rule", "factor", "cap", "bias", "slopes", "alternate", "temperature")
    if kind == "factor":
        return lambda s, i, j, extra: s * 0.7
    if kind == "cap":
        return lambda s, i, j, extra: 4 * torch.tanh(s / 4)
    if kind == "alternate":
        return lambda s, i, j, extra: torch.where((i + j) % 3 == 1, s, -s)
    if kind == "slopes":
        slopes = drawn.tensor(drawn.normal(heads) * 0.05)
        return lambda s, i, j, extra: s + extra[slopes][:, None, None] * (j - i)
    if kind == "temperature":
        heat = drawn.tensor(1 + drawn.normal(batch, 1, 1, 1).abs())
        return lambda s, i, j, extra: s / extra[heat]
    sizes = drawn.random.choice(((rows, keys), (heads, 1, keys), (batch, 1, rows, 1), (1, heads, rows, keys), (keys,)))
    bias = drawn.tensor(drawn.normal(*sizes))
    return lambda s, i, j, extra: s + extra[bias]


def _mask(drawn: _Drawn, shape: tuple[int, int, int, int], depth: int) -> Step:
    """What hides scores: True where they are hidden."""
    if depth:
        kind = drawn.choose("mask", "and", "or", "not")
        left = _mask(drawn, shape, depth - 1)
        if kind == "not":
            return lambda i, j, extra: ~left(i, j, extra)
        right = _mask(drawn, shape, depth - 1)
        if kind == "and":
            return lambda i, j, extra: left(i, j, extra) & right(i, j, extra)
        return lambda i, j, extra: left(i, j, extra) | right(i, j, extra)
    batch, heads, rows, keys = shape
    kinds = ("causal", "bottom", "window", "prefix", "dilated", "documents", "lengths", "tensor", "blocks")
    kind = drawn.choose("atom", *kinds)
    if kind == "documents":
        of_row, of_key = (drawn.tensor(torch.arange(size) * 5 // max(size, 1)) for size in (rows, keys))
        return lambda i, j, extra: extra[of_row][:, None] != extra[of_key]
    if kind == "lengths":
        lengths = drawn.tensor(torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=drawn.generator))
        return lambda i, j, extra: j >= extra[lengths]
    if kind == "tensor":
        sizes = drawn.random.choice(((rows, keys), (batch, 1, 1, keys), (heads, rows, keys)))
        hidden = drawn.tensor(drawn.normal(*sizes) > 0.5)
        return lambda i, j, extra: extra[hidden]
    if kind == "blocks":
        table = drawn.tensor(drawn.normal((rows + 15) // 16, (keys + 31) // 32) > 0)
        return lambda i, j, extra: extra[table][i // 16, j // 32]
    number = drawn.random.randint(1, 40)
    rest = keys - rows
    return {
        "causal": lambda i, j, extra: j > i,
        "bottom": lambda i, j, extra: j > i + rest,
        "window": lambda i, j, extra: (i - j > number) | (j > i),
        "prefix": lambda i, j, extra: (j > i) & (j >= number),
        "dilated": lambda i, j, extra: (i - j) % 3 != 0,
    }[kind]


def _softmax(drawn: _Drawn, shape: tuple[int, int, int, int]) -> Step:
    batch, heads, rows, keys = shape
    forms = ("torch", "logarithm", "sum", "sink", "factors") if keys else ("torch",)
    form = drawn.choose("softmax", *forms)
    if form == "logarithm":
        return lambda s, v, extra: torch.log_softmax(s, -1).exp().to(v.dtype) @ v
    if form == "sum":

        def by_sum(s: Any, v: Any, extra: Any) -> Any:
            powers = torch.exp(s - s.amax(-1, keepdim=True))
            return (powers.to(v.dtype) @ v) / powers.sum(-1, keepdim=True)

        return by_sum
    if form == "sink":
        sinks = drawn.tensor(drawn.normal(heads))

        def with_sink(s: Any, v: Any, extra: Any) -> Any:
            sink = extra[sinks].to(s.dtype).reshape(1, -1, 1, 1).expand(batch, -1, rows, 1)
            return torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1].to(v.dtype) @ v

        return with_sink
    if form == "factors":
        factors = drawn.tensor(torch.rand(batch, 1, 1, keys, generator=drawn.generator))
        return lambda s, v, extra: (torch.softmax(s, -1) * extra[factors]).to(v.dtype) @ v
    return lambda s, v, extra: torch.softmax(s, -1).to(v.dtype) @ v
