"""What a chip can do at most, and where a kernel stands below it: the roofline model (Williams et al., CACM 2009)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitgen.spec import Target


@dataclass(frozen=True)
class Chip:
    """Peak rates of a chip: vendors' figures, without sparsity.

    Attributes:
        name: the vendor's.
        targets: the architectures that run on it, as ``Target.arch`` names them.
        bandwidth: of its memory, in bytes/s.
        vector: of float32 arithmetic outside of the matrix units, in FLOP/s.
        matrix: of bfloat16 products in the matrix units, in FLOP/s.
    """

    name: str
    targets: tuple[str, ...]
    bandwidth: float
    vector: float
    matrix: float

    def bound(self, moved: int, flops: int) -> str:
        """What limits a kernel that moves ``moved`` bytes and does ``flops`` operations, and its least time."""
        memory, vector, matrix = (1e6 * amount / rate for amount, rate in self._amounts(moved, flops))
        if memory >= vector:
            return f"bound by memory: at least {memory:.3g} us"
        if memory >= matrix:
            return (
                f"bound by memory on matrix units (at least {memory:.3g} us), by arithmetic elsewhere ({vector:.3g} us)"
            )
        return f"bound by arithmetic: at least {matrix:.3g} us on matrix units, {vector:.3g} us elsewhere"

    def _amounts(self, moved: int, flops: int) -> tuple[tuple[int, float], ...]:
        return (moved, self.bandwidth), (flops, self.vector), (flops, self.matrix)


CHIPS = (
    Chip("A100 SXM 80 GB", ("sm_80",), 2.039e12, 19.5e12, 312e12),
    Chip("H100 SXM", ("sm_90", "sm_90a"), 3.35e12, 67e12, 989e12),
    Chip("H200 SXM", ("sm_90", "sm_90a"), 4.8e12, 67e12, 989e12),
    Chip("MI300X", ("gfx942",), 5.3e12, 163.4e12, 1307.4e12),
)
"""Chips whose rates are known, from NVIDIA's and AMD's data sheets. One architecture may have several. There is no CPU:
its level (``x86-64-v4``) says nothing of its cores, clock and memory."""


def chips(target: Target) -> tuple[Chip, ...]:
    """The chips of ``target`` whose rates are known."""
    return tuple(chip for chip in CHIPS if target.arch in chip.targets)


WIDTH, HEIGHT = 430, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 420, 16, 188
"""Pixels: the edges of the plotted area."""
_LEAST, _MOST = -2, 4
"""Powers of ten of the arithmetic intensities that the plot shows, in FLOP/byte."""


@dataclass(frozen=True)
class Roof:
    """A roof in pixels: its label, the position of that label, and its corners as SVG has them."""

    label: str
    at: tuple[float, float]
    corners: str


@dataclass(frozen=True)
class Roofline:
    """A plot of a chip's two roofs, in pixels, with the ticks of both axes (position, label).

    ``mark`` is where a kernel's intensity meets the upper roof; None where it lies outside of the plot.
    """

    chip: Chip
    roofs: tuple[Roof, ...]
    mark: tuple[float, float] | None
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


def roofline(chip: Chip, moved: int, flops: int) -> Roofline:
    """The plot for a kernel that moves ``moved`` bytes and does ``flops`` operations; both axes are logarithmic."""
    top = math.log10(chip.matrix) + 0.2
    low = math.log10(chip.bandwidth) + _LEAST

    def height(power: float) -> float:
        return round(BOTTOM - (power - low) / (top - low) * (BOTTOM - TOP), 1)

    def at(intensity: float, peak: float) -> tuple[float, float]:
        x = LEFT + (math.log10(intensity) - _LEAST) / (_MOST - _LEAST) * (RIGHT - LEFT)
        return round(x, 1), height(math.log10(min(peak, intensity * chip.bandwidth)))

    roofs = []
    for label, peak in (("float32", chip.vector), ("bfloat16 matrix units", chip.matrix)):
        corners = [at(intensity, peak) for intensity in (10.0**_LEAST, peak / chip.bandwidth, 10.0**_MOST)]
        text = f"{label}: {peak / 1e12:g} TFLOP/s"
        roofs.append(Roof(text, (RIGHT, corners[-1][1] - 5), " ".join(f"{x},{y}" for x, y in corners)))
    intensity = flops / moved if moved else 0.0
    mark = at(intensity, chip.matrix) if 10.0**_LEAST <= intensity <= 10.0**_MOST else None
    across = tuple((at(10.0**power, chip.matrix)[0], f"{10.0**power:g}") for power in range(_LEAST, _MOST + 1))
    up = tuple((height(power), f"{10.0 ** (power - 12):g}") for power in range(math.ceil(low), math.floor(top) + 1))
    return Roofline(chip, tuple(roofs), mark, across, up)
