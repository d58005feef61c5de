"""Computes what a chip can do at most, and where a kernel stands below it: the roofline model (Williams et al., CACM
2009)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitgen.schedule.chips import Chip

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 418, 16, 188
"""Pixels: the edges of the plotted area."""
_LEAST, _MOST = -2, 4
"""Powers of ten of the arithmetic intensities that the plot shows, in FLOP/byte."""


@dataclass(frozen=True)
class Roof:
    """Describes a roof in pixels: its label, the position of that label, and its corners as SVG has them."""

    label: str
    at: tuple[float, float]
    corners: str


@dataclass(frozen=True)
class Roofline:
    """Describes a plot of a chip's two roofs, in pixels, with the ticks of both axes (position, label).

    ``mark`` is where a kernel's intensity meets the upper roof; None where it lies outside of the plot.
    """

    chip: Chip
    roofs: tuple[Roof, ...]
    mark: tuple[float, float] | None
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


def bound(chip: Chip, moved: int, flops: int) -> str:
    """Returns what limits a kernel on ``chip`` that moves ``moved`` bytes and does ``flops`` operations, and its least
    time."""
    amounts = ((moved, chip.bandwidth), (flops, chip.vector), (flops, chip.matrix))
    memory, vector, matrix = (1e6 * amount / rate for amount, rate in amounts)
    if memory >= vector:
        return f"bound by memory: at least {memory:.3g} us"
    if memory >= matrix:
        return f"bound by memory on matrix units (at least {memory:.3g} us), by arithmetic elsewhere ({vector:.3g} us)"
    return f"bound by arithmetic: at least {matrix:.3g} us on matrix units, {vector:.3g} us elsewhere"


def roofline(chip: Chip, moved: int, flops: int) -> Roofline:
    """Returns the plot for a kernel that moves ``moved`` bytes and does ``flops`` operations; both axes are
    logarithmic."""
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
