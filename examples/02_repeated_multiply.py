"""r multiplies on every element, one generated kernel for each r: from bound by memory to bound by arithmetic.

Run:   python examples/02_repeated_multiply.py [PLOT.png]     (the plot needs `pip install 'jitgen[bench]'`)
Shows: a captured number (r) guarded at every call and unrolled into the kernel: time stays that of the memory until
       arithmetic takes over, where eager torch takes r passes.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import torch

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def multiply(repeats: int) -> jitgen.JitFunction:
    @jitgen.jit
    def repeated(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(repeats):
            y = y * x
        return y

    return repeated


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(rounds))


def main() -> None:
    x = 1 + 0.001 * torch.randn(2**24 if DEVICE == "cuda" else 2**21, device=DEVICE)
    out = torch.empty_like(x)
    rows = []
    print(f"{DEVICE}, float32, {x.numel()} elements\n   r        ms      GB/s   GFLOP/s   eager ms")
    for repeats in REPEATS:
        function = multiply(repeats)
        plan = function.bind(x)
        torch.testing.assert_close(plan(x, out=out), function.reference(x), rtol=1e-4, atol=0)
        generated = median_seconds(lambda plan=plan: plan(x, out=out), 15)
        eager = median_seconds(lambda f=function: f.reference(x), 3)
        rows.append((repeats, generated, eager))
        rates = f"{2 * x.nbytes / generated / 1e9:9.1f} {repeats * x.numel() / generated / 1e9:9.1f}"
        print(f"{repeats:4d} {generated * 1e3:9.3f} {rates} {eager * 1e3:10.2f}")
    if len(sys.argv) > 1:
        plot(rows, x.numel(), sys.argv[1])


def plot(rows: list[tuple[int, float, float]], elements: int, path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: pip install 'jitgen[bench]' brings matplotlib")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    repeats = [row[0] for row in rows]
    for column, label in ((1, "jitgen"), (2, "eager torch")):
        axes.loglog(repeats, [row[0] * elements / row[column] / 1e9 for row in rows], "o-", label=label)
    axes.set(xlabel="multiplies per element", ylabel="GFLOP/s", title=f"{elements} float32 elements, {DEVICE}")
    axes.legend()
    figure.savefig(path)
    print(f"plot in {path}")


if __name__ == "__main__":
    main()
