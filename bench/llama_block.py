"""Times a stack of Llama's decoder blocks with random weights: ``python -m bench.llama_block --json llama.json``.

Sizes are those of Llama-3-8B: hidden 4096, heads 32/8 of width 128, MLP 14336, a cache of 1024 keys. The cases are one
new token (decode) and 512 (prefill). The ways are eager torch, torch.compile (Inductor and ``backend="jitgen"``), each
with bfloat16 weights, and eager torch and ``backend="jitgen"`` with int4 weights by ``quantize_``; each also as a CUDA
graph. A figure is milliseconds per call of the whole stack, the median of ``--repeats``; an error is that of the
result beside eager bfloat16, or eager on the dequantised weights, relative and in norm. The JSON file is written after
each figure, so that what was measured stays where a time limit ends the run.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitgen
from bench.measurement import made, relative_error
from bench.records import write
from bench.timing import wall_seconds
from jitgen.dynamo import registration  # noqa: F401 (registers the backend where jitgen is not installed)
from jitgen.runtime.capturing import captured


@dataclass(frozen=True)
class Sizes:
    """Of one decoder block; ``keys``: what a cache holds, in tokens."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    inner: int = 14336
    keys: int = 1024


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Block(nn.Module):
    """One decoder block, as models in plain PyTorch write it, with a static cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        heads, kv = sizes.heads * sizes.width, sizes.kv_heads * sizes.width
        self.input_norm, self.post_norm = (nn.Parameter(torch.ones(sizes.hidden)) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, heads + 2 * kv, bias=False)
        self.out = nn.Linear(heads, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, sizes.kv_heads, sizes.keys, sizes.width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        sizes, tokens = self.sizes, x.shape[1]
        qkv = self.qkv(F.rms_norm(x, (sizes.hidden,), self.input_norm, 1e-5))
        counts = sizes.heads, sizes.kv_heads, sizes.kv_heads
        q, k, v = (
            each.view(1, tokens, count, sizes.width).transpose(1, 2)
            for each, count in zip(qkv.split([count * sizes.width for count in counts], -1), counts, strict=True)
        )
        self.keys.index_copy_(2, places, rotated(k, cos, sin))
        self.values.index_copy_(2, places, v)
        mixed = F.scaled_dot_product_attention(
            rotated(q, cos, sin), self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(1, tokens, -1))
        h = F.rms_norm(x, (sizes.hidden,), self.post_norm, 1e-5)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    def __init__(self, sizes: Sizes, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(sizes) for _ in range(layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin, places, mask)
        return x


def inputs_of(sizes: Sizes, tokens: int, device: str) -> tuple[Tensor, ...]:
    """The hidden states of the last ``tokens`` of a full cache, their rotations, places and mask."""
    places = torch.arange(sizes.keys - tokens, sizes.keys, device=device)
    inverse = 500000.0 ** -(torch.arange(0, sizes.width, 2, device=device) / sizes.width)
    angles = (places[:, None] * inverse).repeat(1, 2)
    mask = torch.arange(sizes.keys, device=device) <= places[:, None]
    x = torch.randn(1, tokens, sizes.hidden, device=device).bfloat16()
    return x, angles.cos().bfloat16(), angles.sin().bfloat16(), places, mask[None, None]


def profile(call: Callable[[], Any]) -> None:
    """Print the kernels of one call that take the most time on the device, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.self_device_time_total > 0]
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:12]:
        print(f"    {row.self_device_time_total:8.1f} us in {row.count:3} of {row.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="sizes of a test: hidden 256, 4 heads")
    parser.add_argument("--without-inductor", action="store_true")
    parser.add_argument("--ways", help="those whose name begins so")
    parser.add_argument("--profile", action="store_true", help="the kernels of one call, by their time on the device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, sizes = options.device, Sizes(256, 4, 2, 64, 512, 128) if options.small else Sizes()
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(sizes, options.layers).bfloat16().eval().requires_grad_(False)
    quantized = copy.deepcopy(model)
    jitgen.quantize_(quantized, "int4", group_size=128 if sizes.hidden % 128 == 0 else 32)
    dense = copy.deepcopy(model)
    for name, layer in quantized.named_modules():
        if isinstance(layer, nn.Linear):
            weight: Any = layer.weight
            dense.get_parameter(f"{name}.weight").copy_(weight.dequantize(torch.bfloat16))
    ways: dict[str, tuple[Any, Any]] = {
        "eager, bf16": (model, model),
        "backend=jitgen, bf16": (torch.compile(model, backend="jitgen"), model),
        "quantize_d eager, int4": (quantized, dense),
        "backend=jitgen, int4": (torch.compile(quantized, backend="jitgen"), dense),
    }
    if not options.without_inductor:
        ways["torch.compile, bf16"] = torch.compile(model), model
    if options.ways:
        ways = {way: found for way, found in ways.items() if way.startswith(options.ways)}
    record = made("bench.llama_block", device=device) | {"layers": options.layers} | asdict(sizes)
    rows: list[dict[str, Any]] = []
    for way, (run, wanted_of) in ways.items():
        for tokens in options.tokens:
            torch._dynamo.config.automatic_dynamic_shapes = False  # each number of tokens is compiled for itself
            inputs = inputs_of(sizes, tokens, device)
            row: dict[str, Any] = {"way": way, "tokens": tokens}
            with torch.no_grad():
                started = time.perf_counter()
                row["error"] = relative_error(run(*inputs), wanted_of(*inputs).double())
                row["first_call_s"] = round(time.perf_counter() - started, 2)
                row["ms"] = wall_seconds(lambda: run(*inputs), device, options.repeats) * 1e3  # noqa: B023
                if device == "cuda":
                    results: list[Tensor] = []
                    graph = captured([lambda: results.append(run(*inputs))])  # noqa: B023
                    row["graph_ms"] = wall_seconds(graph.replay, device, options.repeats) * 1e3
                    row["graph_error"] = relative_error(results[-1], wanted_of(*inputs).double())
                    del graph
            rows.append(row)
            print(*(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
            if options.profile and device == "cuda":
                with torch.no_grad():
                    profile(lambda: run(*inputs))  # noqa: B023
            if options.json:
                write(options.json, record | {"rows": rows})
    print(jitgen.report(model))


if __name__ == "__main__":
    main()
