"""Tabulates the constants of the wgmma mainloops that were fitted to timings; ``wgmma_model.py`` says what they mean.

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

The constants of dense products were then fitted to 5,100 timings of 248: of 178 products on an H200 and 70 on an H100
(``docs/measured/h200-candidates-arranged.json``, ``-fitted.json``, ``-fitted-2.json``, ``-fitted-3.json``, and
``h100-candidates*.json``), by what the tile with the least estimate takes longer than the fastest, and by the error of
the estimates of tiles that take at most twice as long; and, with less weight, to estimates of 40 products of 40 GFLOP
and more by the model of 7,058 timings. With a third of the 178 left out, twice, the tile with the least estimate has
0.945 of the speed of the fastest that was timed for those left out, and 0.964 for the others.
``h200-candidates-held-out.json`` has products that no constant was fitted to: ``python -m bench.judged`` says how near
the choices are to the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WarpgroupFit:
    """Holds the cycles of an iteration of one warpgroup, besides its wgmmas.

    Attributes:
        fixed: whatever its tile.
        column: for each column of its tile (dense).
        block: for its first 64 rows of codes (quantised).
        more_blocks: for each further 64 rows, which are decoded while the tensor cores multiply those before them.
    """

    fixed: float = 0
    column: float = 0
    block: float = 0
    more_blocks: float = 0

    def blocks(self, count: int) -> float:
        """Returns the cycles of so many blocks of 64 rows of codes."""
        return self.block + (count - 1) * self.more_blocks


@dataclass(frozen=True, kw_only=True)
class TileFit:
    """Holds fitted constants of a mainloop. An area is that of a tile in units of ``AREA`` sums.

    Attributes:
        product: the cycles of a tile's wgmmas, as a multiple of those that the tensor cores take.
        last_product: ``product`` of the last tile of a block whose warpgroups compute tiles in turn, when no other one
            is stored; 0 where it is the same.
        promotion: the cycles of wgmmas whose sums are promoted, as a multiple of those of others: additions and wgmmas
            take turns at the registers.
        promoted_slice: further cycles for which the tensor cores wait for each slice of a warpgroup that is promoted: a
            warpgroup by itself waits longer, and what the others multiply meanwhile hides some of it.
        l2_bytes: bytes that the L2 cache delivers to a multiprocessor in a cycle.
        missing_bytes: the same where the operands together exceed the L2 cache; of dense operands.
        across_lines: the time of copies of 128 bytes that lie across two lines of the cache, since rows do not begin at
            a line, as a multiple of that of others.
        warpgroup: what a warpgroup does besides.
        wait: cycles that an iteration waits.
        split_wait: further cycles where the blocks of a cluster share K, and so read other chunks at the same time: the
            L2 cache has fewer requests for the same bytes then.
        shared_wait: further cycles where the blocks of a cluster share tiles.
        resident_wait: further cycles where a multiprocessor has several blocks.
        least: cycles that an iteration takes at least where a cluster has one, two, four or eight blocks: those that
            share tiles release a stage together.
        fixed: microseconds of a kernel, whatever its work.
        cluster: further microseconds for each doubling of the blocks of a cluster that share tiles.
        epilogue: microseconds for a unit of area, where its stores are the limit.
        warpgroup_epilogue: the same for a unit of area of one warpgroup, where its instructions are.
        tile: microseconds of an epilogue, whatever its area.
        half_lines: the epilogue where 32 columns are staged at once, which are half a line of memory, as a multiple of
            that with 64.
        overlap: the share of the shorter of mainloop and epilogue that the longer one hides, from tile to tile.
        split_epilogue: of an epilogue of a cluster that shares K, as a multiple of that of one block.
        exchange: microseconds of the first exchange of sums, between two blocks.
        block_exchange: what each block more adds to it.
        more_exchanges: of each further exchange, which the copies for the next tile wait for.
    """

    product: float
    last_product: float = 0
    promotion: float = 1
    promoted_slice: float = 0
    l2_bytes: float
    missing_bytes: float = 0
    across_lines: float = 1.89
    warpgroup: WarpgroupFit = WarpgroupFit()
    wait: float
    split_wait: float = 0
    shared_wait: float = 0
    resident_wait: float = 0
    least: tuple[float, float, float, float] = (0, 0, 0, 0)
    fixed: float
    cluster: float = 0
    epilogue: float
    warpgroup_epilogue: float = 0
    tile: float = 0
    half_lines: float = 1.29
    overlap: float = 0
    split_epilogue: float = 1
    exchange: float = 0
    block_exchange: float = 0
    more_exchanges: float = 0


@dataclass(frozen=True)
class DenseFits:
    """Holds the constants of a kind of dense operands.

    Attributes:
        jointly: of blocks whose warpgroups compute a tile together.
        in_turn: of blocks whose two warpgroups compute tiles in turn; ``product`` and ``wait`` are those of one that
            multiplies alone. Together they are what was fitted: ``product`` by itself would be 1 or more.
    """

    jointly: TileFit
    in_turn: TileFit


@dataclass(frozen=True)
class CodesFit:
    """Holds the constants of 4-bit codes that meet an x of int8, beside those of ``QUANTIZED``.

    Attributes:
        decode: cycles of a warpgroup that decodes 64 rows of a chunk to int8 (an estimate).
        sum: cycles in which it adds one sum of each thread to those of the groups before (an estimate).
        block: cycles that 64 rows of a chunk take of a multiprocessor, whatever the rows of x. Instructions and wgmmas
            take turns (docs/devices.md).
        token: the same for each row of x, whose sums of a group are converted and scaled.
        epilogue: that of such a tile, which has a scale of each row of x, as a multiple of that of 16-bit x.
    """

    decode: float
    sum: float
    block: float
    token: float
    epilogue: float


# -------------------------------------------------------------------------------------------------- quantised weights

QUANTIZED = TileFit(
    product=1.0,
    l2_bytes=30.2,
    warpgroup=WarpgroupFit(fixed=74.6, block=77.8, more_blocks=37.7),
    wait=13,
    fixed=1.375,
    epilogue=0.68,
    warpgroup_epilogue=3.94,
    tile=0.155,
    split_epilogue=4.02,
    exchange=0.15,
    block_exchange=0.24,
    more_exchanges=0.47,
)
QUANTIZED_BYTES = TileFit(
    product=1.0,
    l2_bytes=33.0,
    warpgroup=WarpgroupFit(fixed=74.6, block=113, more_blocks=185),
    wait=2.6,
    fixed=2.1,
    epilogue=0.84,
    warpgroup_epilogue=4.03,
    tile=0.455,
    split_epilogue=2.36,
    exchange=0.3,
    block_exchange=0.28,
    more_exchanges=0.47,
)
"""Of codes of eight bits and 16-bit x, fitted to 568 timings of 44 products of int8 and fp8 weights of 36 to 7884
rows on an H200: what is estimated to be the fastest takes 2 % longer than the fastest, and 13 % at worst but for the
fewest rows (30 %). A chunk of 64 rows takes a lane of int8 72 instructions to decode, of fp8 88, and of int4 36.
``more_exchanges`` and ``warpgroup.fixed`` are those of ``QUANTIZED``."""
QUANTIZED_GROUPS = replace(QUANTIZED, warpgroup=WarpgroupFit(fixed=248, block=88, more_blocks=85))
PLANE_GROUPS = replace(QUANTIZED, warpgroup=WarpgroupFit(fixed=314, block=126, more_blocks=149))
"""Where rows belong to groups: of tiled codes, and of bit planes. They were fitted to 900 timings of int4 and mxfp4 on
an H200, of 54 products whose groups have known rows (``docs/measured/h200-grouped-heights.json`` and ``-tiles.json``):
an estimate is 8 % off (root mean square), and of mxfp4 was 23 % with ``QUANTIZED``."""
CODES = CodesFit(decode=30.0, sum=3.0, block=42.8, token=1.28, epilogue=1.57)
"""``block``, ``token`` and ``epilogue`` were fitted to 220 timings of 18 products of 520 to 7200 rows on an H200: what
the model chooses takes 0.4 % longer than the fastest, and 3.5 % at worst."""
LEAST_PRODUCT = 16.5
"""Cycles that a wgmma of 64 rows of codes takes at least, however few rows x has."""
QUARTER_TOKENS = 1.73
"""The epilogue of a tile of codes and more than 128 rows of 16-bit x, of which 16 are staged at once, as a multiple of
that with 32 or 64 (two products of short K on an H200). Smaller tiles were fitted without it."""

# ---------------------------------------------------------------------------------------------- dense operands, 16 bits

LEAST_CYCLES = (137, 402, 346, 182)
"""``TileFit.least`` of 16-bit operands."""
DENSE = DenseFits(
    jointly=TileFit(
        product=1.02,
        l2_bytes=52.6,
        missing_bytes=46.6,
        across_lines=1.85,
        warpgroup=WarpgroupFit(column=2.47),
        wait=25.1,
        shared_wait=50.2,
        resident_wait=155,
        least=LEAST_CYCLES,
        fixed=0.197,
        cluster=0.213,
        epilogue=4.73,
        warpgroup_epilogue=0.79,
        tile=0.381,
        half_lines=1.19,
        overlap=0.222,
        split_epilogue=2.71,
        exchange=0.273,
        block_exchange=0.211,
        more_exchanges=0.59,
    ),
    in_turn=TileFit(
        product=1.45,
        last_product=1.24,
        l2_bytes=52.6,
        missing_bytes=46.6,
        across_lines=1.85,
        wait=20.7,
        shared_wait=21.2,
        least=LEAST_CYCLES,
        fixed=0.277,
        cluster=0.296,
        epilogue=7.42,
        warpgroup_epilogue=1.58,
        tile=0.323,
        half_lines=1.19,
    ),
)
DENSE_BATCH = DenseFits(
    replace(DENSE.jointly, epilogue=0.7 * DENSE.jointly.epilogue, half_lines=1.0),
    replace(DENSE.in_turn, epilogue=0.75 * DENSE.in_turn.epilogue, half_lines=1.0),
)
"""Of a batch: the timings to which ``DENSE`` was fitted are older than results that are computed as their sums lie in
registers. With 32 columns staged at once it takes no longer then than with 64. Of 190 timings of 53 batches on an H200
the tile with the least estimate takes 1.5 % longer than the fastest, where it took 2.8 % with ``DENSE``."""
GROUPED = TileFit(product=1.1, l2_bytes=48, wait=150, fixed=0, epilogue=1.7)
"""Of groups of rows, from ten batches of 7 to 256 matrices on an H200, to which ``wait`` and ``epilogue`` were
fitted."""
GROUPED_IN_TURN = 0.76
"""What tiles in turn that share x take of their estimate by ``GROUPED`` (the same products)."""
TALL_WAIT = 81
"""Cycles that an iteration waits longer where a warpgroup has several blocks of 64 rows."""
SWAPPED_LINES = 1.18
"""The epilogue of a tile whose columns are rows of x, as a multiple of that of others."""
QUARTER_LINES = 1.89
"""The epilogue where 16 columns or rows of x are staged at once, as a multiple of that with more."""
RANGE_STORES = 2.0
"""The epilogue where the sums of a range of K are stored, which have four bytes, as a multiple of that of others."""
DENSE_SUMS, QUANTIZED_SUMS = (1.1, 1.0), (2.0, 1.7)
"""Microseconds, and passes over all sums at the rate of memory, of the kernel that adds the sums of ranges; of
quantised weights with what their own epilogue takes longer to store four bytes."""

# ----------------------------------------------------------------------------------------------- dense operands, 8 bits

BYTES = DenseFits(
    jointly=TileFit(
        product=1.0,
        l2_bytes=37.5,
        missing_bytes=40.4,
        warpgroup=WarpgroupFit(fixed=-61.8, column=3.89),
        wait=68,
        fixed=0.86,
        epilogue=2.88,
        warpgroup_epilogue=1.78,
        tile=0.17,
        overlap=0.36,
        split_epilogue=2.1,
        exchange=0.6,
        block_exchange=0.01,
        more_exchanges=0.67,
    ),
    in_turn=TileFit(
        product=1.0,
        l2_bytes=33.0,
        missing_bytes=40.4,
        wait=26,
        fixed=0.5,
        epilogue=4.5,
        warpgroup_epilogue=1.58,
        tile=0.68,
    ),
)
"""Fitted to 700 timings of 51 products on an H100 (``bench/gemm_timings.py --kinds float8 int8 --seed 91001 --shapes
24`` and listed sizes). The L2 cache delivers fewer bytes in a cycle there than on an H200. ``missing_bytes``, tiles in
turn, ``promotion``, ``PROMOTED_SUM`` and ``PROMOTED_WAIT`` were fitted to 340 timings of 35 products of more than 160
rows on Hopper GPUs, each by the tiles that looked promising: of those, what the model chooses takes 1 to 3 % longer
than the fastest, and 11 % at worst."""
BYTES_OF_MANY_ROWS = DenseFits(
    jointly=TileFit(
        product=1.212,
        l2_bytes=48.6,
        missing_bytes=46.2,
        warpgroup=WarpgroupFit(fixed=-6, column=3.464),
        wait=125,
        fixed=1.71,
        epilogue=1.85,
        warpgroup_epilogue=0.51,
        tile=0.035,
        overlap=0.118,
        split_epilogue=3.3,
        exchange=0.6,
        block_exchange=0.01,
        more_exchanges=0.67,
    ),
    in_turn=TileFit(
        product=1.14,
        l2_bytes=47.6,
        missing_bytes=46.2,
        wait=12.4,
        shared_wait=111,
        fixed=1.49,
        epilogue=4.84,
        warpgroup_epilogue=1.4,
        tile=0.296,
    ),
)
"""Of 8-bit integers, and of 8-bit floats whose sums are not promoted, where x has more than 512 rows: fitted to 380
timings of 42 products of 524 to 8000 rows on an H200. What the model chooses takes 0.9 % longer than the fastest, and
5 % at worst; by ``BYTES`` and without tiles in turn that share x it was 6 %. Exchanges are those of ``BYTES``."""
PROMOTED = DenseFits(replace(BYTES.jointly, promotion=1.25), replace(BYTES.in_turn, promotion=1.71))
"""Of 8-bit floats whose sums are promoted."""
PROMOTED_OF_MANY_ROWS = DenseFits(
    jointly=TileFit(
        product=1.0,
        promoted_slice=150,
        l2_bytes=58.2,
        missing_bytes=58.2,
        warpgroup=BYTES.jointly.warpgroup,
        wait=181,
        shared_wait=24,
        fixed=0.86,
        epilogue=2.74,
        warpgroup_epilogue=1.66,
        tile=0.03,
        overlap=0.09,
        split_epilogue=2.1,
        exchange=0.6,
        block_exchange=0.01,
        more_exchanges=0.67,
    ),
    in_turn=PROMOTED.in_turn,
)
"""The same where x has more than 512 rows, fitted to 260 timings of eleven products of 788 to 7,684 rows with scales of
blocks and of rows on an H200; what the model chooses takes 1.3 % longer than the fastest, and 7 % at worst. ``fixed``,
``split_epilogue`` and the exchanges are those of ``BYTES``."""
PROMOTED_SUM = 1.34
"""Cycles that a warpgroup takes to add one sum of each thread to the sums of earlier stages (8-bit floats)."""
PROMOTED_WAIT = 195
"""Cycles for which a warpgroup has no wgmma under way then."""
