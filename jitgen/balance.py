"""Compares a plan's kernels, the bytes they move and the operations they do, with the least that the function needs
(``ir/least.py``). ``explain()`` ends with it, and ``jitgen.report`` sums it over a model.

The least counts nodes as they were traced. Where rewrites found less to do, such as adding zeros, a ratio is below 1
and is told as 1: the plan is the least then. A ratio below 1 without such a rewrite is a kernel that counts too little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Balance:
    """Counts what the kernels of one call amount to.

    Attributes:
        kernels: launched.
        moved: bytes that they read and write, each kernel each once.
        flops: operations that they do, without those that only choose elements.
        least_moved: bytes that the function needs: each input read once, each result written once.
        least_flops: operations that it needs: each value computed once.
    """

    kernels: int = 0
    moved: int = 0
    flops: int = 0
    least_moved: int = 0
    least_flops: int = 0

    @property
    def bytes_ratio(self) -> float:
        """Returns the bytes moved, in units of the least; 1 if nothing is needed."""
        return self.moved / self.least_moved if self.least_moved else 1.0

    @property
    def operations_ratio(self) -> float:
        """Returns the operations, in units of the least; 1 if none is needed."""
        return self.flops / self.least_flops if self.least_flops else 1.0

    def __add__(self, other: Balance) -> Balance:
        return Balance(
            self.kernels + other.kernels,
            self.moved + other.moved,
            self.flops + other.flops,
            self.least_moved + other.least_moved,
            self.least_flops + other.least_flops,
        )

    def __mul__(self, count: int) -> Balance:
        """Returns the balance of ``count`` such calls."""
        numbers = (self.kernels, self.moved, self.flops, self.least_moved, self.least_flops)
        return Balance(*(count * number for number in numbers))

    def __str__(self) -> str:
        return (
            f"{self.kernels} kernel{'s' * (self.kernels != 1)}; "
            f"{_in_units(self.moved)}B moved, {max(self.bytes_ratio, 1.0):.2f} of the least; "
            f"{_in_units(self.flops)}FLOP, {max(self.operations_ratio, 1.0):.2f} of the least"
        )


def _in_units(number: int) -> str:
    """Returns ``number`` with three digits and the prefix of its unit: ``"34.4 G"``."""
    scaled, prefix = float(number), ""
    for larger in "kMGTPE":
        if scaled < 999.5:
            break
        scaled, prefix = scaled / 1000, larger
    return f"{scaled:.3g} {prefix}"
