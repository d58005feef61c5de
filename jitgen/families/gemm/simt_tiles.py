"""Lists tiles of the ``simt`` mainloop for more than a few rows of float32: the candidates, and a model of their times
(``tile_times.py``).

The constants were fitted to 859 timings of 68 random shapes on an H200 (``bench/schedule_timings.py --kinds simt --seed
31001 --shapes 45`` and ``--seed 31004 --shapes 40``, of which 23 were reached; 9 to 4096 rows, N and K from 64 to
60000). Of what was timed for a shape, that which the model chooses takes longer than the best, by the geometric mean
and at worst: 3.1 % and 43 % up to 64 rows, 6.0 % and 36 % up to 512, 4.6 % and 52 % beyond. The rule that there was
before took 1.46, 2.0 and 2.2 times as long as the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitgen.families.gemm import tile_times
from jitgen.families.gemm.mainloops import Simt
from jitgen.families.gemm.tile_times import TileTimes
from jitgen.schedule.chips import Chip

SPLITS = (1, 2, 4, 8)
"""Blocks of a cluster that may share the K of a tile."""
LEAST_ITERATIONS = 4
"""Iterations of the mainloop that each of them has at least."""


FIXED = 1.05
"""Microseconds of a kernel."""
EXCHANGE, BLOCK_EXCHANGE = 2.08, 0.0541
"""Microseconds of the exchange of sums in a cluster, and what each of its blocks adds."""
TILES = {
    Simt(64, 64, 16, 4): TileTimes(0.561, 0.529, 0.225, 4),
    Simt(64, 64, 32, 4): TileTimes(0.877, 1.09, 0.877, 8),
    Simt(64, 128, 16, 4): TileTimes(0.539, 0.928, 2.21, 8),
    Simt(64, 128, 32, 4): TileTimes(1.4, 1.74, 2.7, 2),
    Simt(128, 64, 8, 4): TileTimes(0.462, 0.47, 2.03, 3),
    Simt(128, 64, 16, 4): TileTimes(0.551, 0.883, 2.74, 8),
    Simt(128, 128, 8, 8): TileTimes(0.073, 0.901, 5.4, 8),
    Simt(128, 128, 16, 8): TileTimes(1.29, 1.29, 5.28, 1),
    Simt(256, 128, 8, 8): TileTimes(1.12, 1.12, 5.73, 1),
    Simt(256, 128, 16, 8): TileTimes(2.16, 2.16, 7.67, 1),
}
"""What was fitted for each candidate; an iteration is ``block_k`` elements of K."""


def candidates(rows: int, length: int, has_clusters: bool) -> list[Simt]:
    """Lists the schedules for a bucket that ends at ``rows`` rows of x."""
    schedules = []
    for tiles in TILES:
        if tiles.block_m <= 2 * rows:
            most = length // (LEAST_ITERATIONS * tiles.block_k) if has_clusters else 1
            schedules += [replace(tiles, cluster_k_splits=splits) for splits in SPLITS if splits <= max(1, most)]
    return schedules


def microseconds(tiles: Simt, rows: int, columns: Sequence[int], length: int, chip: Chip) -> float:
    """Estimates the time of a product that has the device for itself, with the ``columns`` of each region."""
    splits = tiles.cluster_k_splits
    blocks = splits * -(-rows // tiles.block_m) * sum(-(-width // tiles.block_n) for width in columns)
    moved = 4 * (sum(columns) * length + rows * (length + sum(columns)))
    iterations = -(-length // (tiles.block_k * splits))
    times = TILES[Simt(tiles.block_m, tiles.block_n, tiles.block_k, tiles.warps)]
    time = FIXED + tile_times.microseconds(times, blocks, iterations, moved, chip)
    return time if splits == 1 else time + EXCHANGE + BLOCK_EXCHANGE * splits
