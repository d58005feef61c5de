"""A repeated multiply: r multiplies of every element, from bound by memory (r = 1) to bound by arithmetic (r = 256).

This is a classic of run-time code generation: each r is a kernel of its own, with the loop unrolled since r is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.measurement import Bench, Measurement
from bench.streaming import Case, measure

REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def run(bench: Bench) -> Iterator[Measurement]:
    for repeats in REPEATS if bench.compile_peer else (1, 8, 64):
        yield from measure(repeated_multiply(repeats), torch.float32, bench, "intensity")


def repeated_multiply(repeats: int) -> Case:
    """The case that computes ``x`` to the power of ``repeats`` + 1, one multiply at a time."""

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
    """Numbers near 1, whose high powers are neither infinite nor denormal."""
    return (1 + 0.001 * torch.randn(elements, dtype=dtype, device=device),)
