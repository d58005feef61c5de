"""Times products of 8-bit codes on a GPU beside torch's: ``python -m bench.byte_products out.json --seed 5``.

M is drawn from 1 to 8192 on a logarithmic scale and not rounded, N and K are odd multiples of 16 (of 128 where scales
are of blocks). Peers are ``_int_mm``, which takes 17 rows at least, and ``_scaled_mm`` with scales of rows and columns
and with those of blocks; products of kind ``fast`` have its ``use_fast_accum`` on both sides. Times are of CUDA graphs
that go round copies of the weights, and rows of each result are compared with float64. With ``--models N`` there are N
sizes with M from 256 to 8192 and N and K of models' layers, which are the same for all kinds. Processes compile for
``--target`` while what they have compiled is measured, and the file is written after every product.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench import records
from bench.measurement import condensed, made
from bench.prebuild import compiling
from bench.sizes import log_uniform
from bench.timing import medians

KINDS = ("int8", "rowwise", "fast", "blocks", "w4a8")
CACHED_BYTES = 2**27
BLOCK = 128
WRONG = 0.02
"""The error of a peer, relative to the norm of the result, from which on it computes something else."""
ROW_RANGES = ((1, 16), (17, 64), (65, 512), (513, 8192))
LAYERS = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),  # Llama-3-8B
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),  # Llama-3-70B
    *((24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),  # DeepSeek-V3
    *((4608, 3584), (37888, 3584), (3584, 18944)),  # Qwen2.5-7B
    *((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),  # Qwen3-32B
)
"""(N, K)."""
COMPARED = 64
"""Rows at the beginning and at the end that are compared."""


def integers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, w.T)


def rowwise(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return ((x.float() @ w.float().T) * s * t).to(torch.bfloat16)


def blocks(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    wide = (x.float().unflatten(-1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(-2)
    weight = w.float().view(w.shape[0] // BLOCK, BLOCK, w.shape[1] // BLOCK, BLOCK) * t[:, None, :, None]
    return (wide @ weight.view(w.shape).T).to(torch.bfloat16)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of int4 weights in groups of 128, with int8 activations that the call quantises."""
    return torch.nn.functional.linear(x, w)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"int8": integers, "rowwise": rowwise, "blocks": blocks}
FUNCTIONS["w4a8"] = linear


def fast(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, w.t(), s, t.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True)


FUNCTIONS["fast"] = fast


def drawn(source: random.Random, kind: str) -> tuple[int, int, int]:
    """(M, N, K)."""
    unit = BLOCK if kind in ("blocks", "w4a8") else 16
    while True:
        rows = int(log_uniform(source, 1, 8193))
        columns, length = (unit * (2 * int(log_uniform(source, 256, 30_000) / (2 * unit)) + 1) for _ in range(2))
        if columns * length <= 3e8 and rows * columns * length <= 1e12:
            return rows, columns, length


def operands(kind: str, rows: int, columns: int, length: int) -> tuple[torch.Tensor, list[Any], list[Any]]:
    """x, copies of the weight, and scales."""
    copies = max(2, min(8, CACHED_BYTES // (columns * length)))

    def codes(count: int) -> torch.Tensor:
        if kind == "int8":
            return torch.randint(-127, 128, (count, length), dtype=torch.int8, device="cuda")
        return torch.randn(count, length, device="cuda").to(torch.float8_e4m3fn)

    scales: list[Any] = []
    if kind == "w4a8":
        x = torch.randn(rows, length, dtype=torch.bfloat16, device="cuda")
        dense = torch.randn(columns, length, dtype=torch.bfloat16, device="cuda")
        weight = jitgen.quantize(dense, "int4", BLOCK, method="absmax", activation="int8")
        return x, [weight, *(weight.clone() for _ in range(copies - 1))], scales
    if kind in ("rowwise", "fast"):
        scales = [torch.rand(rows, 1, device="cuda") + 0.5, torch.rand(columns, device="cuda") + 0.5]
    if kind == "blocks":
        shapes = (length // BLOCK, rows), (columns // BLOCK, length // BLOCK)
        of_rows, of_blocks = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes)
        scales = [of_rows.t(), of_blocks]  # those of rows lie along M, which torch asks for
    return codes(rows), [codes(columns) for _ in range(copies)], scales


def of_models(source: random.Random, count: int) -> list[tuple[int, int, int]]:
    """(M, N, K) of ``count`` products, each layer once before one is drawn again."""
    layers = [layer for _ in range(-(-count // len(LAYERS))) for layer in source.sample(LAYERS, len(LAYERS))]
    return [
        (min(int(log_uniform(source, 256, 8193)), int(1e12 / (columns * length))), columns, length)
        for columns, length in layers[:count]
    ]


def specs_of(kind: str, rows: int, columns: int, length: int, activation: str | None) -> list[Any]:
    """What ``operands`` makes, without a GPU."""
    spec = jitgen.TensorSpec
    if kind == "w4a8":
        weight = spec((columns, length), torch.bfloat16, format="int4", group_size=BLOCK, activation=activation)
        return [spec((rows, length), torch.bfloat16), weight]
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    specs = [spec((rows, length), dtype), spec((columns, length), dtype)]
    if kind in ("rowwise", "fast"):
        specs += [spec((rows, 1), torch.float32), spec((columns,), torch.float32)]
    if kind == "blocks":
        specs.append(spec((rows, length // BLOCK), torch.float32, strides=(1, rows)))
        specs.append(spec((columns // BLOCK, length // BLOCK), torch.float32))
    return specs


def built(target: str, case: tuple[str, int, int, int]) -> str:
    """Compiles a case's kernels into the store, in a process of its own."""
    kind, rows, columns, length = case
    try:
        torch.set_num_threads(1)
        for activation in ("int8", None) if kind == "w4a8" else ("int8",):
            specs = specs_of(kind, rows, columns, length, activation)
            jitgen.jit(backend="cuda")(FUNCTIONS[kind]).lower(*specs, target=target).compile()
    except Exception as error:
        return f"{case}: {error}"[:400]
    return ""


def exact(kind: str, x: torch.Tensor, w: Any, scales: list[torch.Tensor]) -> torch.Tensor:
    if kind == "w4a8":
        step = x.float().abs().amax(-1, keepdim=True) / 127
        return ((x.float() / step).round().double() * step) @ w.dequantize(torch.float64).T
    if kind == "blocks":
        s, t = scales
        x = x.double() * s.double().repeat_interleave(BLOCK, 1)
        return x @ (w.double() * t.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).T
    product = x.double() @ w.double().T
    return product * scales[0].double() * scales[1].double() if scales else product


def compared(rows: torch.Tensor) -> torch.Tensor:
    return rows if len(rows) <= 2 * COMPARED else torch.cat([rows[:COMPARED], rows[-COMPARED:]])


def exact_rows(kind: str, x: torch.Tensor, w: Any, scales: list[torch.Tensor]) -> torch.Tensor:
    """The exact product of the rows that are compared."""
    return exact(kind, compared(x), w, [compared(scales[0]), *scales[1:]] if scales else [])


def peers_of(kind: str, x: torch.Tensor, weights: list[Any], scales: list[torch.Tensor]) -> dict[str, Any]:
    """Calls of torch's products, by name."""
    if kind == "int8":
        padded = x if len(x) > 16 else torch.nn.functional.pad(x, (0, 0, 0, 17 - len(x)))
        return {"_int_mm": [partial(torch._int_mm, padded, w.T) for w in weights]}
    if kind == "w4a8":
        function = jitgen.jit(backend="cuda")(linear)
        return {"jitgen W4A16": [partial(function, x, w.with_activation(None)) for w in weights]}
    multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
    if kind in ("rowwise", "fast"):
        s, t = scales[0], scales[1].view(1, -1)
        name = "_scaled_mm fast" if kind == "fast" else "_scaled_mm"
        return {name: [partial(multiply, x, w.T, s, t, use_fast_accum=kind == "fast") for w in weights]}
    s, t = scales
    of_rows = (s.t().contiguous().t(), torch.nn.functional.pad(s.t(), (0, -s.shape[0] % 4))[:, : s.shape[0]].t())
    of_blocks = (torch.nn.functional.pad(t, (0, -t.shape[1] % 4))[:, : t.shape[1]].t(), t.t(), t.t().contiguous())
    wanted = exact_rows(kind, x, weights[0], scales)
    for row, block in itertools.product(of_rows, of_blocks):  # torch's releases differ in the strides that they take
        with contextlib.suppress(Exception):
            found = compared(multiply(x, weights[0].T, row, block))
            if (found.double() - wanted).norm() <= WRONG * wanted.norm():
                return {"_scaled_mm": [partial(multiply, x, w.T, row, block) for w in weights]}
    return {}


def measured(kind: str, rows: int, columns: int, length: int) -> dict[str, Any]:
    x, weights, scales = operands(kind, rows, columns, length)
    function = jitgen.jit(backend="cuda")(FUNCTIONS[kind])
    found, wanted = compared(function(x, weights[0], *scales)).double(), exact_rows(kind, x, weights[0], scales)
    error = ((found - wanted).norm() / wanted.norm()).item()
    subjects: dict[str, Any] = {"jitgen": [partial(function, x, w, *scales) for w in weights]}
    notes = ""
    for name, calls in peers_of(kind, x, weights, scales).items():
        try:
            result = compared(calls[0]()[:rows]).double()
            off = ((result - wanted).norm() / wanted.norm()).item()
            notes += "" if off < WRONG else f"{name} is off by {off:.2g}; "
            subjects[name] = calls
        except Exception as error_of_peer:
            notes += f"{name}: {error_of_peer}"[:200]
    times = {name: round(seconds * 1e6, 3) for name, seconds in medians(subjects, "cuda", 0.01).items()}
    low = function.lower(x, weights[0], *scales).lowered
    schedule = low.schedules[-1]
    return {
        "kind": kind,
        "rows": rows,
        "columns": columns,
        "length": length,
        "microseconds": times,
        "error": float(f"{error:.3g}"),
        "schedule": str(schedule)[:160],
        "notes": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--shapes", type=int, default=30, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--sizes", nargs="*", default=[], help="rows x columns x length, besides random ones")
    parser.add_argument("--models", type=int, default=0, help="sizes of models' layers, besides random ones")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--seconds", type=float, default=60, help="after which no further case is begun")
    options = parser.parse_args()
    source = random.Random(options.seed)
    cases = [(kind, *drawn(source, kind)) for _ in range(options.shapes) for kind in options.kinds]
    cases += [(kind, *map(int, size.split("x"))) for size in options.sizes for kind in options.kinds]
    models = of_models(source, options.models)
    cases += [(kind, *sizes) for kind in options.kinds for sizes in models]
    results: list[dict[str, Any]] = []
    started = time.time()
    with compiling(built, {case: [(options.target, case)] for case in cases}) as wait_for:
        for case in cases:
            if time.time() - started > options.seconds:
                break
            if not wait_for(case):
                continue
            results.append(measured(*case))
            row = results[-1]
            print(f"{time.time() - started:.1f} s", *case, row["microseconds"], row["error"], row["notes"], flush=True)
            records.write(options.output, made("bench.byte_products") | {"products": results})
            torch.cuda.empty_cache()
    summarise(results)


def summarise(results: list[dict[str, Any]]) -> None:
    """Prints each peer's time as a multiple of jitgen's, by kind and rows."""
    for kind in KINDS:
        for peer in ("_int_mm", "_scaled_mm", "_scaled_mm fast", "jitgen W4A16"):
            for low, high in (*ROW_RANGES, (1, 8192)):
                ratios = [
                    each["microseconds"][peer] / each["microseconds"]["jitgen"]
                    for each in results
                    if each["kind"] == kind and low <= each["rows"] <= high and peer in each["microseconds"]
                    if f"{peer} is off" not in each["notes"]
                ]
                if ratios:
                    print(f"{kind} beside {peer}, {low}-{high} rows: {condensed(ratios)}", flush=True)


if __name__ == "__main__":
    main()
