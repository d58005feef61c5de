"""Blocks of mixtures of experts on a GPU, from the router to the sum, beside the same by eager torch.

    python -m bench.experts OUTPUT.json --seconds 60

A block is what transformers 5 computes with ``_grouped_mm``: router, softmax, top-k, a sort of tokens by their experts,
two grouped products with SwiGLU between, and the weighted sum. Times are of calls in one CUDA graph, in microseconds;
the calls take other tokens each, and copies of the weights in turn, so that no L2 cache holds what a call reads.
``routing`` is what stands before the products, without the router: top-k of a softmax, order, ranks and ends;
``share`` is that of the card's read bandwidth at which the block reads the weights of the experts that tokens choose.
``layers`` are that many blocks, one after another, in one graph: tokens a second of the mixture's part of a model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import jitgen
from bench import measurement
from bench.prebuild import compile_each
from bench.records import end
from bench.timing import graph_seconds

SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "gpt-oss-20b": (32, 4, 2880, 2880)}
"""Experts, experts of a token, the width of the model and of an expert."""
TOKENS = (1, 4, 16, 64, 300, 1000, 4096)
FORMATS = {None: None, "int4": 128, "mxfp4": None}
"""Formats of weights, and their group sizes."""
LAYERS = 4
READ_BYTES = {"NVIDIA H100 80GB HBM3": 2.93e12, "NVIDIA H200": 4.4e12}
"""Read bandwidth in bytes a second, as measured (docs/measured)."""
BYTES = {None: 2.0, "int4": 0.5156, "mxfp4": 0.53125}
COPIED_BYTES = 200e6
"""What the calls of a graph read together at least, where ``COPIES`` of weights are enough."""
COPIES = 4
SETS = 8
"""Choices of tokens, up to ``FEW_TOKENS`` of them."""
FEW_TOKENS = 64


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


def block(x: Any, router: Any, up: Any, down: Any, chosen: int) -> Any:
    weights, order, ranks, ends = routed(F.linear(x, router), chosen)
    gate, value = torch._grouped_mm(x[order // chosen], up.transpose(-2, -1), ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), ends) * weights[order].unsqueeze(-1)
    return rows[ranks].view(x.shape[0], chosen, -1).sum(1).to(x.dtype)


def takes(shape: str, format: str | None) -> bool:
    """Whether the widths of ``shape`` divide into groups of the format."""
    return not any(size % (FORMATS[format] or 32) for size in SHAPES[shape][2:])


def functions(chosen: int) -> tuple[Any, Any]:
    """A block, and its routing alone, as kernels."""
    one, other = partial(block, chosen=chosen), partial(routed, chosen=chosen)
    made = jitgen.jit(backend="cuda")
    return made(lambda x, router, up, down: one(x, router, up, down)), made(lambda logits: other(logits))


def specs(shape: str, tokens: int, format: str | None) -> list[Any]:
    experts, _, width, inner = SHAPES[shape]
    group = FORMATS[format]
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
            logits = jitgen.TensorSpec((tokens, SHAPES[shape][0]), torch.bfloat16)
            routes.lower(logits, target="sm_90a", backend="cuda").compile()
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


@dataclass
class Mixture:
    """Weights of a block: the router's, and copies of the experts' dense ones and of those that jitgen multiplies."""

    router: torch.Tensor
    dense: list[list[torch.Tensor]]
    weights: list[list[Any]]

    @classmethod
    def drawn(cls, shape: str, format: str | None) -> Mixture:
        experts, _, width, inner = SHAPES[shape]
        sizes = (experts, 2 * inner, width), (experts, width, inner)
        dense = [drawn(*size, scale=size[-1] ** -0.5) for size in sizes]
        weights = [
            jitgen.quantize(matrix, format, FORMATS[format], method="absmax") if format else matrix for matrix in dense
        ]
        return cls(drawn(experts, width, scale=width**-0.5), [dense], [weights])

    def copied(self, count: int) -> tuple[list[list[torch.Tensor]], list[list[Any]]]:
        for kept in (self.dense, self.weights):
            kept += [[matrix.clone() for matrix in kept[0]] for _ in range(count - len(kept))]
        return self.dense[:count], self.weights[:count]


def drawn(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device="cuda") * scale).to(torch.bfloat16)


def measured(shape: str, tokens: int, format: str | None, mixture: Mixture) -> dict[str, Any]:
    _, chosen, width, inner = SHAPES[shape]
    sets = SETS if tokens <= FEW_TOKENS else 1
    xs, router = [drawn(tokens, width) for _ in range(sets)], mixture.router
    run, routes = functions(chosen)
    result, logits = run(xs[0], router, *mixture.weights[0]), [F.linear(x, router) for x in xs]
    some = slice(0, 8)
    read = [weight.dequantize(torch.bfloat16) for weight in mixture.weights[0]] if format else mixture.dense[0]
    wanted = exact(xs[0][some], router, read[0], read[1], chosen)
    used = sum(torch.topk(each, chosen, -1)[1].unique().numel() for each in logits) / sets
    bytes_read = used * 3 * width * inner * BYTES[format]
    dense, weights = mixture.copied(min(COPIES, math.ceil(COPIED_BYTES / sets / bytes_read)))
    order = [(number % sets, number % len(dense)) for number in range(max(sets, len(dense)))]
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "format": format}
    row["kernels"] = len(run.lower(xs[0], router, *weights[0]).kernels)
    row["error"] = ((result[some].float() - wanted).norm() / wanted.norm()).item()
    row["block"] = graph_seconds([partial(run, xs[s], router, *weights[w]) for s, w in order]) * 1e6
    blocks = [partial(block, xs[s], router, dense[w][0], dense[w][1], chosen) for s, w in order]
    row["torch bf16 block"] = graph_seconds(blocks) * 1e6
    row["routing"] = graph_seconds([partial(routes, each) for each in logits]) * 1e6
    row["routing kernels"] = len(routes.lower(logits[0]).kernels)
    row["torch routing"] = graph_seconds([partial(routed, each, chosen) for each in logits]) * 1e6
    bandwidth = READ_BYTES.get(torch.cuda.get_device_name())
    if bandwidth is not None:
        row["share"] = bytes_read / (row["block"] * 1e-6) / bandwidth

    def layers(x: torch.Tensor) -> Any:
        for number in range(LAYERS):
            x = x + run(x, router, *weights[number % len(weights)])
        return x

    row["tokens a second of 48 layers"] = tokens / (graph_seconds([partial(layers, x) for x in xs]) * 48 / LAYERS)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    names = [str(format) for format in FORMATS]
    parser.add_argument("--formats", nargs="*", default=names, choices=names)
    options = parser.parse_args()
    started = time.time()
    formats = [format for format in FORMATS if str(format) in options.formats]
    kinds = [(shape, format) for format in formats for shape in options.shapes if takes(shape, format)]
    compile_each(compiled, [(shape, tokens, format) for shape, format in kinds for tokens in options.tokens])
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    torch.manual_seed(37)
    results: list[dict[str, Any]] = []
    with torch.no_grad():
        for shape, format in kinds:
            if time.time() - started > options.seconds:
                break
            mixture = Mixture.drawn(shape, format)
            for tokens in options.tokens:
                if time.time() - started > options.seconds:
                    break
                try:
                    results.append(measured(shape, tokens, format, mixture))
                except Exception as error:
                    failure = f"{type(error).__name__}: {str(error)[:300]}"
                    results.append({"shape": shape, "tokens": tokens, "format": format, "failed": failure})
            del mixture
            torch.cuda.empty_cache()
            print(shape, format, f"{time.time() - started:.0f} s", flush=True)
            record = measurement.made("bench.experts") | {"layers": LAYERS, "results": results}
            options.output.write_text(json.dumps(record, indent=1))
    end(results)


if __name__ == "__main__":
    main()
