"""Times the kernels of layers of 8-bit products on a CPU: ``python -m bench.cpu_quantised_results --json OUTPUT``.

A layer is RMSNorm, two products with SwiGLU (or one with GELU) and the product behind them, with int8 activations. The
CPU has four kernels for it, and the third quantises what the products give. A product that quantises its results itself
can gain no more than that kernel with its launch takes beyond the codes, which have to be computed and written in any
case once a row's largest magnitude is known, though by all threads: that is the ``gain`` printed, in the layer's time.

Times are the least of calls, of each kernel within calls of the layer, in seconds, on one thread of the processor
(``time.process_time``): on a machine that others load, too, these depend on them the least. ``codes`` is that of a
kernel that computes codes by known scales.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench import records
from bench.measurement import made
from bench.sizes import log_uniform
from jitgen.runtime import cpu
from jitgen.spec import host_target

LAYERS = ((384, 1536), (896, 4864), (2048, 8192), (4096, 14336))
"""Columns and hidden columns of MiniLM, Qwen2-0.5B, Llama-3.2-1B and Llama-3-8B."""
ROWS = (1, 16, 128, 1000)
GROUP = 128
CALLS = 3
"""Calls of a layer at least."""


def swiglu(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
    y = F.rms_norm(x, gain.shape, gain)
    return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def gelu(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(F.linear(F.rms_norm(x, gain.shape, gain), gate)), down)


@jitgen.jit
def codes(x: torch.Tensor, reciprocals: torch.Tensor) -> torch.Tensor:
    return torch.round(x * reciprocals).to(torch.int8)


def quantised(shape: tuple[int, int], format: str) -> Any:
    group = GROUP if format == "int4" else None
    return jitgen.quantize(torch.randn(shape) * 0.05, format, group, method="absmax", activation="int8")


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_kernels() -> list[float]:
    """Returns a list to which the seconds of each launch are appended, of kernels that are loaded from now on."""
    load, times = cpu.load_packed, list[float]()

    def load_packed(library: str | bytes, entry: str) -> Callable[[bytes], int] | None:
        function = load(library, entry)

        def timed(packed: bytes) -> int:
            assert function is not None
            start = clock()
            status = function(packed)
            times.append(clock() - start)
            return status

        return timed

    cpu.load_packed = load_packed
    return times


def measured(
    layer: Callable[..., Any], weights: list[Any], rows: int, threads: int, times: list[float], seconds: float
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    length = weights[0].shape[1]
    x, gain = torch.randn(rows, length, dtype=torch.bfloat16), torch.rand(length, dtype=torch.bfloat16) + 0.5
    hidden = torch.randn(rows, weights[0].shape[0], dtype=torch.bfloat16)
    reciprocals = torch.rand(rows, 1)
    rounds, wholes = list[list[float]](), list[float]()
    codes(hidden, reciprocals)
    layer(x, gain, *weights)
    end = time.perf_counter() + seconds
    while len(wholes) < CALLS or time.perf_counter() < end:
        times.clear()
        start = clock()
        layer(x, gain, *weights)
        wholes.append(clock() - start)
        codes(hidden, reciprocals)
        rounds.append(times.copy())
    *kernels, last = (min(column) for column in zip(*rounds, strict=True))
    return {"seconds": min(wholes), "kernels": kernels, "codes": last}


def most_gain(result: dict[str, Any]) -> float:
    """Returns the share of a layer's time that one launch less can gain at most."""
    kernels, seconds = result["kernels"], result["seconds"]
    launch = (seconds - sum(kernels)) / len(kernels)
    gain: float = (kernels[2] + launch - result["codes"] / result["threads"]) / seconds
    return gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=54)
    parser.add_argument("--seconds", type=float, default=0.5, help="for the calls of one layer, at least")
    parser.add_argument("--random", type=int, default=3, help="layers of random sizes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    draw = random.Random(arguments.seed)
    sides = [GROUP * round(log_uniform(draw, 256, 6000) / GROUP) for _ in range(2 * arguments.random)]
    sizes = [*LAYERS, *zip(sides[::2], sides[1::2], strict=True)]
    times, results = time_kernels(), list[dict[str, Any]]()
    layers = {layer.__name__: jitgen.jit(layer) for layer in (swiglu, gelu)}
    for (length, hidden), format in itertools.product(sizes, ("int8", "int4")):
        weights = [quantised(shape, format) for shape in ((hidden, length), (hidden, length), (length, hidden))]
        for name, rows, threads in itertools.product(layers, ROWS, arguments.threads):
            one = measured(layers[name], weights, rows, threads, times, arguments.seconds)
            facts: dict[str, Any] = {"layer": name, "format": format, "rows": rows, "length": length, "hidden": hidden}
            results.append({**facts, "threads": threads, **one})
            share, gain = one["kernels"][2] / one["seconds"], most_gain(results[-1])
            print(*facts.values(), threads, f"{1e3 * one['seconds']:.3g} ms {share:.2%}, gain {gain:.2%}", flush=True)
    if arguments.json:
        environment = {
            **made("bench.cpu_quantised_results", device="cpu"),
            "target": str(host_target()),
            "cores": os.cpu_count(),
            "load_average": [round(number, 1) for number in os.getloadavg()],
            "times": "seconds, the least: of a call, and of each kernel within the calls; others used the machine, too",
        }
        records.write(arguments.json, {"environment": environment, "layers": results})


if __name__ == "__main__":
    main()
