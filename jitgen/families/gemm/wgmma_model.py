"""Models the wgmma mainloops, among whose tiles ``wgmma_tiles.py`` chooses: fitted constants, and how times add up.

Multiprocessors, resident clusters and the clock are those of a chip (``schedule/chips.py``). The other constants were
fitted to timings on an H200, and hold for Hopper's tensor cores: to 7,058 timings of 90 random shapes for each kind of
weight (``bench/gemm_timings.py --seed 23001 --shapes 34`` and ``--seed 23002 --shapes 56``; 10 to 8141 rows and N and K
from 72 to 56840, all on a logarithmic scale), each with every candidate and the numbers of splits that looked
promising; quantised weights are W4A16 with groups of 128. Products of more than 20 GFLOP weighed as much together as
all others. Of what was timed for a shape, that which a model chooses takes longer than the best, by the geometric mean
and at the 95th percentile:

=====================  ==============  ==============
products               quantised       dense
=====================  ==============  ==============
of more than 20 GFLOP  0.4 %, 3 %      0.4 %, 2 %
others                 1.0 %, 6 %      3.1 %, 14 %
=====================  ==============  ==============

Fitted to 60 % of the shapes at random, twice, the model of quantised weights loses 0.8 % and 0.0 % for the larger ones
of the remaining shapes, and 2.5 % and 1.2 % for the others. ``docs/measured/h200-sweep.json`` has shapes to which it
was not fitted. These timings were taken before epilogues read all that they have staged before they store, and when
tiles of 80, 160 and 224 took two instructions of wgmma, whose cost was a constant of its own.

``SUMS_FIXED`` is an estimate.

The constants of dense products were then fitted to 5,100 timings of 248: of 178 products on an H200 and 70 on an H100
(``docs/measured/h200-candidates-arranged.json``, ``-fitted.json``, ``-fitted-2.json``, ``-fitted-3.json``, and
``h100-candidates*.json``), by what the tile with the least estimate takes longer than the fastest, and by the error of
the estimates of tiles that take at most twice as long; and, with less weight, to estimates of 40 products of 40 GFLOP
and more by the model of 7,058 timings. With a third of the 178 left out, twice, the tile with the least estimate has
0.945 of the speed of the fastest that was timed for those left out, and 0.964 for the others.
``h200-candidates-held-out.json`` has products that no constant was fitted to: ``python -m bench.judged`` says how near
the choices are to the fastest.

What the models say of one multiprocessor:

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

from jitgen.schedule.chips import Chip


@dataclass(frozen=True)
class TileFit:
    """Holds fitted constants of a mainloop. An area is that of a tile in units of 64 x 512 sums.

    Attributes:
        product: the cycles of a tile's wgmmas, as a multiple of those that the tensor cores take.
        l2_bytes: bytes that the L2 cache delivers to a multiprocessor in a cycle.
        last_product: ``product`` of the last tile of a block whose warpgroups compute tiles in turn, when no other one
            is stored; 0 where it is the same.
        wait: cycles that an iteration waits.
        split_wait: further cycles where the blocks of a cluster share K, and so read other chunks at the same time: the
            L2 cache has fewer requests for the same bytes then.
        least: cycles that an iteration takes at least where a cluster has one, two, four or eight blocks: those that
            share tiles release a stage together.
        shared_wait: further cycles that an iteration waits where the blocks of a cluster share tiles.
        fixed: microseconds of a kernel, whatever its work.
        epilogue: microseconds for a unit of area, where its stores are the limit.
        warpgroup_epilogue: the same for a unit of area of one warpgroup, where its instructions are.
        tile: microseconds of an epilogue, whatever its area.
        split_epilogue: of an epilogue of a cluster that shares K, as a multiple of that of one block.
        exchange: microseconds of the first exchange of sums, between two blocks.
        block_exchange: what each block more adds to it.
        more_exchanges: of each further exchange, which the copies for the next tile wait for.
        overlap: the share of the shorter of mainloop and epilogue that the longer one hides, from tile to tile.
        across_lines: the time of copies of 128 bytes that lie across two lines of the cache, since rows do not begin at
            a line, as a multiple of that of others.
        half_lines: the epilogue where 32 columns are staged at once, which are half a line of memory, as a multiple of
            that with 64.
    """

    product: float
    l2_bytes: float
    wait: float
    fixed: float
    epilogue: float
    warpgroup_epilogue: float = 0
    tile: float = 0
    split_epilogue: float = 1
    exchange: float = 0
    block_exchange: float = 0
    more_exchanges: float = 0
    overlap: float = 0
    split_wait: float = 0
    least: tuple[float, float, float, float] = (0, 0, 0, 0)
    shared_wait: float = 0
    resident_wait: float = 0
    cluster: float = 0
    across_lines: float = 1.89
    half_lines: float = 1.29
    last_product: float = 0


@dataclass(frozen=True)
class WarpgroupFit:
    """Holds the cycles of an iteration of one warpgroup, besides its wgmmas.

    Attributes:
        fixed: whatever its tile.
        column: for each column of its tile (dense).
        block: for its first 64 rows of codes (quantised).
        more_blocks: for each further 64 rows, which are decoded while the tensor cores multiply those before them.
    """

    fixed: float
    column: float = 0
    block: float = 0
    more_blocks: float = 0

    def blocks(self, count: int) -> float:
        """Returns the cycles of so many blocks of 64 rows of codes."""
        return self.block + (count - 1) * self.more_blocks


QUANTIZED = TileFit(
    *(1.0, 30.2, 13, 1.375),
    epilogue=0.68,
    warpgroup_epilogue=3.94,
    tile=0.155,
    split_epilogue=4.02,
    exchange=0.15,
    block_exchange=0.24,
    more_exchanges=0.47,
)
DECODE = WarpgroupFit(fixed=74.6, block=77.8, more_blocks=37.7)
QUANTIZED_BYTES = TileFit(
    *(1.0, 33.0, 2.6, 2.1),
    epilogue=0.84,
    warpgroup_epilogue=4.03,
    tile=0.455,
    split_epilogue=2.36,
    exchange=0.3,
    block_exchange=0.28,
    more_exchanges=QUANTIZED.more_exchanges,
)
BYTE_DECODE = WarpgroupFit(fixed=DECODE.fixed, block=113, more_blocks=185)
"""Of codes of eight bits and 16-bit x, fitted to 568 timings of 44 products of int8 and fp8 weights of 36 to 7884
rows on an H200: what is estimated to be the fastest takes 2 % longer than the fastest, and 13 % at worst but for the
fewest rows (30 %). A chunk of 64 rows takes a lane of int8 72 instructions to decode, of fp8 88, and of int4 36."""
GROUPED_DECODE = WarpgroupFit(fixed=248, block=88, more_blocks=85)
GROUPED_PLANES = WarpgroupFit(fixed=314, block=126, more_blocks=149)
"""The same where rows belong to groups: of tiled codes, and of bit planes. They were fitted to 900 timings of int4 and
mxfp4 on an H200, of 54 products whose groups have known rows (``docs/measured/h200-grouped-heights.json`` and
``-tiles.json``): an estimate is 8 % off (root mean square), and of mxfp4 was 23 % with ``DECODE``."""
CODE_DECODE, CODE_SUM = 30.0, 3.0
"""Cycles of a warpgroup for 64 rows of a chunk where x is int8: of decoding them to int8, and of adding one sum of each
thread to those of the groups before (an estimate)."""
LEAST_PRODUCT = 16.5
"""Cycles that a wgmma of 64 rows of codes takes at least, however few rows x has."""
DENSE = TileFit(
    *(1.02, 52.6, 25.1, 0.197),
    epilogue=4.73,
    warpgroup_epilogue=0.79,
    tile=0.381,
    split_epilogue=2.71,
    exchange=0.273,
    block_exchange=0.211,
    more_exchanges=0.59,
    overlap=0.222,
    least=(137, 402, 346, 182),
    shared_wait=50.2,
    resident_wait=155,
    cluster=0.213,
    across_lines=1.85,
    half_lines=1.19,
)
DENSE_PINGPONG = TileFit(
    *(1.45, 52.6, 20.7, 0.277),
    epilogue=7.42,
    warpgroup_epilogue=1.58,
    tile=0.323,
    least=DENSE.least,
    shared_wait=21.2,
    last_product=1.24,
    cluster=0.296,
    across_lines=1.85,
    half_lines=1.19,
)
"""Where two warpgroups compute tiles in turn; ``product`` and ``wait`` are those of one that multiplies alone. Together
they are what was fitted: ``product`` by itself would be 1 or more."""
DENSE_WARPGROUP = WarpgroupFit(fixed=0, column=2.47)
BYTES_WARPGROUP = WarpgroupFit(fixed=-61.8, column=3.89)
"""Besides ``BYTES.wait``."""
DENSE_MISSING_BYTES = 46.6
"""``l2_bytes`` where x and the weights together exceed the L2 cache."""
SWAPPED_LINES = 1.18
"""The epilogue of a tile whose columns are rows of x, as a multiple of that of others."""
QUARTER_LINES = 1.89
"""The epilogue where 16 columns or rows of x are staged at once, as a multiple of that with more."""
QUARTER_TOKENS = 1.73
"""The epilogue of a tile of codes and more than 128 rows of 16-bit x, of which 16 are staged at once, as a multiple of
that with 32 or 64 (two products of short K on an H200). Smaller tiles were fitted without it."""
RANGE_STORES = 2.0
"""The epilogue where the sums of a range of K are stored, which have four bytes, as a multiple of that of others."""
TALL_WAIT = 81
"""Cycles that an iteration waits longer where a warpgroup has several blocks of 64 rows."""
PAIRS, PAIRS_PINGPONG = 0.7, 0.75
"""The epilogue of a batch's tile, and that of one whose warpgroups compute tiles in turn, as multiples of those of
``DENSE``: the timings to which the latter were fitted are older than results that are computed as their sums lie in
registers. With 32 columns staged at once it takes no longer then than with 64. Of 190 timings of 53 batches on an H200
the tile with the least estimate takes 1.5 % longer than the fastest, where it took 2.8 % without these."""
BYTES = TileFit(
    *(1.0, 37.5, 68, 0.86),
    epilogue=2.88,
    warpgroup_epilogue=1.78,
    tile=0.17,
    split_epilogue=2.1,
    exchange=0.6,
    block_exchange=0.01,
    more_exchanges=0.67,
    overlap=0.36,
)
"""Of operands of one byte, fitted to 700 timings of 51 products on an H100 (``bench/gemm_timings.py --kinds float8 int8
--seed 91001 --shapes 24`` and listed sizes). The L2 cache delivers fewer bytes in a cycle there than on an H200."""
BYTES_PINGPONG = TileFit(*(1.0, 33.0, 26, 0.5), epilogue=4.5, warpgroup_epilogue=1.58, tile=0.68)
"""Fitted, as the next constants were, to 340 timings of 35 products of more than 160 rows on Hopper GPUs, each by the
tiles that looked promising: of those, what the model chooses takes 1 to 3 % longer than the fastest, and 11 % at
worst."""
BYTES_MISSING = 40.4
"""``DENSE_MISSING_BYTES`` of operands of one byte."""
PROMOTED_PRODUCT = 1.25
"""The cycles of wgmmas whose sums are promoted, as a multiple of those of others: additions and wgmmas take turns at
the registers."""
PROMOTED = TileFit(
    *(1.0, 58.2, 181, 0.86),
    epilogue=2.74,
    warpgroup_epilogue=1.66,
    tile=0.03,
    split_epilogue=2.1,
    exchange=0.6,
    block_exchange=0.01,
    more_exchanges=0.67,
    overlap=0.09,
    shared_wait=24,
)
"""Of tiles whose sums are promoted where x has more than 512 rows, fitted to 260 timings of eleven products of 788 to
7,684 rows with scales of blocks and of rows on an H200; what the model chooses takes 1.3 % longer than the fastest, and
7 % at worst. ``fixed``, ``split_epilogue`` and the exchanges are those of ``BYTES``. Products of fewer rows have the
constants of ``BYTES`` and ``PROMOTED_PRODUCT``."""
UNPROMOTED = TileFit(
    *(1.212, 48.6, 125, 1.71),
    epilogue=1.85,
    warpgroup_epilogue=0.51,
    tile=0.035,
    split_epilogue=3.3,
    exchange=0.6,
    block_exchange=0.01,
    more_exchanges=0.67,
    overlap=0.118,
)
UNPROMOTED_PINGPONG = TileFit(
    *(1.14, 47.6, 12.4, 1.49),
    epilogue=4.84,
    warpgroup_epilogue=1.4,
    tile=0.296,
    shared_wait=111,
)
UNPROMOTED_MISSING = 46.2
UNPROMOTED_WARPGROUP = WarpgroupFit(fixed=-6, column=3.464)
"""Of 8-bit integers, and of 8-bit floats whose sums are not promoted, where x has more than 512 rows: fitted to 380
timings of 42 products of 524 to 8000 rows on an H200. What the model chooses takes 0.9 % longer than the fastest, and
5 % at worst; by ``BYTES`` and without tiles in turn that share x it was 6 %. Exchanges are those of ``BYTES``."""
PROMOTED_TURN = 150
"""Cycles for which the tensor cores wait for each slice of a warpgroup that is promoted, beside ``PROMOTED``: a
warpgroup by itself waits longer, and what the others multiply meanwhile hides some of it."""
PROMOTED_PINGPONG = 1.71
"""The same of a warpgroup that multiplies alone."""
CODE_TOKEN, CODE_BLOCK = 1.28, 42.8
"""Cycles that 64 rows of a chunk of 4-bit codes take of a multiprocessor, for each row of an x of int8, whose sums of a
group are converted and scaled, and whatever the rows. Instructions and wgmmas take turns (docs/devices.md). These and
the next number were fitted to 220 timings of 18 products of 520 to 7200 rows on an H200: what the model chooses takes
0.4 % longer than the fastest, and 3.5 % at worst."""
CODE_EPILOGUE = 1.57
"""The epilogue of such a tile, which has a scale of each row of x, as a multiple of that of 16-bit x."""
PROMOTED_SUM = 1.34
"""Cycles that a warpgroup takes to add one sum of each thread to the sums of earlier stages (8-bit floats)."""
PROMOTED_WAIT = 195
"""Cycles for which a warpgroup has no wgmma under way then."""
SUMS_FIXED = 2.0
"""Microseconds of the kernel that adds the sums of several ranges of K, besides those of reading them."""
SMOOTH = 4
"""The power of the mean by which the time of a kernel and that of its memory are combined."""
GROUPED = TileFit(1.1, 48, 150, fixed=0, epilogue=1.7)
"""Of groups of rows, from ten batches of 7 to 256 matrices on an H200, to which ``wait`` and ``epilogue`` were
fitted."""
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
            sharing = self.sharing(chip, min(left, clusters) * splits)
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


def tile_rounds(items: int, splits: int, clusters: int) -> tuple[int, int]:
    """Returns (rounds in which every block computes its own tile, rounds in which every cluster computes one together),
    as ``TileWalk`` of gemm_wgmma_walk.cuh assigns them, for ``clusters`` clusters of ``splits`` blocks."""
    whole, left = divmod(items, clusters * splits)
    if left > clusters * (splits - 1):
        return whole + 1, 0
    return whole, -(-left // clusters)
