"""Times products with an epilogue beside bare ones of the same sizes, on this GPU.

::

    python -m bench.epilogues docs/measured/h100-epilogues.json

Calls are CUDA graphs over copies of the weights that exceed the cache, in turn, and every result is compared with
float64. A row of the output has microseconds of the bare product, of the product with bias and gelu, of that with a
factor of each column and a residual too, of SwiGLU, of a bare product of as many columns as its two weights have
together (``wide``), and of torch's F.linear of a dense weight.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import made, relative_error
from bench.prebuild import Build, gpu_target, prebuild
from bench.products import linear, swiglu
from bench.records import write
from bench.timing import medians

ROWS = (1, 16, 100, 300, 777, 2048)
SHAPES = ((4096, 4096), (14336, 4096))
FORMATS = (None, "int4")
CACHED_BYTES = 2**28
"""Bytes after which a copy of the weights is certainly not in the second-level cache any more."""
BUDGET = 0.02
"""Seconds of timing for each case."""


def biased(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(F.linear(x, w, b))


def residual(x: Any, w: Any, b: Any, s: Any, r: Any) -> Any:
    return F.gelu(F.linear(x, w, b)) * s + r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", help="the commit to record, of a copy that is not a git checkout")
    options = parser.parse_args()
    cases = [(format, rows, *shape) for format in FORMATS for rows in ROWS for shape in SHAPES]
    half, target = torch.bfloat16, gpu_target()
    builds = []
    for format, rows, columns, length in cases:
        x = jitgen.TensorSpec((rows, length), half)
        w = jitgen.TensorSpec((columns, length), half, format=format, group_size=128 if format else None)
        wide = jitgen.TensorSpec((2 * columns, length), half, format=format, group_size=128 if format else None)
        row, result = jitgen.TensorSpec((columns,), half), jitgen.TensorSpec((rows, columns), half)
        builds += [
            Build(linear, (x, w), "cuda", target),
            Build(biased, (x, w, row), "cuda", target),
            Build(residual, (x, w, row, row, result), "cuda", target),
            Build(linear, (x, wide), "cuda", target),
            Build(swiglu, (x, w, w), "cuda", target),
        ]
    prebuild(builds)
    results: list[Any] = []
    for case in cases:
        results.append(dict(zip(("format", "rows", "columns", "length"), case, strict=True)) | measured(*case))
        print(results[-1], flush=True)
        write(options.output, made("bench.epilogues", options.commit) | {"rows": results})
    for format in FORMATS:
        for name, bare in (("biased", "linear"), ("residual", "linear"), ("swiglu", "wide")):
            ratios = [row["us"][name] / row["us"][bare] for row in results if row["format"] == format]
            print(
                format or "dense", name, f"{geometric_mean(ratios):.3f} of the bare product, {max(ratios):.3f} at most"
            )


def measured(format: str | None, rows: int, columns: int, length: int) -> dict[str, Any]:
    """The microseconds of the subjects, and the largest relative error."""
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x, r = torch.randn(rows, length, **half), torch.randn(rows, columns, **half)
    b, s = torch.randn(columns, **half), torch.randn(columns, **half)
    gates, ups, wides = (weights(format, count, length) for count in (columns, columns, 2 * columns))
    product, other = (x.double() @ float64(w[0]).t() for w in (gates, ups))
    wanted = {"linear": product, "biased": F.gelu(product + b.double()), "swiglu": F.silu(product) * other}
    wanted["residual"] = wanted["biased"] * s.double() + r.double()
    operands: dict[str, tuple[Any, list[Any]]] = {
        "linear": (linear, [(w,) for w in gates]),
        "biased": (biased, [(w, b) for w in gates]),
        "residual": (residual, [(w, b, s, r) for w in gates]),
        "wide": (linear, [(w,) for w in wides]),
        "swiglu": (swiglu, list(zip(gates, ups, strict=True))),
    }
    denses = [w.dequantize(torch.bfloat16) if format else w.clone() for w in gates]
    subjects: dict[str, Any] = {"torch": [partial(F.linear, x, each) for each in denses]}
    error = 0.0
    for name, (function, sets) in operands.items():
        plan = jitgen.jit(backend="cuda")(function).bind(x, *sets[0])
        out = torch.full((rows, columns * (1 + (name == "wide"))), float("nan"), **half)
        subjects[name] = [partial(plan, x, *each, out=out) for each in sets]
        plan(x, *sets[0], out=out)
        if name in wanted:
            error = max(error, relative_error(out, wanted[name]))
    times = medians(subjects, "cuda", BUDGET)
    return {"us": {name: round(seconds * 1e6, 3) for name, seconds in times.items()}, "error": error}


def weights(format: str | None, columns: int, length: int) -> list[Any]:
    """Copies of a weight, which together exceed the cache."""
    whole = torch.randn(columns, length, device="cuda") / length**0.5
    w: Any = jitgen.quantize(whole, format, 128, layout="mma") if format else whole.to(torch.bfloat16)
    return [w, *(w.clone() for _ in range(max(1, min(15, CACHED_BYTES // (columns * length * 2)))))]


def float64(w: Any) -> torch.Tensor:
    exact: torch.Tensor = w.dequantize(torch.float64) if isinstance(w, jitgen.QTensor) else w.double()
    return exact


if __name__ == "__main__":
    main()
