"""Lists the tiles that wgmma mainloops of a product may have, and chooses among them by ``wgmma_times.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jitgen.families.gemm import wgmma_tables as tables
from jitgen.families.gemm.block_mainloops import CHUNK_BYTES
from jitgen.families.gemm.mainloops import CHUNK, WgmmaDense, WgmmaQuantized, WgmmaTiling
from jitgen.families.gemm.tile_times import sampled_rows
from jitgen.families.gemm.wgmma_times import MANY_TOKENS, MEDIUM_ROWS, WIDEST_PROMOTED, Weights, estimate
from jitgen.quant.codes import BLOCK

WGMMA_SIZES = (16, 32, 64, 96, 128, 192, 256, 80, 112, 144, 160, 176, 208, 224, 240)
"""The n's that ``wgmma_atoms.cuh`` has."""
FEW_TOKENS = (16, 32, 64)
"""Rows of a tile where x has at most 64."""
GROUP_TOKENS = (16, 32, 64, 96, 128)
"""Rows of a tile where the rows of x belong to groups: whatever these have on average, no size fits all."""
NARROW_TOKENS = {(96, 3, 1): (32, 64), (160, 3, 1): (96, 192)}
"""By rows of x, warpgroups and blocks of 64 rows of codes of a tile, those of a narrow one of a group that has no more,
and the rows of an average group up to which the last tile is so much of the work. Of 36 products of experts of 4-bit
codes on an H200 five were fastest with these, by up to 6 %, and they take at most 3 % longer than tiles of that size
without. Narrow ones of several sizes took up to 12 % longer."""
GROUP_TALL = ((160, 3),)
"""Rows of x and warpgroups, of a block of 64 rows of codes each, of further tiles of groups, where ``TALL_TOKENS`` are
candidates of other products too."""
GROUP_ROWS = 2
"""How many times the average a group of many rows has, which most of the rows are of."""
MEDIUM_TOKENS = (*MANY_TOKENS, 112, 144, 160, 176)
"""Rows of a tile where x has more than 64 and at most ``MEDIUM_ROWS``."""
ROW_STEP = 1.15
"""How many times the rows before are the next rows of a bucket for which tiles are compared, at most: which tiles leave
few multiprocessors idle changes that soon."""
BATCHES, BATCH_ROW_STEP = 3, 1.4
"""Numbers of products of a batch's bucket for which tiles are compared, and ``ROW_STEP`` of a batch."""
MOST_ROUNDS = 2.1
"""Tiles of a range of K for each block that is resident at once, up to which K is split into ranges."""
COMPLEMENTARY = 8
"""Tilings of which any may share a source."""


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
        *_tall_tilings(most, weights),
        *_tall_byte_tilings(most, weights),
        *_tall_code_tilings(most, weights),
    )
    tilings = _dense_tilings(most, weights) if weights.dense else of_codes
    return list(dict.fromkeys(_gaining(tiling, fewest, most, weights) for tiling in tilings))


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


TALLEST = ((192, 2), (208, 2), (224, 2))
"""Rows of x and warpgroups of taller ones of the same weights, for few columns."""
FEW_COLUMNS = 512
"""Columns up to which a product has tiles for few columns; with more of them the tallest were not timed."""


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


def _tall_tilings(rows: int, weights: Weights) -> Iterator[WgmmaQuantized]:
    if rows > MANY_TOKENS[0]:
        tall = [(tokens, 3) for tokens in TALL_TOKENS]
        yield from _of_a_block([*tall, *(TALLEST if sum(weights.columns) <= FEW_COLUMNS else ())], weights)


def _of_a_block(tall: Sequence[tuple[int, int]], weights: Weights) -> Iterator[WgmmaQuantized]:
    """Yields tiles of these rows of x and warpgroups, of one block of 64 rows of codes each."""
    if weights.item == 1 or weights.bits != 4 or not weights.light or weights.contractions > 1:
        return
    for tokens, warpgroups in tall:
        span = 2 if tokens <= 160 and weights.length > CHUNK else 1  # as many stages as hide the copies
        splits = 1 if warpgroups > 2 else max(weights.chip.resident_clusters)
        yield WgmmaQuantized(tokens, warpgroups, 1, span, stages=8, cluster_k_splits=splits)


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


def _dense_tilings(rows: int, weights: Weights) -> list[WgmmaDense]:
    dense: tuple[WgmmaDense, ...] = (
        (*tables.DENSE, *tables.DENSE_OF_MANY_ROWS) if rows > FEW_TOKENS[-1] else tables.DENSE
    )
    is_one = len(weights.columns) == weights.contractions == 1
    if rows > FEW_TOKENS[-1] and is_one:
        dense += (*tables.ARRANGED, *_narrow(weights))
    of_bytes: tuple[WgmmaDense, ...] = tables.PROMOTED if weights.promoted else tables.BYTES
    if weights.quantises and weights.contractions > 1:
        of_bytes = tables.QUANTISING_TWO
    if weights.batch != (1, 1):
        few = tables.FEW_ROWS if rows <= FEW_TOKENS[-1] else ()
        dense, of_bytes = tuple(dict.fromkeys((*dense, *tables.BATCHED, *few))), tables.BATCHED_BYTES
    table = dense if weights.item == 2 else of_bytes
    return [_splitting(tiles, weights) for tiles in _fitting(table, rows, weights)]


def _narrow(weights: Weights) -> list[WgmmaDense]:
    """Returns tiles as wide as one column of tiles must be to have all columns of a product that has few, or two."""
    if weights.batch != (1, 1) or weights.transposed:
        return []
    fitting = [[size for size in WGMMA_SIZES if size * count >= sum(weights.columns)] for count in (1, 2)]
    widths = sorted({min(sizes) for sizes in fitting if sizes})
    shapes = [(down, width, shares) for width in widths for down, shares in tables.NARROW]
    return [tables.arranged(down, width, weights=shares) for down, width, shares in shapes if width <= 128 * down]


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
            return _fitting(tables.GROUPED_BYTES, rows, weights)
        in_turn = tables.GROUPED_IN_TURN if rows > FEW_TOKENS[-1] and weights.contractions == 1 else ()
        return _fitting((*tables.GROUPED, *in_turn), rows, weights)
    most = max(GROUP_TOKENS[0], 2 * GROUP_ROWS * rows)
    tall = _of_a_block(GROUP_TALL, weights)
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


def _fitting(table: Sequence[WgmmaDense], rows: int, weights: Weights) -> list[WgmmaDense]:
    """Lists the tiles of ``table`` for these rows, with the columns of one contraction each."""
    tilings = [replace(tiles, columns=tiles.columns // weights.contractions) for tiles in table]
    return [tiling for tiling in tilings if _fits(tiling, rows, weights)]


def _fits(tiles: WgmmaDense, rows: int, weights: Weights) -> bool:
    # Of the matrix that gives a tile its rows, and of the other one.
    tall, others_crossed, wide_shares = rows, weights.transposed, tiles.shares[1]
    if tiles.swapped:
        if len(weights.columns) * weights.contractions > 1:
            return False
        tall, others_crossed, wide_shares = sum(weights.columns), weights.x_transposed, tiles.shares[0]
    if tall <= tiles.height - 64:
        return False
    width = tiles.columns // tiles.across
    if weights.in_blocks and BLOCK % width and width % BLOCK:
        return False
    if weights.quantises and width % BLOCK:
        return False
    if tiles.swapped and not others_crossed:  # pieces of such a tile may overlap
        return width in WGMMA_SIZES
    unit = 64 * tiles.across if others_crossed else max(16 * tiles.across, 8 * wide_shares)
    return width in WGMMA_SIZES and tiles.columns % unit == 0
