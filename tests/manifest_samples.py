"""Calls of every kernel family and every node operation, and the manifests that recording them makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_WEIGHT = torch.randn(24, generator=torch.Generator().manual_seed(0))


def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def moved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t()[::2].flip(0) + 1, x.reshape(-1) * 2, x[1:, None].squeeze(1) - 1, x.transpose(0, 1)


def bits(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(torch.uint8) + 1, (x.bfloat16().view(torch.int16) + 1).view(torch.bfloat16)


def causal(scores: torch.Tensor) -> torch.Tensor:
    return scores.tril().masked_fill(scores > 2, float("-inf"))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def column_sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(0), (x > 0).any(0), x.mean(0)


def largest(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.argmax(-1), x.amax((0, 1)), x.prod(-1, dtype=torch.float64)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (24,), _WEIGHT)


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias))


def quantised(x: torch.Tensor, up: Any, down: Any) -> torch.Tensor:
    return x + F.linear(F.silu(F.linear(x, up)), down)


def transposed(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return F.rms_norm(x @ weight.t(), (32,))


def scaled(x: torch.Tensor, factor: float, count: int) -> torch.Tensor:
    return x * factor / x.shape[0] + (count if count > 2 else factor * float("inf"))


def padded(x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    return F.pad(x, (1, 2)).roll(1, 0) if rows % 2 or rows > 6 else x * 2**rows


def integers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x // y, x & 7, (x << 2).to(torch.uint8), torch.where(x > y, x, y) % 5


def narrowed(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * 3).clamp(-448, 448).to(torch.float8_e4m3fn)


def updated(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(2).add_(y)


def described(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape[0], x.contiguous(), x.contiguous(), torch.zeros(2, x.shape[1])


def running(x: torch.Tensor) -> tuple[Any, ...]:
    return x.cumsum(0), torch.cummax(x, -1), x.logcumsumexp(1)


def noisy(x: torch.Tensor) -> tuple[Any, ...]:
    return F.dropout(x, 0.2), torch.randn_like(x) + torch.rand(x.shape[1])


def ordered(x: torch.Tensor) -> tuple[Any, ...]:
    return torch.topk(x / 2, 3, 0), x.argsort(-1, descending=True), torch.median(x)


def looked_up(ids: torch.Tensor, table: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
    changed = table.index_copy(0, ids, new)
    changed[1:, ids[:1]] = 0
    return F.embedding(ids, table), table[ids, None, -1], changed


def convolved(x: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(x, filters, stride=2, padding=1, groups=2))


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch._grouped_mm(x, weight, offs=ends), torch._grouped_mm(x.T, x, offs=ends)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shared = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return shared * 2


def launched(x: torch.Tensor, factor: float) -> torch.Tensor:
    from tests import own_kernels

    out, rows = torch.empty_like(x), x.shape[0]
    own_kernels.scaled_rows[lambda meta: (rows, meta["PIECES"])](x, out, x.stride(0), x.shape[1], factor, BLOCK=16)
    return out + 1


twice = jitgen.device_function(lambda x: x * 2, cpp="x + x", cuda="x + x", triton="x + x")
copied = jitgen.cpp_kernel(
    "void copied(const float* x, float* out, int n) {\n"
    "  for (int i = 0; i < n; ++i) out[i] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[i], 0, i), 0, i);\n"
    "}\n",
    "copied",
)


def launched_in_c(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    copied(twice(x), out, x.shape[0])
    return torch.relu(out)


CALLS: dict[str, Callable[[], Call]] = {
    "gate": lambda: (gate, (torch.randn(6, 20), torch.randn(20))),
    "gate of one row": lambda: (gate, (torch.randn(1, 20), torch.randn(20))),
    "rope": lambda: (rope, (torch.randn(2, 3, 8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(3, 8).half())),
    "bits": lambda: (bits, (torch.randn(5, 6),)),
    "moved": lambda: (moved, (torch.randn(5, 6),)),
    "causal": lambda: (causal, (torch.randn(7, 9),)),
    "softmax": lambda: (softmax, (torch.randn(6, 40).half(),)),
    "softmax of long rows": lambda: (softmax, (torch.randn(2, 70_000),)),
    "column_sums": lambda: (column_sums, (torch.randn(30, 12),)),
    "largest": lambda: (largest, (torch.randn(3, 4, 10),)),
    "running": lambda: (running, (torch.randn(5, 12),)),
    "noisy": lambda: (noisy, (torch.randn(5, 12),)),
    "ordered": lambda: (ordered, (torch.randn(5, 12),)),
    "looked_up": lambda: (looked_up, (torch.tensor([3, 1]), torch.randn(6, 9), torch.randn(2, 9))),
    "attention": lambda: (attention, (torch.randn(1, 4, 9, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 6))),
    "convolved": lambda: (convolved, (torch.randn(2, 4, 7, 6), torch.randn(6, 2, 3, 3))),
    "grouped": lambda: (
        grouped,
        (torch.randn(8, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16(), torch.tensor([2, 2, 8], dtype=torch.int32)),
    ),
    "launched": lambda: (launched, (torch.randn(5, 20), 0.5)),
    "launched in C++": lambda: (launched_in_c, (torch.randn(20),)),
    "norm": lambda: (norm, (torch.randn(2, 3, 24),)),
    "loss": lambda: (loss, (torch.randn(5, 11), torch.tensor([1, 2, 0, -100, 10]))),
    "dense": lambda: (dense, (torch.randn(5, 32), torch.randn(16, 32), torch.randn(16))),
    "quantised": lambda: (
        quantised,
        (torch.randn(3, 64), *(jitgen.quantize(torch.randn(64, 64), format, 32) for format in ("int4", "uint4"))),
    ),
    "transposed": lambda: (transposed, (torch.randn(3, 48).bfloat16(), jitgen.quantize(torch.randn(32, 48), "int8"))),
    "scaled": lambda: (scaled, (torch.randn(4, 5), 0.5, 3)),
    "scaled by nan": lambda: (scaled, (torch.randn(4, 5), float("nan"), 1)),
    "padded": lambda: (padded, (torch.randn(5, 4),)),
    "padded not": lambda: (padded, (torch.randn(4, 4),)),
    "integers": lambda: (integers, (torch.arange(1, 13).reshape(3, 4), torch.arange(2, 6))),
    "narrowed": lambda: (narrowed, (torch.randn(6, 8).bfloat16(),)),
    "updated": lambda: (updated, (torch.randn(8, 6).t(), torch.randn(6, 8))),
    "described": lambda: (described, (torch.randn(5, 4),)),
    "empty": lambda: (gate, (torch.randn(0, 4), torch.randn(4))),
    "lambda": lambda: (lambda x: x + 1, (torch.tensor(2.0),)),
}
"""Name to a function and arguments it is recorded with."""


def recorded(path: Path, call: Call) -> dict[str, Any]:
    """The manifest of ``call``, written to ``path``. Compiles nothing: it is recorded before it is found missing."""
    function, arguments = call
    with jitgen.record(path), jitgen.strict(), suppress(jitgen.CacheMissError):
        jitgen.jit(function)(*arguments)
    return json.loads(path.read_text())
