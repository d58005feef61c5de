"""Lists tiles of the wgmma mainloops, and estimates their times by the model of ``wgmma_model.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from jitgen.families.gemm.block_mainloops import CHUNK_BYTES
from jitgen.families.gemm.groups import Groups
from jitgen.families.gemm.mainloops import CHUNK, WgmmaBytes, WgmmaDense, WgmmaQuantized, WgmmaTiling
from jitgen.families.gemm.tile_times import sampled_rows
from jitgen.families.gemm.wgmma_model import (
    AREA,
    BYTE_DECODE,
    BYTES,
    BYTES_MISSING,
    BYTES_PINGPONG,
    BYTES_WARPGROUP,
    CODE_BLOCK,
    CODE_DECODE,
    CODE_EPILOGUE,
    CODE_SUM,
    CODE_TOKEN,
    DECODE,
    DENSE,
    DENSE_MISSING_BYTES,
    DENSE_PINGPONG,
    DENSE_WARPGROUP,
    GROUPED,
    GROUPED_DECODE,
    GROUPED_PLANES,
    LEAST_PRODUCT,
    PAIRS,
    PAIRS_PINGPONG,
    PROMOTED,
    PROMOTED_PINGPONG,
    PROMOTED_PRODUCT,
    PROMOTED_SUM,
    PROMOTED_TURN,
    PROMOTED_WAIT,
    QUANTIZED,
    QUANTIZED_BYTES,
    QUARTER_LINES,
    QUARTER_TOKENS,
    RANGE_STORES,
    SUMS_FIXED,
    SWAPPED_LINES,
    TALL_WAIT,
    UNPROMOTED,
    UNPROMOTED_MISSING,
    UNPROMOTED_PINGPONG,
    UNPROMOTED_WARPGROUP,
    TileFit,
    Times,
)
from jitgen.quant.codes import BLOCK
from jitgen.schedule.chips import Chip

WGMMA_SIZES = (16, 32, 64, 96, 128, 192, 256, 80, 112, 144, 160, 176, 208, 224, 240)
"""The n's that ``wgmma_atoms.cuh`` has."""
FEW_TOKENS = (16, 32, 64)
"""Rows of a tile where x has at most 64."""
MANY_TOKENS = (128, 96, 64, 80)
"""Rows of a tile where x has more than 64. Of the sizes, here as above, that have all rows of x, the least is the
largest candidate. Of the 90 products to which the model was first fitted none was fastest with 192 or 224, and one with
256, by 0.6 %."""
GROUP_TOKENS = (16, 32, 64, 96, 128)
"""Rows of a tile where the rows of x belong to groups: whatever these have on average, no size fits all."""
NARROW_TOKENS = {(96, 3, 1): (32, 64), (160, 3, 1): (96, 192)}
"""By rows of x, warpgroups and blocks of 64 rows of codes of a tile, those of a narrow one of a group that has no more,
and the rows of an average group up to which the last tile is so much of the work. Of 36 products of experts of 4-bit
codes on an H200 five were fastest with these, by up to 6 %, and they take at most 3 % longer than tiles of that size
without. Narrow ones of several sizes took up to 12 % longer."""
NARROW_GAIN = 0.5
"""The share of the products that narrow tiles leave out by which a kernel is faster: it ends with the blocks that have
the fewest of them (the same timings)."""
GROUP_TALL = ((160, 3),)
"""Rows of x and warpgroups, of a block of 64 rows of codes each, of further tiles of groups, where ``TALL_TOKENS`` are
candidates of other products too."""
GROUP_ROWS = 2
"""How many times the average a group of many rows has, which most of the rows are of."""
MEDIUM_ROWS = 512
"""Rows of x up to which tiles of more sizes than ``MANY_TOKENS`` are candidates, because a last tile that x does not
fill is a considerable share of the work."""
MEDIUM_TOKENS = (*MANY_TOKENS, 112, 144, 160, 176)
"""Rows of a tile where x has more than 64 and at most ``MEDIUM_ROWS``."""
WIDEST_PROMOTED = 160
"""Columns of a warpgroup whose sums are promoted, up to which its tiles may be of blocks that share K."""
ROW_STEP = 1.15
"""How many times the rows before are the next rows of a bucket for which tiles are compared, at most: which tiles leave
few multiprocessors idle changes that soon."""
BATCHES, BATCH_ROW_STEP = 3, 1.4
"""Numbers of products of a batch's bucket for which tiles are compared, and ``ROW_STEP`` of a batch."""
MOST_ROUNDS = 2.1
"""Tiles of a range of K for each block that is resident at once, up to which K is split into ranges."""
COMPLEMENTARY = 8
"""Tilings of which any may share a source."""


@dataclass(frozen=True)
class Weights:
    """Holds the facts on which a choice of tiles depends, besides the rows of x.

    Attributes:
        columns: N of each region.
        length: K.
        contractions: contractions of each region, 1 or 2.
        chip: whose multiprocessors, clusters and clock the model takes.
        bits: bits of a code, or of an element of dense weights.
        light: whether codes have 4 bits and no zero-points, x is bfloat16, and scales are bfloat16 or there are no
            groups. Other weights take more registers to decode, which a thread has only with two warpgroups.
        transposed: whether dense weights are contiguous along N, which takes a multiple of 64 columns.
        x_transposed: whether x is contiguous along M, which takes a multiple of 64 rows.
        item: bytes of an element of x.
        promoted: whether the sums of a stage are added to the others outside of wgmma, as those of 8-bit floats are.
        in_blocks: whether these sums have scales of blocks, of 128 columns.
        quantises: whether the result is quantised in blocks of 128 columns, which a warpgroup has whole.
        batch: the fewest and the most products of these sizes that a kernel computes.
        planes: whether codes lie in bit planes.
    """

    columns: tuple[int, ...]
    length: int
    contractions: int
    chip: Chip
    bits: int = 16
    light: bool = False
    transposed: bool = False
    x_transposed: bool = False
    item: int = 2
    promoted: bool = False
    in_blocks: bool = False
    quantises: bool = False
    batch: tuple[int, int] = (1, 1)
    planes: bool = False

    @property
    def dense(self) -> bool:
        """Returns whether weights have the width of x, and are multiplied as they are."""
        return self.bits == 8 * self.item

    @property
    def chunk(self) -> int:
        """Returns the k's of 128 bytes of x."""
        return 2 * CHUNK // self.item


SHAPES = ((2, 2, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2), (1, 1, 3))
"""Warpgroups that compute, blocks of 64 rows of each, and blocks that a multiprocessor holds at once."""
MOST_SUMS = {(2, 1): 256, (3, 1): 128, (4, 1): 32, (1, 2): 224, (1, 3): 64}
"""By warpgroups and resident blocks, the most rows of x times blocks of 64 rows of the weight of a warpgroup: without
spills, as NVRTC 13.0 compiles it."""


def candidates(fewest: int, most: int, weights: Weights) -> list[WgmmaTiling]:
    """Lists the tiles that a kernel for ``fewest`` to ``most`` rows of x can have, each with the most splits from which
    any of these rows gains."""
    sizes = FEW_TOKENS if most <= FEW_TOKENS[-1] else MEDIUM_TOKENS if most <= MEDIUM_ROWS else MANY_TOKENS
    largest = min((tokens for tokens in sizes if tokens >= most), default=max(sizes))
    small = [tokens for tokens in sizes if tokens <= largest]
    of_codes = (
        *_quantized_tilings(small, weights),
        *(_tall_tilings([(tokens, 3) for tokens in TALL_TOKENS], weights) if most > MANY_TOKENS[0] else ()),
        *_tall_byte_tilings(most, weights),
        *_tall_code_tilings(most, weights),
    )
    tilings = _dense_tilings(most, weights) if weights.dense else of_codes
    return [_gaining(tiling, fewest, most, weights) for tiling in tilings]


def _gaining(tiling: WgmmaTiling, fewest: int, most: int, weights: Weights) -> WgmmaTiling:
    if tiling.cluster_k_splits == 1:
        return tiling
    splits = max(estimate(tiling, rows, weights, count)[0] for rows, count in _sampled(fewest, most, weights))
    return replace(tiling, cluster_k_splits=splits)


def cost(tilings: Sequence[WgmmaTiling], fewest: int, most: int, weights: Weights) -> float:
    """Estimates the time in microseconds of the best of ``tilings`` for each number of rows and of products, by the
    geometric mean over rows from ``fewest`` to ``most`` and over the products of a batch."""
    estimates = [times(tiling, fewest, most, weights) for tiling in tilings]
    return math.exp(sum(math.log(min(column)) for column in zip(*estimates, strict=True)) / len(estimates[0]))


def complementary(tilings: Sequence[WgmmaTiling], fewest: int, most: int, weights: Weights) -> list[WgmmaTiling]:
    """Returns ``COMPLEMENTARY`` of ``tilings``: the best for rows from ``fewest`` to ``most``, and each time that with
    which the best for each number of rows is the fastest."""
    left = {tiling: [math.log(time) for time in times(tiling, fewest, most, weights)] for tiling in tilings}
    least = [math.inf] * len(_sampled(fewest, most, weights))
    chosen: list[WgmmaTiling] = []
    while left and len(chosen) < COMPLEMENTARY:
        chosen.append(min(left, key=lambda tiling: sum(map(min, left[tiling], least))))
        least = list(map(min, left.pop(chosen[-1]), least))
    return chosen


@functools.lru_cache(maxsize=4096)
def times(tiling: WgmmaTiling, fewest: int, most: int, weights: Weights) -> tuple[float, ...]:
    """Estimates the time of ``tiling`` in microseconds, for each of the sampled sizes."""
    return tuple(estimate(tiling, rows, weights, count)[1] for rows, count in _sampled(fewest, most, weights))


def _sampled(fewest: int, most: int, weights: Weights) -> list[tuple[int, int]]:
    """Returns the numbers of rows, and of products of a batch, for which tiles are compared: rows of a bucket, each at
    most ``ROW_STEP`` times the one before, or of a batch ``BATCH_ROW_STEP``."""
    step = ROW_STEP if weights.batch == (1, 1) else BATCH_ROW_STEP
    rows = sampled_rows(fewest, most, max(2, 1 + math.ceil(math.log(most / fewest, step))))
    return [(count, products) for products in sampled_rows(*weights.batch, BATCHES) for count in rows]


def estimate(tiling: WgmmaTiling, rows: int, weights: Weights, products: int = 1) -> tuple[int, float]:
    """Returns how many blocks of a cluster should share K, at most ``tiling.cluster_k_splits``, and the estimated time
    of a kernel of so many products that has the device for itself, in microseconds."""
    if isinstance(tiling, WgmmaQuantized):
        return _estimate_quantized(tiling, rows, weights)
    return _estimate_dense(tiling, rows, weights, products=products)


MOST_CODE_SUMS = {(2, 1): 128, (3, 1): 64, (4, 1): 32, (1, 2): 128, (1, 3): 32}
"""The same where x is int8: a thread has int32 sums of a group beside the float32 ones."""


WIDEST_SPAN = 192
"""Rows of x, of all resident blocks together, up to which a stage of codes of eight bits has two chunks of K."""
BYTE_LENGTH = 4 * CHUNK
"""K above which it has: a shorter one would be padded to pairs of chunks."""
MOST_SPLIT_SUMS = 192
"""Rows of x times blocks of 64 rows of such codes of a warpgroup, of which it has two, up to which it has the registers
to exchange sums: with what NVRTC 13.0 spills, tiles of 128 x 256 took 13 % longer, whether K was split or not."""


def _quantized_tilings(sizes: Sequence[int], weights: Weights) -> Iterator[WgmmaQuantized]:
    for tokens in sizes:
        for warpgroups, blocks, resident in SHAPES:
            most = (MOST_SUMS if weights.item == 2 else MOST_CODE_SUMS)[warpgroups, resident]
            if blocks % weights.contractions or blocks * tokens > most:
                continue
            if resident > 1 and blocks > 1 and tokens < 64:
                continue  # another shape was always faster
            if not weights.light and weights.item == 2 and (warpgroups > 2 or warpgroups * resident > 2):
                continue
            if weights.item == 1:
                splits = max(weights.chip.resident_clusters)
                shape = (tokens, warpgroups, blocks, 2, weights.contractions)
                yield WgmmaQuantized(*shape, stages=8, cluster_k_splits=splits, resident=resident)
                continue
            of_bytes = weights.bits == 8
            if of_bytes and blocks > weights.contractions and max(sizes) > FEW_TOKENS[-1]:
                continue  # of nineteen products none was fastest with two blocks
            span = 2 if weights.bits <= 4 and blocks * tokens <= 128 and weights.length > CHUNK else 1
            if of_bytes:
                span = 2 if blocks == 1 and resident * tokens <= WIDEST_SPAN and weights.length > BYTE_LENGTH else 1
            spilling = of_bytes and blocks > 1 and blocks * tokens > MOST_SPLIT_SUMS
            yield WgmmaQuantized(
                *(tokens, warpgroups, blocks, span, weights.contractions),
                stages=8 if span == 1 else 5,  # more of them gain nothing
                cluster_k_splits=1 if spilling else max(weights.chip.resident_clusters),
                resident=resident,
            )


TALL_TOKENS = (144, 160, 176)
"""Rows of x of tiles of three warpgroups, besides those of ``SHAPES``, where x has 16 bits and more than 128 rows, and
codes four: a warpgroup has one block of 64 rows, whose decoded weights it multiplies by more rows of x. Of eight
products of 150 to 4183 rows four were fastest with such tiles (30 tiles on an H200), by 1 to 10 %."""


TALL_BYTES = (
    *((tokens, 2) for tokens in (144, 160, 176, 192, 224, 256)),
    *((tokens, 3) for tokens in (96, 112, 128, 144, 160, 176)),
)
"""Rows of x and warpgroups of such tiles of codes of eight bits, which take as long to decode as wgmmas of 70 rows of
x: of nineteen products of 85 to 7884 rows on an H200 eleven were fastest with them, by up to 30 %. Three warpgroups
have no registers to exchange sums."""


def _tall_byte_tilings(rows: int, weights: Weights) -> Iterator[WgmmaQuantized]:
    if weights.item == 1 or weights.bits != 8 or weights.contractions > 1 or rows <= FEW_TOKENS[-1]:
        return
    for tokens, warpgroups in TALL_BYTES:
        span = 2 if tokens <= 144 and weights.length > BYTE_LENGTH else 1
        splits = 1 if warpgroups > 2 else max(weights.chip.resident_clusters)
        yield WgmmaQuantized(tokens, warpgroups, 1, span, stages=8 // span, cluster_k_splits=splits)


def _tall_tilings(tall: Sequence[tuple[int, int]], weights: Weights) -> Iterator[WgmmaQuantized]:
    if weights.item == 1 or weights.bits != 4 or not weights.light or weights.contractions > 1:
        return
    for tokens, warpgroups in tall:
        span = 2 if tokens <= 160 and weights.length > CHUNK else 1  # as many stages as hide the copies
        yield WgmmaQuantized(tokens, warpgroups, 1, span, stages=8)


_TALL_CODES = ((144, 2), (160, 2), (176, 2), (192, 2), (80, 3), (96, 3), (112, 3))
"""Rows of x and warpgroups of tiles of one block of 64 rows of codes where x is int8, besides those of ``SHAPES``.
Where two blocks shared x's tile those of 176 rows took 1 to 3 % longer (12 products on an H200)."""
MOST_SPLIT_CODES = 160
"""Rows of x of a tile up to which two warpgroups have the registers to exchange sums that a cluster shares."""


def _tall_code_tilings(rows: int, weights: Weights) -> Iterator[WgmmaQuantized]:
    if weights.item == 2 or weights.contractions > 1 or rows <= FEW_TOKENS[-1]:
        return
    for tokens, warpgroups in _TALL_CODES:
        splits = max(weights.chip.resident_clusters) if warpgroups == 2 and tokens <= MOST_SPLIT_CODES else 1
        yield WgmmaQuantized(tokens, warpgroups, 1, 2, stages=8, cluster_k_splits=splits)


def _estimate_quantized(
    tiles: WgmmaQuantized, rows: int, weights: Weights, groups: Groups | None = None
) -> tuple[int, float]:
    fit = QUANTIZED_BYTES if weights.bits == 8 else QUANTIZED
    height, blocks = tiles.warpgroups * tiles.blocks_of_rows, tiles.blocks_of_rows
    down = -(-rows // tiles.tokens) if groups is None else math.ceil(groups.tiles(tiles.tokens))
    short = groups.share_of_short(tiles.narrow) if groups is not None and tiles.narrow else 0.0
    tokens = tiles.tokens - NARROW_GAIN * short * (tiles.tokens - tiles.narrow)
    share = tiles.multicast
    items = down * sum(-(-n // (tiles.block_n * share)) * share for n in weights.columns) * tiles.k_splits
    steps = 2 * weights.item  # wgmmas of a chunk
    products = steps * max(tokens / 2, LEAST_PRODUCT) * fit.product  # of 64 rows of the weight
    grouped = groups is not None and weights.item == 2
    decoding = DECODE if not grouped else GROUPED_PLANES if weights.planes else GROUPED_DECODE
    decoding = BYTE_DECODE if weights.bits == 8 else decoding
    if weights.item == 2:
        decode = decoding.blocks(blocks)
        together = height * products + tiles.warpgroups * decode
    else:
        decode = blocks * (CODE_DECODE + CODE_SUM * tokens / 4)
        together = height * (CODE_BLOCK + CODE_TOKEN * tokens)
    fetched = tiles.tokens * weights.item * CHUNK / share + height * CHUNK * 8 * weights.bits
    alone = blocks * products + decode + decoding.fixed
    cycle = tiles.span / weights.chip.microsecond_cycles

    def chunk(sharing: int, split: bool) -> float:
        wait = (fit.wait + split * fit.split_wait) / tiles.span
        return max(max(together, fetched / fit.l2_bytes) * sharing + wait, alone) * cycle

    def epilogue(sharing: int) -> float:
        area = tokens * height * 64 / AREA
        stores, instructions = fit.epilogue * sharing, fit.warpgroup_epilogue / tiles.warpgroups
        few = QUARTER_TOKENS if tiles.tokens % 32 and tiles.tokens > MANY_TOKENS[0] else 1.0
        if weights.item == 1:
            few = CODE_EPILOGUE
        return few * area * max(stores, instructions) + fit.tile

    chunks = -(-weights.length // (tiles.block_k * tiles.k_splits))
    moved = _moved(rows, weights, weights.bits + 0.125, tiles.k_splits, groups)
    times = Times(fit, chunks, chunk, epilogue, tiles.resident, moved)
    if share > 1:
        return 1, times.unsplit(weights.chip, items, share)
    return times.least(weights.chip, items, tiles.cluster_k_splits)


def in_ranges(tilings: Sequence[WgmmaTiling], ranges: int) -> list[WgmmaTiling]:
    """Returns those of ``tilings`` that can sum ``ranges`` ranges of K separately, which they then do."""
    shares = [tiling for tiling in tilings if tiling.cluster == 1 or type(tiling) is WgmmaDense]
    able = [tiling for tiling in shares if not tiling.pingpong]
    return [replace(tiling, k_splits=ranges, cluster_k_splits=1) for tiling in able]


def occupying(tilings: Sequence[WgmmaTiling], fewest: int, most: int, weights: Weights) -> list[WgmmaTiling]:
    """Returns those of ``tilings`` that have between half a tile and ``MOST_ROUNDS`` tiles for each block that is
    resident, for some number of rows: with fewer, more ranges of K are as well, and with more, fewer."""
    room = weights.chip.multiprocessors
    kept = []
    for tiling in tilings:
        across = sum(-(-columns // tiling.block_n) for columns in weights.columns) * tiling.k_splits
        least, largest = (-(-rows // tiling.block_m) * across / (room * tiling.resident) for rows in (fewest, most))
        if least <= MOST_ROUNDS and largest >= 0.5:
            kept.append(tiling)
    return kept


def ideal_microseconds(rows: int, weights: Weights) -> float:
    """Returns the time in which the chip multiplies at its best rate, or moves operands and results, whichever is
    longer."""
    operations = 2.0 * rows * sum(weights.columns) * weights.contractions * weights.length
    rate = weights.chip.matrix_rate or weights.chip.matrix
    return max(operations / rate, _moved(rows, weights, weights.bits, 1, None) / weights.chip.reads) * 1e6


def sums_microseconds(ranges: int, rows: int, weights: Weights) -> float:
    """Estimates the time of the kernel that adds the sums of ``ranges`` ranges; 0 for one."""
    if ranges == 1:
        return 0.0
    return SUMS_FIXED + rows * sum(weights.columns) * weights.contractions * ranges * 4 / weights.chip.reads * 1e6


def _moved(rows: int, weights: Weights, bits: float, ranges: int, groups: Groups | None) -> float:
    """Counts the bytes of x, of weights of so many bits, scales included, and of the results."""
    read = 1.0 if groups is None else groups.used
    columns = sum(weights.columns)
    results = columns * (2 if ranges == 1 else 4 * ranges * weights.contractions)
    of_x = weights.length * weights.item
    return read * weights.contractions * columns * weights.length * bits / 8 + rows * (of_x + results)


# ------------------------------------------------------------------------------------------------------------- dense


_DENSE = (
    WgmmaDense(2, 1, 256, stages=4, multicast=2),
    WgmmaDense(2, 1, 256, stages=4),
    WgmmaDense(2, 1, 224, stages=4, staged=32),
    WgmmaDense(2, 1, 192, stages=4),
    WgmmaDense(2, 1, 96, stages=7, staged=32),
    WgmmaDense(2, 1, 64, stages=8),
    WgmmaDense(3, 1, 128, stages=5, staged=32),
    WgmmaDense(1, 2, 192, stages=6, staged=32),
    WgmmaDense(1, 2, 128, stages=8),
    WgmmaDense(1, 1, 128, stages=8),
    WgmmaDense(1, 1, 96, stages=8, staged=32),
    WgmmaDense(1, 1, 64, stages=8),
    WgmmaDense(1, 1, 32, stages=8, resident=2, staged=32),
    WgmmaDense(2, 1, 160, stages=5, multicast=2, staged=32, pingpong=True),
    WgmmaDense(2, 1, 128, stages=6, multicast=2, pingpong=True),
    WgmmaDense(2, 1, 128, stages=6, pingpong=True),
    WgmmaDense(1, 1, 256, stages=4, multicast=2, pingpong=True),
    WgmmaDense(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of one product of matrices: of 45 that were timed on an H100, these include the fastest or one that takes 3 %
longer at most."""

_BATCHED = (
    WgmmaDense(2, 1, 256, stages=4),
    WgmmaDense(2, 1, 192, stages=4),
    WgmmaDense(2, 1, 128, stages=5),
    WgmmaDense(2, 1, 64, stages=3, resident=2),
    WgmmaDense(1, 1, 128, stages=4, resident=2),
    WgmmaDense(1, 1, 64, stages=4, resident=3),
    WgmmaDense(2, 1, 128, stages=6, pingpong=True),
    WgmmaDense(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of a batch of products. Their K is often short, so that most of the bytes moved are results."""

_FEW_ROWS = (
    WgmmaDense(1, 1, 16, stages=12, staged=16, swapped=True),
    WgmmaDense(2, 1, 16, stages=12, staged=16, swapped=True),
    WgmmaDense(1, 1, 16, stages=5, resident=4, staged=16, swapped=True),
    WgmmaDense(1, 1, 32, stages=8, resident=2, staged=32, swapped=True),
)
"""Further tiles of a batch whose x have at most ``FEW_TOKENS`` rows. Of twelve batches of 1 to 16 rows with weights
along N, eight were fastest with one of them on an H200, and the others with tiles of 64 columns: they took 0.65 to 0.95
of the time of the ``columns`` mainloop."""


_GROUPED = (
    *_BATCHED,
    WgmmaDense(2, 1, 256, stages=4, multicast=2),
    WgmmaDense(2, 1, 192, stages=4, multicast=2),
    WgmmaDense(2, 1, 128, stages=6, multicast=2, pingpong=True),
    WgmmaDense(1, 1, 256, stages=4, multicast=2, pingpong=True),
)
"""Tiles of a product of groups of rows."""
_GROUPED_IN_TURN = (WgmmaDense(2, 1, 128, stages=6, multicast=2, pingpong=True, shares_x=True),)
"""Further tiles of groups of more than 64 rows on average, of one contraction: of 14 products on an H200 they have
0.949 of the speed of the fastest of 12 tiles, and 0.84 at worst, where what was chosen without them has 0.922 and 0.71;
of 5 on an H100 0.981 and 0.94, and 0.887 and 0.75 (``h200-grouped-tiles.json``, ``h100-grouped-tiles.json``)."""
IN_TURN = 0.76
"""What such tiles take of their estimate by the constants of ``GROUPED`` (the same products)."""


_DENSE_OF_MANY_ROWS = (
    WgmmaDense(2, 1, 256, stages=4, multicast=2, shares_x=True),
    WgmmaDense(2, 1, 192, stages=4, multicast=2, shares_x=True),
    WgmmaDense(3, 1, 192, stages=4, multicast=2, shares_x=True, staged=32),
    WgmmaDense(2, 1, 160, stages=5, multicast=2, shares_x=True, staged=32, pingpong=True),
    WgmmaDense(1, 1, 256, stages=4, multicast=2, shares_x=True, pingpong=True),
    WgmmaDense(1, 1, 192, stages=5, pingpong=True),
)
"""Further tiles of x with more rows than ``FEW_TOKENS`` has."""


def _arranged(
    down: int,
    columns: int,
    x: int = 1,
    weights: int = 1,
    swapped: bool = False,
    blocks: int = 1,
    pingpong: bool = False,
) -> WgmmaDense:
    """Makes a tile whose x so many blocks share, and whose weights so many, with as many stages as fit."""
    staged = next(size for size in (64, 32, 16)[swapped or down == 3 :] if columns % size == 0)
    return WgmmaDense(
        *(down, 1, columns, max(x, weights), x > 1 and x >= weights, staged, pingpong),
        stages=12,
        swapped=swapped,
        blocks=blocks,
        other_multicast=min(x, weights),
    )


ARRANGED = (
    _arranged(1, 32, x=4),
    _arranged(1, 64, x=2),
    _arranged(1, 64, x=4, weights=2),
    _arranged(1, 96, x=4, weights=2),
    _arranged(1, 128, x=4, weights=2),
    _arranged(1, 128, x=2, weights=4),
    _arranged(1, 192, weights=4, pingpong=True),
    _arranged(2, 96, x=2, weights=2),
    _arranged(2, 128, x=2, weights=2),
    _arranged(2, 128, x=4, weights=2),
    _arranged(2, 128, x=4, weights=2, pingpong=True),
    _arranged(2, 160, weights=2),
    _arranged(2, 160, x=2),
    _arranged(2, 160, x=4, weights=2, pingpong=True),
    _arranged(2, 192, x=2, weights=2),
    _arranged(2, 192, x=2, weights=4),
    _arranged(2, 224, x=2),
    _arranged(2, 256, x=2, weights=2),
    _arranged(2, 256, x=2, weights=4),
    _arranged(3, 96, x=4, weights=2),
    _arranged(3, 128, x=4),
    _arranged(3, 160),
    _arranged(3, 160, x=4),
    _arranged(1, 144, x=4, swapped=True),
    _arranged(1, 96, x=4, weights=2, swapped=True),
    _arranged(2, 96, swapped=True),
    _arranged(2, 96, x=4, weights=2, swapped=True),
    _arranged(2, 96, x=4, weights=2, swapped=True, pingpong=True),
    _arranged(2, 112, weights=2, swapped=True),
    _arranged(2, 128, x=2, weights=4, swapped=True),
    _arranged(2, 160, x=4, weights=2, swapped=True),
    _arranged(2, 160, x=4, weights=2, swapped=True, pingpong=True),
    _arranged(2, 192, x=4, weights=2, swapped=True),
    _arranged(2, 224, weights=2, swapped=True),
    _arranged(2, 224, x=2, swapped=True),
    _arranged(3, 96, weights=2, swapped=True),
    _arranged(3, 96, x=2, weights=4, swapped=True),
    _arranged(3, 128, x=2, weights=4, swapped=True),
    _arranged(3, 160, swapped=True),
    _arranged(3, 160, x=2, swapped=True),
    _arranged(3, 160, x=2, weights=4, swapped=True),
    _arranged(3, 192, swapped=True),
    _arranged(3, 192, x=2, swapped=True),
    _arranged(2, 160, x=2, swapped=True, blocks=2),
)
"""Tiles of one product of more rows, with x and the weights swapped or of clusters that share operands: of some 120
that were timed on an H200, and of 80 by the model for 400 random products, those without which the fastest of the
others takes longer (``docs/measured/h200-candidates-fitted-3.json``)."""

_BYTES = (
    WgmmaBytes(2, 1, 256, stages=4, multicast=2),
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(2, 1, 224, stages=4, staged=32),
    WgmmaBytes(2, 1, 192, stages=4),
    WgmmaBytes(2, 1, 160, stages=5, staged=32),
    WgmmaBytes(2, 1, 128, stages=6),
    WgmmaBytes(2, 1, 96, stages=7, staged=32),
    WgmmaBytes(2, 1, 64, stages=8),
    WgmmaBytes(3, 1, 128, stages=5, staged=32),
    WgmmaBytes(1, 2, 256, stages=5, staged=32),
    WgmmaBytes(1, 2, 192, stages=6, staged=32),
    WgmmaBytes(1, 2, 128, stages=8),
    WgmmaBytes(1, 1, 128, stages=8),
    WgmmaBytes(1, 1, 96, stages=8, staged=32),
    WgmmaBytes(1, 1, 64, stages=8),
    WgmmaBytes(1, 1, 32, stages=8, resident=2, staged=32),
    WgmmaBytes(1, 1, 128, stages=4, resident=2),
    WgmmaBytes(2, 1, 160, stages=5, multicast=2, staged=32, pingpong=True),
    WgmmaBytes(2, 1, 128, stages=6, multicast=2, pingpong=True),
    WgmmaBytes(2, 1, 128, stages=6, pingpong=True),
    WgmmaBytes(2, 1, 160, stages=5, multicast=2, shares_x=True, staged=32, pingpong=True),
    WgmmaBytes(2, 1, 128, stages=6, multicast=2, shares_x=True, pingpong=True),
    WgmmaBytes(2, 1, 96, stages=7, staged=32, pingpong=True),
    WgmmaBytes(1, 1, 256, stages=4, multicast=2, pingpong=True),
    WgmmaBytes(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of one product of 8-bit integers."""

_PROMOTED = (
    WgmmaBytes(2, 1, 256, stages=4, multicast=2),
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(3, 1, 128, stages=5, staged=32),
    WgmmaBytes(2, 1, 192, stages=4, multicast=2),
    WgmmaBytes(2, 1, 192, stages=4),
    WgmmaBytes(2, 1, 160, stages=4, multicast=2, staged=32),
    WgmmaBytes(2, 1, 160, stages=5, staged=32),
    WgmmaBytes(2, 1, 128, stages=6, multicast=2),
    WgmmaBytes(2, 1, 128, stages=6),
    WgmmaBytes(2, 1, 96, stages=7, staged=32),
    WgmmaBytes(2, 1, 64, stages=8),
    WgmmaBytes(1, 2, 256, stages=5, staged=32),
    WgmmaBytes(1, 2, 192, stages=6, staged=32),
    WgmmaBytes(1, 2, 128, stages=8),
    WgmmaBytes(1, 1, 128, stages=8),
    WgmmaBytes(1, 1, 96, stages=8, staged=32),
    WgmmaBytes(1, 1, 64, stages=8),
    WgmmaBytes(1, 1, 32, stages=8, resident=2, staged=32),
    WgmmaBytes(1, 1, 128, stages=4, resident=2),
    WgmmaBytes(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of one product of 8-bit floats, whose threads have two numbers for each sum. Their warpgroups start products as
they come. Where they started them in turns, tiles of 256 columns took 4 to 11 % longer and those of 128 between 4 %
less and 6 % more if a turn ended with the start of products, and the wide ones 22 to 28 % longer if it ended with
the sums (eight products on a Hopper GPU)."""

_QUANTISING_TWO = (
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(1, 1, 256, stages=5),
)
"""Tiles of two products of which the result is quantised, so that a warpgroup has 128 columns of each. Where two blocks
shared a weight's tile they took 7 % longer for 4096 rows of Llama-3-8B's gate and up and 34 % for 128 (H200), and tiles
in turn 9 to 28 % longer from 512 rows on."""

_BATCHED_BYTES = (
    WgmmaBytes(2, 1, 128, stages=5),
    WgmmaBytes(2, 1, 64, stages=3, resident=2),
    WgmmaBytes(1, 1, 128, stages=4, resident=2),
    WgmmaBytes(1, 1, 64, stages=4, resident=3),
    WgmmaBytes(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of a batch of products of operands of one byte."""

_GROUPED_BYTES = (
    *_BATCHED_BYTES,
    WgmmaBytes(2, 1, 256, stages=4, multicast=2),
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(2, 1, 128, stages=6, multicast=2),
    WgmmaBytes(2, 1, 128, stages=6),
    WgmmaBytes(1, 2, 256, stages=5, staged=32),
    WgmmaBytes(1, 2, 128, stages=8),
    WgmmaBytes(1, 1, 128, stages=8),
)
"""Tiles of a product of groups of rows of such, beside those."""


def _dense_tilings(rows: int, weights: Weights) -> list[WgmmaDense]:
    dense: tuple[WgmmaDense, ...] = (*_DENSE, *_DENSE_OF_MANY_ROWS) if rows > FEW_TOKENS[-1] else _DENSE
    is_one = len(weights.columns) == weights.contractions == 1
    if rows > FEW_TOKENS[-1] and is_one:
        dense += ARRANGED
    of_bytes: tuple[WgmmaDense, ...] = _PROMOTED if weights.promoted else _BYTES
    if weights.quantises and weights.contractions > 1:
        of_bytes = _QUANTISING_TWO
    if weights.batch != (1, 1):
        few = _FEW_ROWS if rows <= FEW_TOKENS[-1] else ()
        dense, of_bytes = tuple(dict.fromkeys((*dense, *_BATCHED, *few))), _BATCHED_BYTES
    table = dense if weights.item == 2 else of_bytes
    return [_splitting(tiles, weights) for tiles in _fitting(table, rows, weights)]


def _splitting(tiles: WgmmaDense, weights: Weights) -> WgmmaDense:
    """Returns ``tiles`` with as many splits as a cluster may have, if partial sums fit where the stages are."""
    contractions = weights.contractions
    stages = tiles.stages * (tiles.block_m + tiles.block_n * contractions) * CHUNK_BYTES
    sums = contractions * tiles.block_m * (tiles.block_n + 8) * 4
    # Wide tiles of three warpgroups, and those whose sums are promoted, have no registers to exchange them; three
    # warpgroups whose sums are promoted never have. With narrow tiles of 16 bits of which a multiprocessor has several,
    # other ones were always faster.
    wide = weights.promoted and tiles.columns * contractions // tiles.across > WIDEST_PROMOTED
    wide = wide or (tiles.down == 3 and (weights.promoted or tiles.columns * contractions > 160))
    wide = wide and not (weights.quantises and tiles.down * tiles.across == 1)  # one warpgroup has the registers
    whole = tiles.swapped or tiles.pingpong or tiles.blocks > 1 or tiles.cluster > 2  # a tile of these is of one block
    if sums > stages or whole or wide or (tiles.resident > 1 and weights.item == 2):
        return tiles
    splits = tiles.multicast if tiles.multicast > 1 else max(weights.chip.resident_clusters)
    return replace(tiles, cluster_k_splits=splits)


def grouped_candidates(rows: int, weights: Weights) -> Sequence[WgmmaTiling]:
    """Lists the tiles that a kernel for groups of rows, ``rows`` on average, can have."""
    if weights.dense:
        if weights.item == 1:
            return _fitting(_GROUPED_BYTES, rows, weights)
        in_turn = _GROUPED_IN_TURN if rows > FEW_TOKENS[-1] and weights.contractions == 1 else ()
        return _fitting((*_GROUPED, *in_turn), rows, weights)
    most = max(GROUP_TOKENS[0], 2 * GROUP_ROWS * rows)
    tall = _tall_tilings(GROUP_TALL, weights)
    whole = [
        replace(tiles, cluster_k_splits=1)
        for tiles in (*_quantized_tilings(GROUP_TOKENS, weights), *tall)
        if tiles.tokens <= most and (tiles.tokens > 32 or tiles.blocks_of_rows == 2)
    ]  # of few rows, other shapes were always slower than two warpgroups of two blocks
    if not weights.light or weights.item == 1 or weights.bits != 4:
        return whole
    if weights.contractions == 1:  # three warpgroups of a block each were always faster than two
        whole = [tiles for tiles in whole if tiles.resident > 1 or tiles.warpgroups * tiles.blocks_of_rows > 2]
    shapes = {tiles: (tiles.tokens, tiles.warpgroups, tiles.blocks_of_rows) for tiles in whole}
    narrow = {tiles: NARROW_TOKENS.get(shape, (0, 0)) for tiles, shape in shapes.items()}
    return [*whole, *(replace(tiles, narrow=tokens) for tiles, (tokens, upto) in narrow.items() if rows <= upto)]


def grouped_microseconds(tiles: WgmmaTiling, divisions: Sequence[Groups], weights: Weights) -> float:
    """Estimates the time of a product of groups of rows, by the geometric mean over ``divisions``."""
    if isinstance(tiles, WgmmaDense) and weights.item == 2:
        most = divisions[-1]
        return _evenly_grouped_microseconds(tiles, -(-most.rows // most.count), most.count, weights)
    estimate = _estimate_dense if isinstance(tiles, WgmmaDense) else _estimate_quantized
    return geometric_mean(estimate(tiles, groups.rows, weights, groups)[1] for groups in divisions)  # type: ignore[arg-type]


def _fitting(table: Sequence[WgmmaDense], rows: int, weights: Weights) -> list[WgmmaDense]:
    """Lists the tiles of ``table`` for these rows, with the columns of one contraction each."""
    tilings = [replace(tiles, columns=tiles.columns // weights.contractions) for tiles in table]
    return [tiling for tiling in tilings if _fits(tiling, rows, weights)]


def _fits(tiles: WgmmaDense, rows: int, weights: Weights) -> bool:
    # Of the matrix that gives a tile its rows, and of the other one.
    tall, crossed, others_crossed = rows, weights.x_transposed, weights.transposed
    tall_shares, wide_shares = tiles.shares
    if tiles.swapped:
        if len(weights.columns) * weights.contractions > 1:
            return False
        tall, crossed, others_crossed = sum(weights.columns), weights.transposed, weights.x_transposed
        tall_shares, wide_shares = wide_shares, tall_shares
    if tall <= tiles.height - 64 or (crossed and tiles.height % (64 * tall_shares)):
        return False
    width = tiles.columns // tiles.across
    if weights.in_blocks and BLOCK % width and width % BLOCK:
        return False
    if weights.quantises and width % BLOCK:
        return False
    if tiles.swapped and not others_crossed:  # pieces of such a tile may overlap
        return width in WGMMA_SIZES
    unit = (64 if others_crossed else 16) * max(tiles.across, wide_shares)
    return width in WGMMA_SIZES and tiles.columns % unit == 0


def _fit_of(tiles: WgmmaDense, rows: int, weights: Weights, is_one: bool) -> tuple[TileFit, bool]:
    """Returns the constants of a tile, and whether they are those of bytes and many rows. ``is_one``: whether there is
    one product, and no groups."""
    if weights.item == 2:
        return DENSE_PINGPONG if tiles.pingpong else DENSE, False
    if rows > MEDIUM_ROWS and weights.promoted and not tiles.pingpong:
        return PROMOTED, True
    if rows > MEDIUM_ROWS and is_one and not weights.promoted:
        return UNPROMOTED_PINGPONG if tiles.pingpong else UNPROMOTED, True
    return BYTES_PINGPONG if tiles.pingpong else BYTES, False


def _estimate_dense(
    tiles: WgmmaDense, rows: int, weights: Weights, groups: Groups | None = None, products: int = 1
) -> tuple[int, float]:
    of_bytes = weights.item == 1
    fit, many = _fit_of(tiles, rows, weights, groups is None and products == 1)
    if products > 1 and not of_bytes:
        pairs = PAIRS_PINGPONG if tiles.pingpong else PAIRS
        fit = replace(fit, epilogue=fit.epilogue * pairs, half_lines=1.0)
    if tiles.cluster > 1 and fit.cluster:
        fit = replace(fit, fixed=fit.fixed + math.log2(tiles.cluster) * fit.cluster)
    # Of a tile as wgmma has it, whose rows are those of the weight where these are swapped.
    height, width = tiles.height, tiles.columns * weights.contractions
    tall, wide = (sum(weights.columns), (rows,)) if tiles.swapped else (rows, weights.columns)
    x_shares, weight_shares = tiles.shares[::-1] if tiles.swapped else tiles.shares
    across = sum(-(-n // (tiles.columns * x_shares)) * x_shares for n in wide)
    band = height * weight_shares
    down = -(-tall // band) if groups is None else math.ceil(groups.tiles(band))
    items = products * down * weight_shares * across * tiles.k_splits
    columns = weights.columns if weights.transposed else (weights.length,)
    x_lines = fit.across_lines if _across_lines(weights.item, rows if weights.x_transposed else weights.length) else 1.0
    weight_lines = fit.across_lines if _across_lines(weights.item, *columns) else 1.0
    chunks = -(-weights.length // (weights.chunk * tiles.k_splits))
    # A copy has no more rows than its matrix, and the last one of K no more columns.
    copied = (height, width) if of_bytes else (min(height, tall), min(width, max(wide)))
    depth = 1.0 if of_bytes else weights.length / (chunks * weights.chunk * tiles.k_splits)
    fetched = depth * (copied[0] / x_shares * x_lines + copied[1] / weight_shares * weight_lines) * CHUNK_BYTES
    of_bytes_alone = UNPROMOTED_WARPGROUP if many and not weights.promoted else BYTES_WARPGROUP
    warpgroup = of_bytes_alone if of_bytes else DENSE_WARPGROUP
    alone = tiles.blocks * width / tiles.across * warpgroup.column + warpgroup.fixed
    if weights.promoted:
        alone += width / tiles.across / 2 * PROMOTED_SUM + PROMOTED_WAIT
    # A warpgroup without rows of x multiplies nothing. Where blocks have several tiles, few of these are the last ones.
    several = items > weights.chip.multiprocessors and not tiles.pingpong and not of_bytes
    live = -(-tall // 64) * 64 / -(-tall // height) if several else height
    wgmmas = live * width / 32 * fit.product
    if weights.promoted:
        wgmmas *= PROMOTED_PINGPONG if tiles.pingpong else 1.0 if many else PROMOTED_PRODUCT
        wgmmas += slices(tiles.columns // tiles.across) * tiles.blocks * PROMOTED_TURN if many else 0
    matrices = 1.0 if groups is None else groups.used
    read = products * (rows + matrices * sum(weights.columns)) * weights.length * weights.item
    in_l2 = read <= weights.chip.l2_bytes
    missing = BYTES_MISSING if of_bytes else DENSE_MISSING_BYTES
    if many:
        missing = fit.l2_bytes if weights.promoted else UNPROMOTED_MISSING
    copies = fetched / (fit.l2_bytes if in_l2 else missing)
    least = fit.least[tiles.cluster.bit_length() - 1]
    lines = SWAPPED_LINES if tiles.swapped else 1.0 if tiles.staged == 64 else fit.half_lines
    lines *= QUARTER_LINES if tiles.staged == 16 else 1.0
    lines *= RANGE_STORES if tiles.k_splits > 1 else 1.0

    def chunk(sharing: int, split: bool) -> float:
        wait = fit.wait + split * fit.split_wait
        wait += (tiles.cluster > 1) * fit.shared_wait + (tiles.blocks > 1) * TALL_WAIT
        wait += (tiles.resident > 1) * fit.resident_wait
        cycles = max(wgmmas * sharing, copies * sharing, least)
        return ((cycles if tiles.pingpong else max(cycles, alone)) + wait) / weights.chip.microsecond_cycles

    def epilogue(sharing: int) -> float:
        area, warpgroups = height * width / AREA, 1 if tiles.pingpong else tiles.down * tiles.across
        return lines * area * max(fit.epilogue * sharing, fit.warpgroup_epilogue / warpgroups) + fit.tile

    moved = products * _moved(rows, weights, weights.bits, tiles.k_splits, groups)
    times = Times(fit, chunks, chunk, epilogue, tiles.resident, moved)
    if tiles.pingpong:
        last = max(wgmmas / fit.product * (fit.last_product or fit.product), copies, least)
        wait = fit.wait + (tiles.cluster > 1) * fit.shared_wait
        return 1, times.pingpong(weights.chip, items, tiles.cluster, (last + wait) / weights.chip.microsecond_cycles)
    if tiles.cluster > tiles.cluster_k_splits:
        return 1, times.unsplit(weights.chip, items, tiles.cluster)
    # With multicast a cluster always has all its blocks.
    return times.least(weights.chip, items, tiles.cluster_k_splits, tiles.multicast)


def slices(width: int) -> int:
    """Returns the slices of a warpgroup's columns that are promoted one after another, as the header's
    ``Shape::slices``: products of more columns would take too many registers beside the sums."""
    return 2 if width > WIDEST_PROMOTED and width % 32 == 0 else 1


def _across_lines(item: int, *widths: int) -> bool:
    """Returns whether copies of matrices with rows of so many elements lie across lines of the cache."""
    return any(width * item % CHUNK_BYTES for width in widths)


def _evenly_grouped_microseconds(tiles: WgmmaDense, rows: int, matrices: int, weights: Weights) -> float:
    """Estimates the time of groups of ``rows`` rows each, in microseconds."""
    (columns,), chip = weights.columns, weights.chip
    height, width = tiles.block_m, tiles.columns * weights.contractions
    items = matrices * -(-rows // height) * -(-columns // tiles.columns)
    waves = -(-items // (chip.multiprocessors * tiles.resident))
    sharing = min(tiles.resident, -(-items // chip.multiprocessors))  # blocks that share a multiprocessor
    fetched = (height + width) * CHUNK_BYTES
    cycles = max(height * width / 32 * GROUPED.product, fetched / GROUPED.l2_bytes) * sharing + GROUPED.wait
    main = -(-weights.length // weights.chunk) * cycles / chip.microsecond_cycles
    end = GROUPED.epilogue * height * width / AREA
    if tiles.pingpong:
        time = (waves - 1) * max(main, (main + end) / 2) + main + end
        return IN_TURN * time if tiles.shares_x else time
    return waves * (main + end)
