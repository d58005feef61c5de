"""Two chains of element operations, each one generated kernel: the whole way from a Python function to a launch.

Run:   python examples/01_double_square.py
Shows: the generated source; what a first call costs and a warm one, beside eager torch; what was compiled and what
       came from the store. Run it again: nothing is compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (4096, 4096)


@jitgen.jit
def double_square(x: torch.Tensor) -> torch.Tensor:
    square = x * x
    return square * square


@jitgen.jit
def five_operations(x: torch.Tensor) -> torch.Tensor:
    return (x * 1.1 + 0.3).relu() * x - 0.5


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def warm(*calls: Callable[[], object]) -> list[float]:
    """Median seconds of each, taken in turn."""
    samples = [[seconds(call) for call in calls] for _ in range(20)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def main() -> None:
    compiled: list[jitgen.CompileEvent] = []
    jitgen.on_compile(compiled.append)
    x = torch.randn(SHAPE, dtype=torch.bfloat16, device=DEVICE)
    for function in (double_square, five_operations):
        print(f"\n==== {function.name} on {DEVICE}, {x.dtype} {tuple(x.shape)}\n")
        print(function.source(x))
        before = len(compiled)
        first = seconds(lambda f=function: f(x))
        origin = f"compiled by {compiled[-1].compiler}" if len(compiled) > before else "came from the store"
        generated, eager = warm(lambda f=function: f(x), lambda f=function: f.reference(x))
        exact = function.reference(x.double())
        error = torch.linalg.vector_norm(function(x).double() - exact) / torch.linalg.vector_norm(exact)
        print(f"first call   {first * 1e3:8.2f} ms   its kernel {origin}")
        print(f"warm call    {generated * 1e3:8.3f} ms   error against float64 {error:.1e}")
        print(f"eager torch  {eager * 1e3:8.3f} ms   {eager / generated:.2f} times as long")
    if compiled:
        print(f"\n{len(compiled)} kernels compiled. Run this again: they come from the store.")
    else:
        print("\nNothing was compiled: both kernels came from the store (`jitgen cache ls` shows it).")


if __name__ == "__main__":
    main()
