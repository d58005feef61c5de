"""Lists tiles of Triton's products of 16-bit x with a dense weight, or one of plain four-bit codes, and models their
times (``tile_times.py``).

The constants were fitted to 1,636 timings of 174 random shapes on an H200 with Triton 3.6 (``bench/schedule_timings.py
--seed 31001 --shapes 45`` and ``--seed 31003 --shapes 70``, of which 42 of each kind were reached; 1 to 8192 rows, N
and K from 64 to 60000; quantised weights are W4A16 with groups of 128). Of what was timed for a shape, that which the
model chooses takes longer than the best, by the geometric mean, and at worst; beside it the rule that there was before:

============  ==================  ==================  ================
rows of x     quantised           dense               the rule before
============  ==================  ==================  ================
1 to 8        2.7 %, 26 %         2.0 %, 10 %         7 % and 66 %
9 to 64       2.6 %, 27 %         3.8 %, 25 %         11 % and 9 %
65 to 512     3.9 %, 65 %         5.5 %, 33 %         98 % and 115 %
513 to 8192   1.8 %, 22 %         7.5 %, 45 %         35 % and 48 %
============  ==================  ==================  ================

A candidate has constants of its own, because what Triton's compiler makes of a tile follows no rule. Where K is split,
a second kernel reads the sums of all ranges (``split_k.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jitgen.families.gemm import tile_times
from jitgen.families.gemm.mainloops import TritonSchedule, TritonSlices, TritonTokens, TritonWeights
from jitgen.families.gemm.tile_times import TileTimes
from jitgen.schedule.chips import Chip

K_SPLITS = (1, 2, 3, 4, 6, 8)
"""Ranges that K may be split into."""
LEAST_ITERATIONS = 4
"""Iterations of the mainloop that each range of K has at least."""
FEW_ROWS = 16
"""Rows of x up to which a tile has as many rows as the bucket."""
SPLIT_ROWS = 512
"""Rows of x up to which K may be split: with more, there are tiles enough."""
MOST_SUMS = 32
"""Partial sums that the second kernel reads at most for an element of its results, of all regions."""


@dataclass(frozen=True)
class TritonFit:
    """Holds the constants of one kind of weight.

    Attributes:
        fixed: microseconds of a kernel.
        sum: microseconds of the second kernel of a split product, and of the launch of it.
        sum_rate: bytes of sums that the first kernel writes and the second reads in a microsecond.
        tiles: the candidates, and what was fitted for each; an iteration is ``block_k`` elements of K.
    """

    fixed: float
    sum: float
    sum_rate: float
    tiles: Mapping[TritonSchedule, TileTimes]


DENSE = TritonFit(
    fixed=0.164,
    sum=1.62,
    sum_rate=5.44e06,
    tiles={
        TritonSlices(1, 16, 64, 4, 4): TileTimes(0.248, 0.02, 0.979, 1),
        TritonSlices(1, 16, 64, 8, 4): TileTimes(0.316, 0.02, 1.39, 1),
        TritonSlices(1, 32, 64, 4, 4): TileTimes(0.318, 0.02, 1.12, 1),
        TritonSlices(1, 32, 64, 8, 4): TileTimes(0.445, 0.02, 1.5, 1),
        TritonSlices(8, 16, 64, 4, 4): TileTimes(0.354, 0.0504, 1.31, 2),
        TritonSlices(8, 16, 64, 8, 4): TileTimes(0.0563, 0.347, 3.77, 3),
        TritonSlices(8, 32, 64, 4, 4): TileTimes(0.366, 0.0247, 1.31, 1),
        TritonSlices(8, 32, 64, 8, 4): TileTimes(0.605, 0.0497, 3.17, 1),
        TritonWeights(8, 64, 128, 4, 5, raster=8): TileTimes(0.284, 0.239, 1.23, 2),
        TritonWeights(8, 128, 64, 4, 5, raster=8): TileTimes(0.056, 0.324, 2.17, 3),
        TritonSlices(16, 16, 64, 4, 4): TileTimes(0.0569, 0.266, 1.46, 2),
        TritonSlices(16, 16, 64, 8, 4): TileTimes(0.416, 0.0497, 2.72, 1),
        TritonSlices(16, 32, 64, 4, 4): TileTimes(0.351, 0.0496, 1.98, 1),
        TritonSlices(16, 32, 64, 8, 4): TileTimes(0.555, 0.101, 4.18, 1),
        TritonWeights(16, 64, 128, 4, 5, raster=8): TileTimes(0.182, 0.0478, 1.6, 1),
        TritonWeights(16, 128, 64, 4, 5, raster=8): TileTimes(0.181, 0.0477, 1.57, 1),
        TritonTokens(64, 64, 64, 4, 5, raster=8): TileTimes(0.225, 0.0941, 1.38, 1),
        TritonTokens(64, 128, 64, 4, 4, raster=8): TileTimes(0.282, 0.192, 1.51, 1),
        TritonTokens(64, 256, 64, 8, 3, raster=8): TileTimes(0.473, 0.473, 2.25, 1),
        TritonWeights(64, 64, 128, 4, 5, raster=8): TileTimes(0.375, 0.212, 1.76, 1),
        TritonWeights(64, 128, 64, 4, 5, raster=8): TileTimes(0.275, 0.19, 1.81, 1),
        TritonTokens(128, 64, 64, 4, 4, raster=8): TileTimes(0.0514, 0.319, 2.01, 2),
        TritonTokens(128, 128, 64, 4, 4, raster=8): TileTimes(0.287, 0.287, 2.6, 1),
        TritonTokens(128, 128, 64, 8, 4, raster=8): TileTimes(0.302, 0.302, 2.66, 1),
        TritonTokens(128, 256, 64, 8, 3, raster=8): TileTimes(0.6, 0.6, 3.52, 1),
        TritonTokens(128, 256, 64, 8, 4, raster=8): TileTimes(0.634, 0.634, 3.24, 1),
        TritonTokens(256, 64, 64, 8, 4, raster=8): TileTimes(0.377, 0.377, 2.55, 1),
        TritonTokens(256, 128, 64, 8, 3, raster=8): TileTimes(0.617, 0.617, 3.26, 1),
        TritonTokens(256, 128, 64, 8, 4, raster=8): TileTimes(0.623, 0.623, 3.38, 1),
    },
)
"""Dense weights."""
QUANTIZED = TritonFit(
    fixed=0.608,
    sum=1.11,
    sum_rate=5.47e06,
    tiles={
        TritonSlices(1, 16, 128, 4, 3): TileTimes(0.42, 0.272, 0.167, 5),
        TritonSlices(1, 16, 128, 8, 3): TileTimes(0.724, 0.457, 0.496, 3),
        TritonSlices(1, 32, 128, 4, 3): TileTimes(0.54, 0.175, 0.904, 2),
        TritonSlices(1, 32, 128, 8, 3): TileTimes(0.755, 0.587, 1.35, 4),
        TritonSlices(8, 16, 128, 4, 3): TileTimes(0.336, 0.0209, 0.942, 2),
        TritonSlices(8, 16, 128, 8, 3): TileTimes(0.622, 0.302, 1.84, 2),
        TritonSlices(8, 32, 128, 4, 3): TileTimes(0.157, 0.306, 1.4, 2),
        TritonSlices(8, 32, 128, 8, 3): TileTimes(0.132, 0.582, 3.3, 2),
        TritonSlices(16, 16, 128, 4, 3): TileTimes(0.471, 0.302, 1.36, 6),
        TritonSlices(16, 16, 128, 8, 3): TileTimes(0.279, 0.625, 2.94, 2),
        TritonSlices(16, 32, 128, 4, 3): TileTimes(0.579, 0.447, 1.76, 6),
        TritonSlices(16, 32, 128, 8, 3): TileTimes(0.369, 0.952, 4.81, 2),
        TritonWeights(16, 64, 128, 4, 3, raster=8): TileTimes(0.427, 0.225, 0.464, 4),
        TritonWeights(64, 64, 128, 4, 3, raster=8): TileTimes(0.0876, 0.517, 1.06, 2),
        TritonWeights(64, 64, 128, 4, 4, raster=8): TileTimes(0.432, 0.217, 1.22, 1),
        TritonWeights(64, 128, 64, 8, 4, raster=8): TileTimes(0.254, 0.394, 1.2, 5),
        TritonWeights(64, 128, 128, 4, 3, raster=8): TileTimes(0.32, 0.732, 1.1, 5),
        TritonWeights(128, 64, 64, 4, 4, raster=8): TileTimes(0.428, 0.298, 1.92, 3),
        TritonWeights(128, 64, 128, 4, 3, raster=8): TileTimes(0.763, 0.557, 1.88, 2),
        TritonWeights(128, 128, 64, 8, 3, raster=8): TileTimes(0.548, 0.416, 2.36, 2),
        TritonWeights(128, 128, 64, 8, 4, raster=8): TileTimes(0.555, 0.414, 2.56, 2),
        TritonWeights(128, 128, 128, 8, 3, raster=8): TileTimes(0.98, 0.98, 1.7, 1),
        TritonWeights(256, 64, 64, 8, 3, raster=8): TileTimes(0.505, 0.778, 2.45, 3),
        TritonWeights(256, 128, 64, 8, 3, raster=8): TileTimes(0.802, 0.802, 3.09, 1),
    },
)
"""Quantised weights."""


def fit(quantized: bool) -> TritonFit:
    """Returns the candidates of quantised or of dense weights, and their constants."""
    return QUANTIZED if quantized else DENSE


def candidates(rows: int, quantized: bool) -> list[TritonSchedule]:
    """Lists the tiles for a bucket that ends at ``rows`` rows of x."""
    tiles = fit(quantized).tiles
    if rows <= FEW_ROWS:
        return [tile for tile in tiles if tile.block_m == rows]
    return [tile for tile in tiles if FEW_ROWS < tile.block_m <= rows]


def splits(tiles: TritonSchedule, rows: int, length: int, regions: int = 1) -> list[int]:
    """Lists the ranges into which K may be split."""
    if rows > SPLIT_ROWS:
        return [1]
    most = length // (LEAST_ITERATIONS * tiles.block_k)
    return [count for count in K_SPLITS if count == 1 or (count <= most and count * regions <= MOST_SUMS)]


def microseconds(
    tiles: TritonSchedule, rows: int, columns: Sequence[int], length: int, splits: int, bits: float, chip: Chip
) -> float:
    """Estimates the time of a product with 16-bit results that has the device for itself.

    Args:
        columns: of each region.
        splits: ranges of K.
        bits: of a weight, those of scales included; a dense one has 16.
    """
    constants = fit(bits < 16)
    blocks = splits * -(-rows // tiles.block_m) * sum(-(-width // tiles.block_n) for width in columns)
    iterations = -(-length // (tiles.block_k * splits))
    moved = sum(columns) * length * bits / 8 + 2 * rows * (length + sum(columns))
    time = constants.fixed + tile_times.microseconds(constants.tiles[tiles], blocks, iterations, moved, chip)
    if splits == 1:
        return time
    return time + constants.sum + 2 * 4 * splits * rows * sum(columns) / constants.sum_rate
