"""What a chip can do at most, and where a kernel stands below it: the roofline model (Williams et al., CACM 2009)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitgen.chips import Chip

WIDTH, HEIGHT = 360, 180
_LEFT, _BOTTOM = 40, 30
_LEAST, _MOST = -3, 5
"""Powers of ten of the arithmetic intensities that the plot shows, in FLOP/byte."""


@dataclass(frozen=True)
class Roofline:
    """A plot of a chip's two roofs, in pixels; ``mark`` is where a kernel's intensity meets the upper one."""

    chip: Chip
    roofs: tuple[tuple[str, str], ...]
    mark: tuple[float, float] | None
    ticks: tuple[tuple[float, str], ...]


def bound(chip: Chip, moved: int, flops: int) -> str:
    """What limits a kernel on ``chip`` that moves ``moved`` bytes and does ``flops`` operations, and its least time."""
    amounts = ((moved, chip.bandwidth), (flops, chip.vector), (flops, chip.matrix))
    memory, vector, matrix = (1e6 * amount / rate for amount, rate in amounts)
    if memory >= vector:
        return f"bound by memory: at least {memory:.3g} us"
    if memory >= matrix:
        return f"bound by memory on matrix units (at least {memory:.3g} us), by arithmetic elsewhere ({vector:.3g} us)"
    return f"bound by arithmetic: at least {matrix:.3g} us on matrix units, {vector:.3g} us elsewhere"


def roofline(chip: Chip, moved: int, flops: int) -> Roofline:
    """The plot for a kernel that moves ``moved`` bytes and does ``flops`` operations; both axes are logarithmic."""
    top = math.log10(chip.matrix) + 0.3
    low = math.log10(chip.bandwidth) + _LEAST

    def at(intensity: float, peak: float) -> tuple[float, float]:
        power = math.log10(intensity)
        reached = math.log10(min(peak, intensity * chip.bandwidth))
        x = _LEFT + (power - _LEAST) / (_MOST - _LEAST) * (WIDTH - _LEFT - 10)
        return round(x, 1), round(HEIGHT - _BOTTOM - (reached - low) / (top - low) * (HEIGHT - _BOTTOM - 10), 1)

    roofs = []
    for label, peak in (("float32", chip.vector), ("bfloat16 matrix units", chip.matrix)):
        corners = [at(intensity, peak) for intensity in (10.0**_LEAST, peak / chip.bandwidth, 10.0**_MOST)]
        roofs.append((f"{label}: {peak / 1e12:g} TFLOP/s", " ".join(f"{x},{y}" for x, y in corners)))
    intensity = flops / moved if moved else 0.0
    mark = at(intensity, chip.matrix) if 10.0**_LEAST <= intensity <= 10.0**_MOST else None
    ticks = tuple((at(10.0**power, chip.matrix)[0], f"{10.0**power:g}") for power in range(_LEAST, _MOST + 1, 2))
    return Roofline(chip, tuple(roofs), mark, ticks)
