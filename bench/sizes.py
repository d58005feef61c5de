"""Random sizes, so that no figure holds only for the sizes that something was tuned for.

Each draw reads the generator in a fixed order, so that a seed in a record or a docstring draws the same sizes again.
"""

from __future__ import annotations

import math
import random

ROUND = 256
"""Half of the sides of a product are rounded to multiples of this."""


def log_uniform(source: random.Random, least: float, most: float) -> float:
    """Draws a number between ``least`` and ``most``, uniformly on a logarithmic scale."""
    return math.exp(source.uniform(math.log(least), math.log(most)))


def side(source: random.Random, unit: int, least: int = 64, most: int = 60_000) -> int:
    """Draws N or K of a product: half of them are multiples of ``ROUND``, the others an odd multiple of ``unit``."""
    size = log_uniform(source, least, most)
    if source.random() < 0.5:
        return max(1, round(size / ROUND)) * ROUND
    return unit * (2 * int(size / (2 * unit)) + 1)
