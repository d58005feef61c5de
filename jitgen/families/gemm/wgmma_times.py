"""Estimates the times of tiles of the wgmma mainloops, by the model of ``wgmma_model.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from jitgen.families.gemm import wgmma_fits as fits
from jitgen.families.gemm.block_mainloops import CHUNK_BYTES
from jitgen.families.gemm.groups import Groups
from jitgen.families.gemm.mainloops import CHUNK, WgmmaDense, WgmmaQuantized, WgmmaTiling
from jitgen.families.gemm.wgmma_fits import TileFit
from jitgen.families.gemm.wgmma_model import AREA, Times
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
    fit = _quantized_fit(weights, groups is not None)
    height, blocks = tiles.warpgroups * tiles.blocks_of_rows, tiles.blocks_of_rows
    down = -(-rows // tiles.tokens) if groups is None else math.ceil(groups.tiles(tiles.tokens))
    short = groups.share_of_short(tiles.narrow) if groups is not None and tiles.narrow else 0.0
    tokens = tiles.tokens - NARROW_GAIN * short * (tiles.tokens - tiles.narrow)
    share = tiles.multicast
    items = down * sum(-(-n // (tiles.block_n * share)) * share for n in weights.columns) * tiles.k_splits
    steps = 2 * weights.item  # wgmmas of a chunk
    products = steps * max(tokens / 2, fits.LEAST_PRODUCT) * fit.product  # of 64 rows of the weight
    if weights.item == 2:
        decode = fit.warpgroup.blocks(blocks)
        together = height * products + tiles.warpgroups * decode
    else:
        decode = blocks * (fits.CODES.decode + fits.CODES.sum * tokens / 4)
        together = height * (fits.CODES.block + fits.CODES.token * tokens)
    fetched = tiles.tokens * weights.item * CHUNK / share + height * CHUNK * 8 * weights.bits
    alone = blocks * products + decode + fit.warpgroup.fixed
    cycle = tiles.span / weights.chip.microsecond_cycles

    def chunk(sharing: int, split: bool) -> float:
        wait = (fit.wait + split * fit.split_wait) / tiles.span
        return max(max(together, fetched / fit.l2_bytes) * sharing + wait, alone) * cycle

    def epilogue(sharing: int) -> float:
        area = tokens * height * 64 / AREA
        stores, instructions = fit.epilogue * sharing, fit.warpgroup_epilogue / tiles.warpgroups
        few = fits.QUARTER_TOKENS if tiles.tokens % 32 and tiles.tokens > MANY_TOKENS[0] else 1.0
        if weights.item == 1:
            few = fits.CODES.epilogue
        return few * area * max(stores, instructions) + fit.tile

    chunks = -(-weights.length // (tiles.block_k * tiles.k_splits))
    moved = _moved(rows, weights, weights.bits + 0.125, tiles.k_splits, groups)
    times = Times(fit, chunks, chunk, epilogue, tiles.resident, moved)
    if share > 1:
        return 1, times.unsplit(weights.chip, items, share)
    return times.least(weights.chip, items, tiles.cluster_k_splits)


def _quantized_fit(weights: Weights, grouped: bool) -> TileFit:
    """Returns the constants of tiles of quantised weights."""
    if weights.bits == 8:
        return fits.QUANTIZED_BYTES
    if not grouped or weights.item == 1:
        return fits.QUANTIZED
    return fits.PLANE_GROUPS if weights.planes else fits.QUANTIZED_GROUPS


def _estimate_dense(
    tiles: WgmmaDense, rows: int, weights: Weights, groups: Groups | None = None, products: int = 1
) -> tuple[int, float]:
    fit = _dense_fit(tiles, rows, weights, groups is None and products == 1, products > 1)
    tile = _DenseTile(tiles, fit, rows, weights, groups, products)
    items = tile.items()
    wgmmas, copies, alone = tile.wgmmas(items), tile.copies(), tile.alone()
    least = fit.least[tiles.cluster.bit_length() - 1]
    shared_wait = (tiles.cluster > 1) * fit.shared_wait
    microsecond = weights.chip.microsecond_cycles

    def chunk(sharing: int, split: bool) -> float:
        wait = fit.wait + split * fit.split_wait + shared_wait + (tiles.blocks > 1) * fits.TALL_WAIT
        wait += (tiles.resident > 1) * fit.resident_wait
        cycles = max(wgmmas * sharing, copies * sharing, least)
        return ((cycles if tiles.pingpong else max(cycles, alone)) + wait) / microsecond

    area, warpgroups = tiles.height * tile.width / AREA, 1 if tiles.pingpong else tiles.warpgroups
    stores = tile.lines() * area

    def epilogue(sharing: int) -> float:
        return stores * max(fit.epilogue * sharing, fit.warpgroup_epilogue / warpgroups) + fit.tile

    moved = products * _moved(rows, weights, weights.bits, tiles.k_splits, groups)
    times = Times(fit, tile.chunks, chunk, epilogue, tiles.resident, moved)
    if tiles.pingpong:
        last = max(wgmmas / fit.product * (fit.last_product or fit.product), copies, least)
        return 1, times.pingpong(weights.chip, items, tiles.cluster, (last + (fit.wait + shared_wait)) / microsecond)
    if tiles.cluster > tiles.cluster_k_splits:
        return 1, times.unsplit(weights.chip, items, tiles.cluster)
    # With multicast a cluster always has all its blocks.
    return times.least(weights.chip, items, tiles.cluster_k_splits, tiles.multicast)


def _dense_fit(tiles: WgmmaDense, rows: int, weights: Weights, is_one: bool, is_batch: bool) -> TileFit:
    """Returns the constants of a tile of dense operands. ``is_one``: whether there is one product, and no groups."""
    many = rows > MEDIUM_ROWS
    if weights.item == 2:
        both = fits.DENSE_BATCH if is_batch else fits.DENSE
    elif weights.promoted:
        both = fits.PROMOTED_OF_MANY_ROWS if many else fits.PROMOTED
    else:
        both = fits.BYTES_OF_MANY_ROWS if many and is_one else fits.BYTES
    fit = both.in_turn if tiles.pingpong else both.jointly
    return replace(fit, fixed=fit.fixed + math.log2(tiles.cluster) * fit.cluster) if tiles.cluster > 1 else fit


@dataclass(frozen=True)
class _DenseTile:
    """Counts the cycles of an iteration of a tile of dense operands, 128 bytes along K.

    A tile is as wgmma has it: its rows are those of the weight where x and the weight are swapped.
    """

    tiles: WgmmaDense
    fit: TileFit
    rows: int
    weights: Weights
    groups: Groups | None
    products: int

    @property
    def width(self) -> int:
        """Returns the columns of the tile, of all contractions."""
        return self.tiles.columns * self.weights.contractions

    @property
    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """Returns the rows that all tiles have, and the columns of each region."""
        columns = self.weights.columns
        return (sum(columns), (self.rows,)) if self.tiles.swapped else (self.rows, columns)

    @property
    def shares(self) -> tuple[int, int]:
        """Returns how many blocks share the tile's rows, and its columns."""
        return self.tiles.shares[::-1] if self.tiles.swapped else self.tiles.shares

    @property
    def chunks(self) -> int:
        """Returns the iterations of a tile."""
        return -(-self.weights.length // (self.weights.chunk * self.tiles.k_splits))

    def items(self) -> int:
        """Returns the tiles of the kernel."""
        (tall, wide), (row_shares, column_shares) = self.sizes, self.shares
        across = sum(-(-n // (self.tiles.columns * row_shares)) * row_shares for n in wide)
        band = self.tiles.height * column_shares
        down = -(-tall // band) if self.groups is None else math.ceil(self.groups.tiles(band))
        return self.products * down * column_shares * across * self.tiles.k_splits

    def copies(self) -> float:
        """Returns the cycles in which the L2 cache delivers both operands."""
        weights, tiles, (tall, _), (row_shares, column_shares) = self.weights, self.tiles, self.sizes, self.shares
        columns = weights.columns if weights.transposed else (weights.length,)
        x_lines = self._line_factor(self.rows if weights.x_transposed else weights.length)
        weight_lines = self._line_factor(*columns)
        if weights.item == 1:
            height, width, depth = tiles.height, self.width, 1.0
        else:  # a copy of the tile's rows has no more than its matrix, and the last one of K no more columns
            height, width = min(tiles.height, tall), self.width
            depth = weights.length / (self.chunks * weights.chunk * tiles.k_splits)
        fetched = depth * (height / row_shares * x_lines + width / column_shares * weight_lines) * CHUNK_BYTES
        matrices = 1.0 if self.groups is None else self.groups.used
        read = self.products * (self.rows + matrices * sum(weights.columns)) * weights.length * weights.item
        return fetched / (self.fit.l2_bytes if read <= weights.chip.l2_bytes else self.fit.missing_bytes)

    def _line_factor(self, *widths: int) -> float:
        """Returns the time of copies of matrices with rows of so many elements, as a multiple of that of rows that
        begin at lines of the cache."""
        return self.fit.across_lines if any(width * self.weights.item % CHUNK_BYTES for width in widths) else 1.0

    def wgmmas(self, items: int) -> float:
        """Returns the cycles of the tensor cores, for one of so many tiles."""
        tiles, height, (tall, _) = self.tiles, self.tiles.height, self.sizes
        # A warpgroup without rows of x multiplies nothing. Where blocks have several tiles, few of these are the last.
        several = items > self.weights.chip.multiprocessors and not tiles.pingpong and self.weights.item == 2
        live = -(-tall // 64) * 64 / -(-tall // height) if several else height
        cycles = live * self.width / 32 * self.fit.product * self.fit.promotion
        return cycles + slices(tiles.columns // tiles.across) * tiles.blocks * self.fit.promoted_slice

    def alone(self) -> float:
        """Returns the cycles of one warpgroup, which are hidden by those of others."""
        across, fit = self.tiles.across, self.fit.warpgroup
        cycles = self.tiles.blocks * self.width / across * fit.column + fit.fixed
        if self.weights.promoted:
            cycles += self.width / across / 2 * fits.PROMOTED_SUM + fits.PROMOTED_WAIT
        return cycles

    def lines(self) -> float:
        """Returns the time of the epilogue, as a multiple of that whose stores are whole lines of memory."""
        tiles = self.tiles
        lines = fits.SWAPPED_LINES if tiles.swapped else 1.0 if tiles.staged == 64 else self.fit.half_lines
        lines *= fits.QUARTER_LINES if tiles.staged == 16 else 1.0
        return lines * (fits.RANGE_STORES if tiles.k_splits > 1 else 1.0)


def slices(width: int) -> int:
    """Returns the slices of a warpgroup's columns that are promoted one after another, as the header's
    ``Shape::slices``: products of more columns would take too many registers beside the sums."""
    return 2 if width > WIDEST_PROMOTED and width % 32 == 0 else 1


def _evenly_grouped_microseconds(tiles: WgmmaDense, rows: int, matrices: int, weights: Weights) -> float:
    """Estimates the time of groups of ``rows`` rows each, in microseconds."""
    (columns,), chip = weights.columns, weights.chip
    height, width = tiles.block_m, tiles.columns * weights.contractions
    items = matrices * -(-rows // height) * -(-columns // tiles.columns)
    waves = -(-items // (chip.multiprocessors * tiles.resident))
    sharing = min(tiles.resident, -(-items // chip.multiprocessors))  # blocks that share a multiprocessor
    fetched = (height + width) * CHUNK_BYTES
    cycles = (
        max(height * width / 32 * fits.GROUPED.product, fetched / fits.GROUPED.l2_bytes) * sharing + fits.GROUPED.wait
    )
    main = -(-weights.length // weights.chunk) * cycles / chip.microsecond_cycles
    end = fits.GROUPED.epilogue * height * width / AREA
    if tiles.pingpong:
        time = (waves - 1) * max(main, (main + end) / 2) + main + end
        return fits.GROUPED_IN_TURN * time if tiles.shares_x else time
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
    """Estimates the time of the kernel that adds the sums of ``ranges`` ranges, and of what the product's own kernel
    takes longer to store them; 0 for one."""
    if ranges == 1:
        return 0.0
    fixed, passes = fits.DENSE_SUMS if weights.dense else fits.QUANTIZED_SUMS
    sums = rows * sum(weights.columns) * weights.contractions * ranges
    return fixed + passes * sums * 4 / weights.chip.reads * 1e6


def _moved(rows: int, weights: Weights, bits: float, ranges: int, groups: Groups | None) -> float:
    """Counts the bytes of x, of weights of so many bits, scales included, and of the results."""
    read = 1.0 if groups is None else groups.used
    columns = sum(weights.columns)
    results = columns * (2 if ranges == 1 else 4 * ranges * weights.contractions)
    of_x = weights.length * weights.item
    return read * weights.contractions * columns * weights.length * bits / 8 + rows * (of_x + results)
