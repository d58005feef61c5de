"""Routing of a mixture of experts on a GPU: from the router's logits to weights, order, ranks and ends of experts.

    python -m bench.routing OUTPUT.json --seconds 20

Times are of ``CALLS`` calls in one CUDA graph, of other logits each, in microseconds a call, beside the same by eager
torch. Logits are float32 and differ, so that there is one right order; some experts are favoured by a Zipf law.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.experts import routed
from bench.measurement import made
from bench.prebuild import compile_each
from bench.timing import graph_seconds

SHAPES = {"mixtral": (8, 2), "gpt-oss-20b": (32, 4), "qwen3-30b": (128, 8), "deepseek-v3": (256, 8)}
"""Experts, and experts of a token."""
TOKENS = (1, 4, 16, 64, 300, 1000, 4096, 16384)
EXPONENTS = (0.0, 1.2)
CALLS = 8


def function_of(backend: str, chosen: int) -> Any:
    run = partial(routed, chosen=chosen)
    return jitgen.jit(backend=backend)(lambda logits: run(logits))


def compiled(backend: str, shape: str, tokens: int) -> str:
    """Compiles the kernels into the store; what went wrong, or nothing."""
    experts, chosen = SHAPES[shape]
    logits = jitgen.TensorSpec((tokens, experts), torch.float32)
    try:
        function_of(backend, chosen).lower(logits, target="sm_90a", backend=backend).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def is_right(found: Any, logits: torch.Tensor, chosen: int) -> bool:
    """Whether order, ranks and ends are those of a stable sort, and weights near those of float64."""
    weights, order, ranks, ends = found
    exact, ids = torch.topk(torch.softmax(logits.double(), -1), chosen, -1)
    exact = (exact / exact.sum(-1, keepdim=True)).reshape(-1)
    wanted = torch.sort(ids.reshape(-1), stable=True)[1]
    counts = torch.bincount(ids.reshape(-1), minlength=logits.shape[1])
    places = torch.arange(order.shape[0], device=order.device)
    return (
        torch.equal(order, wanted)
        and torch.equal(ranks[order], places)
        and torch.equal(ends.long(), counts.cumsum(0))
        and torch.allclose(weights.double(), exact, rtol=1e-5, atol=1e-7)
    )


def measured(shape: str, tokens: int, exponent: float, backends: list[str]) -> dict[str, Any]:
    experts, chosen = SHAPES[shape]
    favour = -exponent * torch.log(1.0 + torch.randperm(experts, device="cuda").float())
    logits = [torch.randn(tokens, experts, device="cuda") + favour for _ in range(CALLS)]
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "zipf": exponent}
    for backend in backends:
        try:
            run = function_of(backend, chosen)
            first = run(logits[0])
            row[f"{backend} right"] = is_right(first, logits[0], chosen)
            row[f"{backend} same bits"] = all(map(torch.equal, first, run(logits[0])))
            row[f"{backend} kernels"] = len(run.bind(logits[0]).kernels)
            row[backend] = graph_seconds([partial(run, each) for each in logits]) * 1e6
        except Exception as error:
            row[backend] = f"{type(error).__name__}: {str(error)[:200]}"
    if exponent == EXPONENTS[0]:
        row["torch"] = graph_seconds([partial(routed, each, chosen) for each in logits]) * 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--exponents", nargs="*", type=float, default=EXPONENTS)
    parser.add_argument("--backends", nargs="*", default=["cuda"], choices=["cuda", "triton"])
    options = parser.parse_args()
    started = time.time()
    compile_each(compiled, list(itertools.product(options.backends, options.shapes, options.tokens)))
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    torch.manual_seed(37)
    results: list[dict[str, Any]] = []
    for shape, tokens, exponent in itertools.product(options.shapes, options.tokens, options.exponents):
        if time.time() - started > options.seconds:
            break
        results.append(measured(shape, tokens, exponent, options.backends))
        options.output.write_text(json.dumps(made("bench.routing") | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
