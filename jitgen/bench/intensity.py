"""A repeated multiply: r multiplies on every element, from bound by memory (r = 1) to bound by arithmetic (r = 256).

The classic of run-time code generation: no two r are the same kernel, and the loop is unrolled because r is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitgen.bench.measurement import Bench, Measurement
from jitgen.bench.streaming import Case, measure

REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def run(bench: Bench) -> Iterator[Measurement]:
    for repeats in REPEATS if bench.compile_peer else (1, 8, 64):
        yield from measure(repeated_multiply(repeats), torch.float32, bench, "intensity")


def repeated_multiply(repeats: int) -> Case:
    """``x`` to the power of ``repeats`` + 1, one multiply at a time."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(repeats):
            y = y * x
        return y

    def eager(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, x, out=out)
        for _ in range(repeats - 1):
            out.mul_(x)

    return Case(f"multiply {repeats}x", function, eager, near_one, flops=repeats)


def near_one(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Numbers whose high powers are numbers: neither infinite nor denormal."""
    return (1 + 0.001 * torch.randn(elements, dtype=dtype, device=device),)
