"""Models kernels of the wgmma mainloops: how the times of their tiles add up.

Multiprocessors, resident clusters and the clock are those of a chip (``schedule/chips.py``); ``wgmma_fits.py`` has the
other constants. What the models say of one multiprocessor:

* wgmma computes 64 x 32 products of 16 k's in 16 cycles, which the constants express as multiples.
* Instructions that decode weights or control the loop share issue slots with wgmma, so their time is added; a warpgroup
  by itself cannot hide all of its own, and less of that of its first block than of others.
* The L2 cache delivers a number of bytes in a cycle; dense operands that exceed it come more slowly. A copy that
  reaches beyond its matrix takes no longer than what there is.
* Blocks of a cluster that share tiles release a stage together, which takes some 350 to 400 cycles: small tiles wait
  for that, and tiles whose products take longer hide it.
* Blocks that share a multiprocessor share its tensor cores, its bandwidth and the bandwidth of their stores.
* No kernel is faster than memory moves its operands and results.
* The last round of blocks may leave multiprocessors idle, and takes as long as a full one, unless clusters of blocks
  split the K of its tiles.
* A cluster lies within one group of 16 or 18 multiprocessors (a GPC), so fewer clusters run at once than the number of
  multiprocessors suggests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitgen.families.gemm.wgmma_fits import TileFit
from jitgen.schedule.chips import Chip

SMOOTH = 4
"""The power of the mean by which the time of a kernel and that of its memory are combined."""
AREA = 64 * 512
"""Sums of a unit of area."""


@dataclass(frozen=True)
class Times:
    """Holds the times of which a kernel is composed.

    Attributes:
        fit: of the mainloop.
        chunks: of a tile.
        chunk: microseconds of one, where so many blocks share a multiprocessor, and whether a cluster shares K.
        epilogue: microseconds of that of a tile, likewise.
        resident: blocks that a multiprocessor holds at once.
        moved: bytes of the operands and results.
    """

    fit: TileFit
    chunks: int
    chunk: Callable[[int, bool], float]
    epilogue: Callable[[int], float]
    resident: int
    moved: float

    def least(self, chip: Chip, items: int, most: int, fewest: int = 1) -> tuple[int, float]:
        """Returns (splits, microseconds) with the number of splits, ``fewest`` to ``most``, for which the kernel takes
        least.

        Args:
            chip: has the clusters.
            items: tiles.
        """
        options = [
            (splits, self.microseconds(chip, items, splits, clusters * self.resident))
            for splits, clusters in chip.clusters
            if splits == fewest or (fewest < splits <= most and self.chunks >= 4 * splits)
        ]
        return min(options, key=lambda one: one[1])

    def microseconds(self, chip: Chip, items: int, splits: int, clusters: int) -> float:
        """Returns the microseconds with ``splits`` blocks in each of at most ``clusters`` clusters."""
        fit = self.fit
        whole, rounds = tile_rounds(items, splits, clusters)
        time = fit.fixed
        if whole:
            sharing = self.sharing(chip, items)
            main, end = self.chunks * self.chunk(sharing, False), self.epilogue(sharing)
            hidden = whole - 1 if sharing == 1 else whole
            time += whole * (main + end) - hidden * fit.overlap * min(main, end)
        if rounds:
            left = items - whole * clusters * splits
            sharing = self.sharing_of_clusters(chip, min(left, clusters), splits)
            share = -(-self.chunks // splits) * self.chunk(sharing, True)
            time += rounds * (share + fit.split_epilogue * self.epilogue(sharing))
            time += fit.exchange + fit.block_exchange * (splits - 2) + fit.more_exchanges * (rounds - 1)
        return self.with_memory(chip, time)

    def unsplit(self, chip: Chip, items: int, share: int) -> float:
        """Estimates the microseconds where clusters of ``share`` blocks take a tile each, and none splits K."""
        clusters = dict(chip.clusters)[share]
        rounds, main, end = -(-items // (clusters * share)), self.chunks * self.chunk(1, False), self.epilogue(1)
        time = self.fit.fixed + rounds * (main + end) - (rounds - 1) * self.fit.overlap * min(main, end)
        return self.with_memory(chip, time)

    def pingpong(self, chip: Chip, items: int, share: int, last: float) -> float:
        """Estimates the microseconds if two warpgroups of a block compute tiles in turn, each tile's epilogue while the
        other warpgroup multiplies, but for the last, whose chunks take ``last`` microseconds each, and ``share`` blocks
        of a cluster share operands."""
        count = -(-items // (dict(chip.clusters)[share] * share))
        main, end = self.chunks * self.chunk(1, False), self.epilogue(1)
        time = self.fit.fixed + (count - 1) * max(main, (main + end) / 2) + self.chunks * last + end
        return self.with_memory(chip, time)

    def with_memory(self, chip: Chip, time: float) -> float:
        """Estimates the microseconds of a kernel whose blocks take ``time``, with those of its memory."""
        memory = self.fit.fixed + self.moved / chip.reads * 1e6
        return float((time**SMOOTH + memory**SMOOTH) ** (1 / SMOOTH))

    def sharing(self, chip: Chip, blocks: int) -> int:
        """Returns how many of so many blocks share a multiprocessor."""
        return max(1, min(self.resident, -(-blocks // chip.multiprocessors)))

    def sharing_of_clusters(self, chip: Chip, clusters: int, splits: int) -> int:
        """Returns how many blocks share a multiprocessor where so many clusters of ``splits`` blocks are at work: a
        cluster lies within a GPC, and clusters share multiprocessors where others of the GPC are too few for one."""
        return max(1, min(self.resident, -(-clusters // dict(chip.clusters)[splits])))


def tile_rounds(items: int, splits: int, clusters: int) -> tuple[int, int]:
    """Returns (rounds in which every block computes its own tile, rounds in which every cluster computes one together),
    as ``TileWalk`` of gemm_wgmma_walk.cuh assigns them, for ``clusters`` clusters of ``splits`` blocks."""
    whole, left = divmod(items, clusters * splits)
    if left > clusters * (splits - 1):
        return whole + 1, 0
    return whole, -(-left // clusters)
