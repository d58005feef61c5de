"""Models how long blocks take that each compute one tile and walk along K, for ``triton_tiles`` and ``simt_tiles``.

A block takes a time of its own, and one for each iteration along K: the latency of an iteration, or what the blocks of
a multiprocessor take together where that is more. A multiprocessor computes its blocks in waves of as many as it holds
at once. No kernel is faster than memory delivers operands and takes results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitgen.schedule.chips import Chip

SAMPLES = 5
"""Numbers of rows of a bucket for which tiles are compared."""
SMOOTH = 4
"""The power of the mean by which the time of blocks and that of memory are combined."""


@dataclass(frozen=True)
class TileTimes:
    """Holds fitted constants of one tile.

    Attributes:
        latency: microseconds of an iteration of one block, at least.
        issue: microseconds of an iteration that a block takes of what the blocks of a multiprocessor share.
        block: microseconds of a block, whatever its K.
        resident: blocks that a multiprocessor holds at once.
    """

    latency: float
    issue: float
    block: float
    resident: int


def microseconds(times: TileTimes, blocks: int, iterations: int, moved: float, chip: Chip) -> float:
    """Estimates the time of ``blocks`` blocks of so many iterations, whose operands and results are ``moved`` bytes."""
    time, left = 0.0, -(-blocks // chip.multiprocessors)
    while left > 0:
        together = min(left, times.resident)
        time += times.block + iterations * math.hypot(times.latency, together * times.issue)
        left -= together
    return float((time**SMOOTH + (moved / chip.reads * 1e6) ** SMOOTH) ** (1 / SMOOTH))


def sampled_rows(fewest: int, most: int, samples: int = SAMPLES) -> list[int]:
    """Returns numbers of rows of a bucket, ``samples`` at most, evenly spaced on a logarithmic scale."""
    return sorted({round(fewest * (most / fewest) ** (i / (samples - 1))) for i in range(samples)})
