"""Estimates the times of tiles of the wgmma mainloops, by the model of ``wgmma_model.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from jitgen.families.gemm.block_mainloops import CHUNK_BYTES
from jitgen.families.gemm.groups import Groups
from jitgen.families.gemm.mainloops import CHUNK, WgmmaDense, WgmmaQuantized, WgmmaTiling
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
from jitgen.schedule.chips import Chip

MANY_TOKENS = (128, 96, 64, 80)
"""Rows of a tile where x has more than 64. Of the sizes, here as above, that have all rows of x, the least is the
largest candidate. Of the 90 products to which the model was first fitted none was fastest with 192 or 224, and one with
256, by 0.6 %."""
NARROW_GAIN = 0.5
"""The share of the products that narrow tiles leave out by which a kernel is faster: it ends with the blocks that have
the fewest of them (the same timings)."""
MEDIUM_ROWS = 512
"""Rows of x up to which tiles of more sizes than ``MANY_TOKENS`` are candidates, because a last tile that x does not
fill is a considerable share of the work."""
WIDEST_PROMOTED = 160
"""Columns of a warpgroup whose sums are promoted, up to which its tiles may be of blocks that share K."""
IN_TURN = 0.76
"""What such tiles take of their estimate by the constants of ``GROUPED`` (the same products)."""


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


def estimate(tiling: WgmmaTiling, rows: int, weights: Weights, products: int = 1) -> tuple[int, float]:
    """Returns how many blocks of a cluster should share K, at most ``tiling.cluster_k_splits``, and the estimated time
    of a kernel of so many products that has the device for itself, in microseconds."""
    if isinstance(tiling, WgmmaQuantized):
        return _estimate_quantized(tiling, rows, weights)
    return _estimate_dense(tiling, rows, weights, products=products)


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


def grouped_microseconds(tiles: WgmmaTiling, divisions: Sequence[Groups], weights: Weights) -> float:
    """Estimates the time of a product of groups of rows, by the geometric mean over ``divisions``."""
    if isinstance(tiles, WgmmaDense) and weights.item == 2:
        most = divisions[-1]
        return _evenly_grouped_microseconds(tiles, -(-most.rows // most.count), most.count, weights)
    estimate = _estimate_dense if isinstance(tiles, WgmmaDense) else _estimate_quantized
    return geometric_mean(estimate(tiles, groups.rows, weights, groups)[1] for groups in divisions)  # type: ignore[arg-type]


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
