"""The model of the wgmma mainloops, by which ``wgmma_tiles.py`` chooses: fitted constants, and how times add up.

Multiprocessors, resident clusters and the clock are those of a chip (``jitgen/chips.py``). The other constants were
fitted to timings on an H200, and hold for Hopper's tensor cores: first to 120 random shapes (17 to 8192 rows on a
logarithmic scale, N and K from 512 to 60000, neither rounded), each with the tiles and the numbers of splits that
looked promising, quantised weights being W4A16 with groups of 128; then, with the present epilogues, to 1341 timings of
62 shapes (N and K from 128 to 40000). Of the tiles that were measured for one of these, those that a model chooses take
1 % (quantised) and 3 % (dense) longer than the best, by the geometric mean, and 3 % and 14 % at the 95th percentile.
``docs/measured/h200-sweep.json`` has shapes to which it was not fitted.

What the models say of one multiprocessor:

* wgmma computes 64 x 32 products of 16 k's in 16 cycles.
* Instructions that decode weights or control the loop share issue slots with wgmma, so their time is added.
* The L2 cache delivers at least 32 bytes a cycle where codes are copied, and 60 where both operands are and fit in it.
* The last round of blocks may leave multiprocessors idle, and takes as long as a full one, unless clusters of blocks
  split the K of its tiles.
* A cluster lies within one group of 16 or 18 multiprocessors (a GPC), so fewer clusters run at once than the number of
  multiprocessors suggests.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.chips import Chip


@dataclass(frozen=True)
class TileFit:
    """Fitted constants of a mainloop. An area is that of a tile in units of 64 x 512 sums.

    Attributes:
        product: the cycles of a tile's wgmmas, as a multiple of those that the tensor cores take.
        l2_bytes: bytes that the L2 cache delivers to a multiprocessor in a cycle.
        wait: cycles that an iteration waits.
        fixed: microseconds of a kernel, whatever its work.
        epilogue: microseconds for a unit of area where one block computes a tile.
        split_epilogue: the same where a cluster does.
        exchange: microseconds of the first exchange of sums.
        more_exchanges: of each further one, which the copies for the next tile wait for.
    """

    product: float
    l2_bytes: float
    wait: float
    fixed: float
    epilogue: float
    split_epilogue: float
    exchange: float
    more_exchanges: float


@dataclass(frozen=True)
class DecodeFit:
    """Cycles in which a warpgroup issues no wgmma: ``loop`` in a stage, ``block`` for each 64 rows of codes."""

    loop: float
    block: float


@dataclass(frozen=True)
class WarpgroupFit:
    """Cycles of an iteration of one warpgroup for whose wgmmas nothing else waits: ``fixed``, and ``column`` for each
    column of its tile."""

    fixed: float
    column: float


QUANTIZED = TileFit(1.03, 32, 35, fixed=1.57, epilogue=0.0067, split_epilogue=1.57, exchange=0.9, more_exchanges=8.7)
"""Here ``epilogue`` is for one row of x and 64 columns, and ``split_epilogue`` is a multiple of it."""
DECODE = DecodeFit(loop=34, block=35)
DENSE = TileFit(1.15, 60, 55, fixed=1.6, epilogue=2.0, split_epilogue=6.5, exchange=0.5, more_exchanges=5.4)
DENSE_WARPGROUP = WarpgroupFit(fixed=50, column=3)
DENSE_MISSING_BYTES = 43
"""``l2_bytes`` where x and the weights together exceed the L2 cache."""
BATCHED = TileFit(1.1, 48, 150, fixed=0, epilogue=1.7, split_epilogue=0, exchange=0, more_exchanges=0)
"""``wait`` and ``epilogue`` were fitted to ten batches of 7 to 256 matrices on an H200; choices take 2 % longer than
the best on average and 14 % at worst. ``docs/measured/h200-batched.json`` has others."""
AREA = 64 * 512
"""Sums of a unit of area."""


@dataclass(frozen=True)
class Times:
    """The times that a kernel is composed of.

    Attributes:
        fit: of the mainloop.
        chunks, chunk: chunks of a tile, and the microseconds of one.
        epilogue, split_epilogue: microseconds of those of one tile.
    """

    fit: TileFit
    chunks: int
    chunk: float
    epilogue: float
    split_epilogue: float

    def least(self, chip: Chip, items: int, most: int, fewest: int = 1, resident: int = 1) -> tuple[int, float]:
        """(splits, microseconds) with the number of splits, ``fewest`` to ``most``, for which the kernel takes least.

        Args:
            chip: has the clusters.
            items: tiles.
            resident: blocks that a multiprocessor holds at once.
        """
        found = []
        for splits, clusters in chip.clusters:
            if splits < fewest or (splits > fewest and (splits > most or self.chunks < 4 * splits)):
                continue
            whole, rounds = tile_rounds(items, splits, clusters * resident)
            time = self.fit.fixed + whole * (self.chunks * self.chunk + self.epilogue)
            if rounds:
                time += rounds * (-(-self.chunks // splits) * self.chunk + self.split_epilogue)
                time += self.fit.exchange + self.fit.more_exchanges * (rounds - 1)
            found.append((splits, time))
        return min(found, key=lambda one: one[1])


def tile_rounds(items: int, splits: int, clusters: int) -> tuple[int, int]:
    """(rounds in which each block computes a tile of its own, rounds in which each cluster computes one), as
    ``TileWalk`` of gemm_wgmma_walk.cuh has them, for ``clusters`` clusters of ``splits`` blocks."""
    whole, left = divmod(items, clusters * splits)
    if left > clusters * (splits - 1):
        return whole + 1, 0
    return whole, -(-left // clusters)
