"""Softmax: one kernel over each row, however long it is.

Run:   python examples/05_softmax.py
Shows: rows from 1 to 152064 elements against float64 and beside eager torch; a row of -inf is NaN, as in torch; a mask
       and a scale in front, and several results of one row, join the kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@jitgen.jit
def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


@jitgen.jit
def masked(x: torch.Tensor, keep: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.where(keep, x * scale, float("-inf"))
    return torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)


def medians(*calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, taken in turn."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(10):
        for times, call in zip(samples, calls, strict=True):
            started = time.perf_counter()
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) * 1e3 for times in samples]


def main() -> None:
    compiled: list[jitgen.CompileEvent] = []
    jitgen.on_compile(compiled.append)
    print("     rows x length       jitgen      eager   error against float64   compiled so far")
    for rows, length in ((4096, 1), (4096, 31), (4096, 1024), (512, 4097), (64, 32768), (16, 152064)):
        x = torch.randn(rows, length, device=DEVICE).bfloat16()
        exact = softmax.reference(x.double())
        error = float((softmax(x).double() - exact).norm() / exact.norm())
        own, eager = medians(lambda x=x: softmax(x), lambda x=x: softmax.reference(x))
        print(f"  {rows:6d} x {length:6d}   {own:8.3f} ms {eager:8.3f} ms   {error:.1e}   {len(compiled)}")
    assert softmax(torch.full((2, 8), float("-inf"), device=DEVICE)).isnan().all()

    x, keep = torch.randn(64, 1000, device=DEVICE), torch.rand(64, 1000, device=DEVICE) < 0.7
    for result, expected in zip(masked(x, keep, 0.125), masked.reference(x, keep, 0.125), strict=True):
        torch.testing.assert_close(result, expected)
    print(f"\n{masked.lower(x, keep, 0.125).explain()}")


if __name__ == "__main__":
    main()
