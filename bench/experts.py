"""Blocks of mixtures of experts on a GPU, from the router to the sum, beside the same by eager torch.

    python -m bench.experts OUTPUT.json --seconds 60

A block is what transformers 5 computes with ``_grouped_mm``: router, softmax, top-k, a sort of tokens by their experts,
two grouped products with SwiGLU between, and the weighted sum. Times are of calls in one CUDA graph, in microseconds,
over weights that no L2 cache holds. ``routing`` is the block without products, from logits to a sum of narrow rows;
``share`` is that of the card's read bandwidth at which the block reads the weights of the experts that tokens choose.
``layers`` are that many blocks, one after another, in one graph: tokens a second of the mixture's part of a model.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import jitgen
from bench import measurement
from bench.prebuild import compile_each
from bench.timing import graph_seconds

SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336)}
"""Experts, experts of a token, the width of the model and of an expert."""
TOKENS = (1, 16, 64, 300, 1000, 4096)
FORMATS = (None, "int4")
LAYERS = 4
NARROW = 16
"""Columns of the rows that ``routing`` adds up."""
READ_BYTES = {"NVIDIA H100 80GB HBM3": 2.93e12, "NVIDIA H200": 4.4e12}
"""Read bandwidth in bytes a second, as measured (docs/measured)."""
BYTES = {None: 2.0, "int4": 0.5156}


def routed(logits: Any, chosen: int) -> Any:
    """Experts' weights of tokens, the order of tokens by experts, where each went, and the ends of experts."""
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float), chosen, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype).reshape(-1)
    experts = logits.shape[1]
    ordered, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(ordered.int(), bins=experts, min=0, max=experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0], device=order.device)
    return weights, order, ranks, ends


def routing(logits: Any, rows: Any, chosen: int) -> Any:
    """The same, and the weighted sum of narrow rows in place of those that experts compute."""
    weights, order, ranks, ends = routed(logits, chosen)
    rows = (rows * weights[order].unsqueeze(-1))[ranks]
    return order, ends, rows.view(logits.shape[0], chosen, -1).sum(1)


def block(x: Any, router: Any, up: Any, down: Any, chosen: int) -> Any:
    weights, order, ranks, ends = routed(F.linear(x, router), chosen)
    gate, value = torch._grouped_mm(x[order // chosen], up.transpose(-2, -1), ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), ends) * weights[order].unsqueeze(-1)
    return rows[ranks].view(x.shape[0], chosen, -1).sum(1).to(x.dtype)


def functions(chosen: int) -> tuple[Any, Any]:
    """A block, and its routing alone, as kernels."""
    one, other = partial(block, chosen=chosen), partial(routing, chosen=chosen)
    made = jitgen.jit(backend="cuda")
    return made(lambda x, router, up, down: one(x, router, up, down)), made(lambda logits, rows: other(logits, rows))


def specs(shape: str, tokens: int, format: str | None) -> list[Any]:
    experts, _, width, inner = SHAPES[shape]
    group = 128 if format else None
    dense = [(tokens, width), (experts, width)]
    matrices = [(experts, 2 * inner, width), (experts, width, inner)]
    return [jitgen.TensorSpec(size, torch.bfloat16) for size in dense] + [
        jitgen.TensorSpec(size, torch.bfloat16, format=format, group_size=group) for size in matrices
    ]


def compiled(shape: str, tokens: int, format: str | None) -> str:
    """Compiles the kernels of a block into the store; what went wrong, or nothing."""
    run, routes = functions(SHAPES[shape][1])
    try:
        run.lower(*specs(shape, tokens, format), target="sm_90a", backend="cuda").compile()
        if format is None:
            sizes = (tokens, SHAPES[shape][0]), (tokens * SHAPES[shape][1], NARROW)
            logits, rows = (jitgen.TensorSpec(size, torch.bfloat16) for size in sizes)
            routes.lower(logits, rows, target="sm_90a", backend="cuda").compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def exact(x: Any, router: Any, up: Any, down: Any, chosen: int) -> Any:
    """The block of float32, for some tokens, by the experts of each; routed by the same rounded logits."""
    weights, ids = torch.topk(torch.softmax(F.linear(x, router), -1, dtype=torch.float), chosen, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype).float()
    result = torch.zeros(x.shape[0], down.shape[1], device=x.device)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, value = F.linear(x[token].float(), up[expert].float()).chunk(2, -1)
            result[token] += weight * F.linear(F.silu(gate) * value, down[expert].float())
    return result


def measured(shape: str, tokens: int, format: str | None) -> dict[str, Any]:
    experts, chosen, width, inner = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(tokens + experts)

    def drawn(*size: int, scale: float = 1.0) -> Any:
        return (torch.randn(*size, device="cuda", generator=generator) * scale).to(torch.bfloat16)

    x, router = drawn(tokens, width), drawn(experts, width, scale=width**-0.5)
    sizes = ((experts, 2 * inner, width), (experts, width, inner))
    dense = [drawn(*size, scale=size[-1] ** -0.5) for size in sizes]
    weights = [jitgen.quantize(matrix, format, 128) if format else matrix for matrix in dense]
    run, routes = functions(chosen)
    result, logits = run(x, router, *weights), F.linear(x, router)
    some = slice(0, 8)
    read = [weight.dequantize(torch.bfloat16) for weight in weights] if format else dense
    wanted = exact(x[some], router, read[0], read[1], chosen)
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "format": format}
    row["kernels"] = len(run.lower(x, router, *weights).kernels)
    row["error"] = ((result[some].float() - wanted).norm() / wanted.norm()).item()
    row["block"] = graph_seconds([partial(run, x, router, *weights)]) * 1e6
    row["torch bf16 block"] = graph_seconds([partial(block, x, router, dense[0], dense[1], chosen)]) * 1e6
    rows = drawn(tokens * chosen, NARROW)
    row["routing"] = graph_seconds([partial(routes, logits, rows)]) * 1e6
    row["routing kernels"] = len(routes.lower(logits, rows).kernels)
    row["torch routing"] = graph_seconds([partial(routing, logits, rows, chosen)]) * 1e6
    used = torch.topk(logits, chosen, -1)[1].unique().numel()
    bandwidth = READ_BYTES.get(torch.cuda.get_device_name())
    if bandwidth is not None:
        row["share"] = used * 3 * width * inner * BYTES[format] / (row["block"] * 1e-6) / bandwidth

    def layers() -> Any:
        y = x
        for _ in range(LAYERS):
            y = y + run(y, router, *weights)
        return y

    row["tokens a second of 48 layers"] = tokens / (graph_seconds([layers]) * 48 / LAYERS)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    options = parser.parse_args()
    started = time.time()
    jobs = [(s, t, f) for s in options.shapes for t in options.tokens for f in FORMATS]
    compile_each(compiled, jobs)
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    results = []
    with torch.no_grad():
        for job in jobs:
            if time.time() - started > options.seconds:
                break
            try:
                results.append(measured(*job))
            except Exception as error:
                results.append({"job": job, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
            print(json.dumps(results[-1]), flush=True)
            record = measurement.made("bench.experts") | {"layers": LAYERS, "results": results}
            options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
