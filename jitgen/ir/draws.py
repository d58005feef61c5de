"""Numbers the tensors of random numbers: a call draws a seed and an offset (``symbols.SEED``, ``symbols.OFFSET``), from
which each tensor has an offset of its own."""

from __future__ import annotations

from collections.abc import Iterable

from jitgen.ir import symbols
from jitgen.ir.symbols import Scalar

OFFSETS = 4
"""Offsets from one tensor of random numbers to the next: torch's CUDA generators count in these."""


def offset_of(number: int) -> Scalar:
    """Returns the offset of tensor ``number`` of the random numbers of a call."""
    return symbols.add(symbols.OFFSET, OFFSETS * number)


def offsets_drawn(scalars: Iterable[Scalar]) -> int:
    """Returns by how much kernels with these run-time scalars advance a generator's offset; 0 if they draw nothing."""
    (name,) = symbols.symbols_of(symbols.OFFSET)
    drawn = [scalar for scalar in scalars if name in symbols.symbols_of(scalar)]
    return max((symbols.evaluate(scalar, {name: 0}) + OFFSETS for scalar in drawn), default=0)
