"""Grouped products of mixtures of experts on a GPU, beside ``torch._grouped_mm``: values against float64, and times.

    python -m bench.grouped OUTPUT.json --seconds 80

Rows go to experts by a Zipf law whose exponent is drawn (0 is even). Times are of calls in one CUDA graph over weights
that no L2 cache holds; a row has the slowest and the fastest of the dialects beside torch's product of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.measurement import made
from bench.prebuild import compile_each
from bench.timing import graph_seconds

SHAPES = {"mixtral": (8, 2, 4096, 14336), "qwen3-30b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
"""Experts, experts of a token, K and N of one projection."""
TOKENS = (1, 16, 64, 300, 1000, 4096)
EXPONENTS = (0.0, 0.8, 1.2)
COPIED_BYTES = 200e6


def product(x: Any, weight: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, weight.transpose(-2, -1), ends)


def function_of(backend: str) -> Any:
    return jitgen.jit(backend=backend)(product)


def compiled(backend: str, format: str | None, shape: str, tokens: int) -> str:
    """Compiles one kernel into the store; what went wrong, or nothing."""
    experts, chosen, length, columns = SHAPES[shape]
    spec = jitgen.TensorSpec(
        (experts, columns, length), torch.bfloat16, format=format, group_size=128 if format else None
    )
    x = jitgen.TensorSpec((tokens * chosen, length), torch.bfloat16)
    if length % 128 and format:
        return ""
    try:
        ends = jitgen.TensorSpec((experts,), torch.int32)
        function_of(backend).lower(x, spec, ends, target="sm_90a", backend=backend).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def routed(source: random.Random, experts: int, rows: int, chosen: int) -> list[int]:
    """The ends of the experts' rows."""
    exponent = source.choice(EXPONENTS)
    weights = [1 / (rank + 1) ** exponent for rank in range(experts)]
    source.shuffle(weights)
    counts = [0] * experts
    for _ in range(rows // chosen):
        keys = [source.random() ** (1 / weight) for weight in weights]
        for expert in sorted(range(experts), key=keys.__getitem__)[-chosen:]:
            counts[expert] += 1
    return [sum(counts[: number + 1]) for number in range(experts)]


def measured(shape: str, tokens: int, format: str | None, source: random.Random) -> dict[str, Any]:
    experts, chosen, length, columns = SHAPES[shape]
    rows, generator = tokens * chosen, torch.Generator("cuda").manual_seed(tokens)
    dense = torch.randn(experts, columns, length, device="cuda", generator=generator, dtype=torch.bfloat16) * 0.02
    weight: Any = jitgen.quantize(dense, format, 128) if format else dense
    x = torch.randn(rows, length, device="cuda", generator=generator, dtype=torch.bfloat16)
    ends = routed(source, experts, rows, chosen)
    offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    found: dict[str, Any] = {"shape": shape, "tokens": tokens, "format": format, "most": max(counts)}
    functions = {name: function_of(name) for name in ("cuda", "triton")}
    calls: dict[str, Any] = {name: partial(made, x, weight, offsets) for name, made in functions.items()}
    exact = weight.dequantize(torch.bfloat16) if format else dense
    calls["torch bf16"] = partial(product, x, dense, offsets)
    for name, call in calls.items():
        try:
            if name != "torch bf16":
                result, first = call(), 0
                worst = 0.0
                for expert in sorted(range(experts), key=counts.__getitem__)[-3:]:
                    first = ends[expert - 1] if expert else 0
                    wanted = x[first : ends[expert]].double() @ exact[expert].double().T
                    if wanted.numel():
                        worst = max(worst, ((result[first : ends[expert]] - wanted).norm() / wanted.norm()).item())
                found[f"{name} error"] = worst
                assert torch.equal(result, call()), "other bits"
            found[name] = graph_seconds([call]) * 1e6
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    used = sum(count > 0 for count in counts)
    best = [value for key, value in found.items() if key in ("cuda", "triton") and isinstance(value, float)]
    if best:
        found["TFLOP/s"] = 2e-6 * rows * length * columns / min(best)
        found["TB/s"] = 1e-6 * used * columns * length * (0.5156 if format else 2) / min(best)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=37001)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b", "mixtral"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--formats", nargs="*", default=["dense", "int4"], choices=["dense", "int4"])
    options = parser.parse_args()
    started, source = time.time(), random.Random(options.seed)
    formats = [None if name == "dense" else name for name in options.formats]
    jobs = [(s, t, f) for t in options.tokens for f in formats for s in options.shapes]
    sources = [(b, f, s, t) for s, t, f in jobs for b in ("cuda", "triton")]
    compile_each(compiled, sources)
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    results = []
    with torch.no_grad():
        for job in jobs:
            if time.time() - started > options.seconds:
                break
            results.append(measured(*job, source))
            print(json.dumps(results[-1]), flush=True)
            options.output.write_text(json.dumps(made("bench.grouped") | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
