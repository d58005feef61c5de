"""Tiles of the wgmma mainloops: the candidates, and their estimated times by the model of ``wgmma_model.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jitgen.families.gemm.wgmma_model import (
    AREA,
    BATCHED,
    DECODE,
    DENSE,
    DENSE_MISSING_BYTES,
    DENSE_PINGPONG,
    DENSE_WARPGROUP,
    HALF_LINES,
    LEAST_PRODUCT,
    QUANTIZED,
    SUMS_FIXED,
    Times,
)
from jitgen.schedule.chips import Chip

CHUNK = 64
"""Extent of K in a chunk of a stage."""
WGMMA_SIZES = (16, 32, 64, 96, 128, 192, 256, 80, 112, 144, 160, 176, 208, 224, 240)
"""The n's that ``wgmma_atoms.cuh`` and ``wgmma_widths.cuh`` have."""
FEW_TOKENS = (16, 32, 64)
"""Rows of a tile where x has at most 64."""
MANY_TOKENS = (128, 96, 64, 80)
"""Rows of a tile where x has more than 64. Of the sizes, here as above, that have all rows of x, the least is the
largest candidate. Of the 90 products to which the model was first fitted none was fastest with 192 or 224, and one with
256, by 0.6 %."""
MEDIUM_ROWS = 512
"""Rows of x up to which tiles of more sizes than ``MANY_TOKENS`` are candidates, because a last tile that x does not
fill is a considerable share of the work."""
MEDIUM_TOKENS = (*MANY_TOKENS, 112, 144, 160, 176)
"""Rows of a tile where x has more than 64 and at most ``MEDIUM_ROWS``."""
SAMPLES = 9
"""How many numbers of rows of a bucket tiles are compared for."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of ``gemm_wgmma_quantized.cuh``.

    Attributes:
        tokens: rows of x in a tile.
        warpgroups: warpgroups that compute.
        blocks: blocks of 64 rows of the weight that a warpgroup computes, of all contractions.
        span: chunks of K in a stage.
        most_splits: the most blocks of a cluster that share K (``Config::most_splits``); a launch chooses.
        steps: wgmma steps of 16 along K that are started together.
        resident: blocks that a multiprocessor holds at once.
        ranges: ranges of K whose sums are stored separately.
    """

    tokens: int
    warpgroups: int
    blocks: int
    span: int
    most_splits: int = 1
    steps: int = 2
    resident: int = 1
    ranges: int = 1

    @property
    def stages(self) -> int:
        """Stages beyond which more of them gain nothing; shared memory may hold fewer."""
        return 8 if self.span == 1 else 5

    def columns(self, contractions: int) -> int:
        """Output columns of a tile."""
        return self.warpgroups * self.blocks * 64 // contractions


@dataclass(frozen=True)
class Weights:
    """What a choice of tiles for quantised weights depends on, besides the rows of x.

    Attributes:
        columns: N of each region.
        length: K.
        contractions: contractions of each region, 1 or 2.
        bits: bits of a code.
        light: whether codes have 4 bits and no zero-points, x is bfloat16, and scales are bfloat16 or there are no
            groups. Other weights take more registers to decode, which a thread has only with two warpgroups.
        chip: whose multiprocessors, clusters and clock the model takes.
    """

    columns: tuple[int, ...]
    length: int
    contractions: int
    bits: int
    light: bool
    chip: Chip


SHAPES = ((2, 2, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2), (1, 1, 3))
"""Warpgroups that compute, blocks of 64 rows of each, and blocks that a multiprocessor holds at once."""
MOST_SUMS = {(2, 1): 256, (3, 1): 128, (4, 1): 32, (1, 2): 224, (1, 3): 64}
"""By warpgroups and resident blocks, the most rows of x times blocks of 64 rows of the weight of a warpgroup: without
spills, as NVRTC 13.0 compiles it."""


def candidates(fewest: int, most: int, weights: Weights) -> list[Tiles]:
    """The tiles that a kernel for ``fewest`` to ``most`` rows of x can have, each with the most splits that any of
    these rows gains from."""
    found = []
    for tiles in _all_tiles(most, weights):
        splits = [splits_and_microseconds(tiles, rows, weights)[0] for rows in sampled_rows(fewest, most)]
        found.append(replace(tiles, most_splits=max(splits)))
    return found


def cost(tilings: Sequence[AnyTiles], fewest: int, most: int, weights: AnyWeights) -> float:
    """The estimated time in microseconds of the best of ``tilings`` for each number of rows, by the geometric mean over
    rows from ``fewest`` to ``most``."""
    found = [times(tiles, fewest, most, weights) for tiles in tilings]
    return math.exp(sum(math.log(min(each)) for each in zip(*found, strict=True)) / len(found[0]))


@functools.lru_cache(maxsize=4096)
def times(tiles: AnyTiles, fewest: int, most: int, weights: AnyWeights) -> tuple[float, ...]:
    """The estimated time of ``tiles`` in microseconds, for each of the sampled rows."""
    return tuple(estimate(tiles, rows, weights)[1] for rows in sampled_rows(fewest, most))


def estimate(tiles: AnyTiles, rows: int, weights: AnyWeights) -> tuple[int, float]:
    """(splits, microseconds) of tiles for quantised or for dense weights."""
    if isinstance(tiles, Tiles):
        assert isinstance(weights, Weights)
        return splits_and_microseconds(tiles, rows, weights)
    assert isinstance(weights, DenseWeights)
    return dense_splits_and_microseconds(tiles, rows, weights)


def sampled_rows(fewest: int, most: int) -> list[int]:
    """Numbers of rows of a bucket for which tiles are compared, evenly spaced on a logarithmic scale."""
    return sorted({round(fewest * (most / fewest) ** (i / (SAMPLES - 1))) for i in range(SAMPLES)})


def _all_tiles(rows: int, weights: Weights) -> Iterator[Tiles]:
    sizes = FEW_TOKENS if rows <= FEW_TOKENS[-1] else MEDIUM_TOKENS if rows <= MEDIUM_ROWS else MANY_TOKENS
    largest = min((tokens for tokens in sizes if tokens >= rows), default=max(sizes))
    for tokens in sizes:
        if tokens > largest:
            continue
        for warpgroups, blocks, resident in SHAPES:
            if blocks % weights.contractions or blocks * tokens > MOST_SUMS[warpgroups, resident]:
                continue
            if resident > 1 and blocks > 1 and tokens < 64:
                continue  # another shape was always faster
            if not weights.light and (warpgroups > 2 or warpgroups * resident > 2):
                continue
            span = 2 if weights.bits <= 4 and blocks * tokens <= 128 and weights.length > CHUNK else 1
            splits = max(weights.chip.resident_clusters)
            yield Tiles(tokens, warpgroups, blocks, span, most_splits=splits, resident=resident)


def splits_and_microseconds(tiles: Tiles, rows: int, weights: Weights) -> tuple[int, float]:
    """How many blocks of a cluster should share K, at most ``tiles.most_splits``, and the estimated time of a kernel
    that has the device for itself, in microseconds."""
    width, height = tiles.columns(weights.contractions), tiles.warpgroups * tiles.blocks
    items = -(-rows // tiles.tokens) * sum(-(-n // width) for n in weights.columns) * tiles.ranges
    products = 4 * max(tiles.tokens / 2, LEAST_PRODUCT) * QUANTIZED.product  # of 64 rows of the weight
    together = height * products + tiles.warpgroups * DECODE.blocks(tiles.blocks)
    fetched = tiles.tokens * 2 * CHUNK + height * CHUNK * 8 * weights.bits
    alone = tiles.blocks * products + DECODE.blocks(tiles.blocks) + DECODE.fixed
    cycle = tiles.span / weights.chip.microsecond_cycles

    def chunk(sharing: int) -> float:
        limit = max(together, fetched / QUANTIZED.l2_bytes) * sharing + QUANTIZED.wait / tiles.span
        return max(limit, alone) * cycle

    def epilogue(sharing: int) -> float:
        area = tiles.tokens * height * 64 / AREA
        stores, instructions = QUANTIZED.epilogue * sharing, QUANTIZED.warpgroup_epilogue / tiles.warpgroups
        return area * max(stores, instructions) + QUANTIZED.tile

    chunks = -(-weights.length // (CHUNK * tiles.span * tiles.ranges))
    moved = _moved(rows, weights, weights.bits + 0.125, tiles.ranges)
    times = Times(QUANTIZED, chunks, chunk, epilogue, tiles.resident, moved)
    return times.least(weights.chip, items, tiles.most_splits)


def in_ranges(tilings: Sequence[AnyTiles], ranges: int) -> list[AnyTiles]:
    """Those of ``tilings`` that can sum ``ranges`` ranges of K separately, which they then do."""
    able = [t for t in tilings if isinstance(t, Tiles) or (t.multicast == 1 and not t.pingpong)]
    return [replace(tiles, ranges=ranges, most_splits=1) for tiles in able]


def sums_microseconds(ranges: int, rows: int, weights: AnyWeights) -> float:
    """The time of the kernel that adds the sums of ``ranges`` ranges; 0 for one."""
    if ranges == 1:
        return 0.0
    return SUMS_FIXED + rows * sum(weights.columns) * weights.contractions * ranges * 4 / weights.chip.reads * 1e6


def _moved(rows: int, weights: AnyWeights, bits: float, ranges: int) -> float:
    """The bytes of x, of weights of so many bits, scales included, and of the results."""
    columns = sum(weights.columns)
    results = columns * (2 if ranges == 1 else 4 * ranges * weights.contractions)
    return weights.contractions * columns * weights.length * bits / 8 + rows * (weights.length * 2 + results)


# ------------------------------------------------------------------------------------------------------------- dense


@dataclass(frozen=True)
class DenseTiles:
    """Tiles of ``gemm_wgmma_dense.cuh``.

    Attributes:
        down: consumer warpgroups along M, of 64 rows each.
        across: consumer warpgroups along N.
        columns: columns of a tile: in the tables of all contractions, in a choice of one of them.
        stages: stages of 64 along K; shared memory may hold fewer.
        multicast: blocks of a cluster that share the weight's tile.
        most_splits: the most blocks of a cluster that share K; with ``multicast`` equal to it. A launch chooses.
        resident: blocks that a multiprocessor holds at once.
        staged: columns of all contractions that an epilogue takes through shared memory at once, 64 or 32: 64 numbers
            of 16 bits are a whole line of memory, and 32 leave room for a stage more.
        pingpong: whether two warpgroups compute tiles in turn, each of ``down`` blocks of 64 rows.
        ranges: as of ``Tiles``.
    """

    down: int
    across: int
    columns: int
    stages: int
    multicast: int = 1
    most_splits: int = 1
    resident: int = 1
    staged: int = 64
    pingpong: bool = False
    ranges: int = 1


@dataclass(frozen=True)
class DenseWeights:
    """What a choice of tiles for dense weights depends on, besides the rows of x.

    Attributes:
        columns: N of each region.
        length: K.
        contractions: contractions of each region, 1 or 2.
        transposed: whether the weights are contiguous along N, which takes a multiple of 64 columns.
        chip: as of ``Weights``.
    """

    columns: tuple[int, ...]
    length: int
    contractions: int
    transposed: bool
    chip: Chip


AnyTiles = Tiles | DenseTiles
AnyWeights = Weights | DenseWeights

_DENSE = (
    DenseTiles(2, 1, 256, 4, multicast=2),
    DenseTiles(2, 1, 256, 4),
    DenseTiles(2, 1, 224, 4, staged=32),
    DenseTiles(2, 1, 192, 4),
    DenseTiles(2, 1, 160, 5, staged=32),
    DenseTiles(2, 1, 128, 6),
    DenseTiles(2, 1, 96, 7, staged=32),
    DenseTiles(2, 1, 64, 8),
    DenseTiles(3, 1, 128, 5, staged=32),
    DenseTiles(1, 2, 256, 5, staged=32),
    DenseTiles(1, 2, 192, 6, staged=32),
    DenseTiles(1, 2, 128, 8),
    DenseTiles(1, 1, 128, 8),
    DenseTiles(1, 1, 96, 8, staged=32),
    DenseTiles(1, 1, 64, 8),
    DenseTiles(1, 1, 32, 8, resident=2, staged=32),
    DenseTiles(1, 1, 128, 4, resident=2),
    DenseTiles(2, 1, 160, 5, multicast=2, staged=32, pingpong=True),
    DenseTiles(2, 1, 128, 6, multicast=2, pingpong=True),
    DenseTiles(2, 1, 128, 6, pingpong=True),
    DenseTiles(2, 1, 96, 7, staged=32, pingpong=True),
    DenseTiles(1, 1, 256, 4, multicast=2, pingpong=True),
    DenseTiles(1, 1, 128, 8, pingpong=True),
)
"""Tiles of one product of matrices."""

_BATCHED = (
    DenseTiles(2, 1, 256, 4),
    DenseTiles(2, 1, 192, 4),
    DenseTiles(2, 1, 128, 5),
    DenseTiles(2, 1, 64, 3, resident=2),
    DenseTiles(1, 1, 128, 4, resident=2),
    DenseTiles(1, 1, 64, 4, resident=3),
    DenseTiles(2, 1, 128, 6, pingpong=True),
    DenseTiles(1, 1, 128, 8, pingpong=True),
)
"""Tiles of a batch of products. Their K is often short, so that most of the bytes moved are results."""


def dense_candidates(fewest: int, most: int, weights: DenseWeights) -> list[DenseTiles]:
    """As ``candidates``, for dense weights."""
    found = []
    for tiles in _all_dense_tiles(most, weights):
        splits = [dense_splits_and_microseconds(tiles, rows, weights)[0] for rows in sampled_rows(fewest, most)]
        found.append(replace(tiles, most_splits=max(splits)))
    return found


def _all_dense_tiles(rows: int, weights: DenseWeights) -> list[DenseTiles]:
    fitting = _fitting(_DENSE, rows, weights.contractions, weights.transposed)
    return [_splitting(tiles, weights) for tiles in fitting]


def _splitting(tiles: DenseTiles, weights: DenseWeights) -> DenseTiles:
    """``tiles`` with as many splits as a cluster may have, if partial sums fit where the stages are."""
    contractions = weights.contractions
    rows, columns = 64 * tiles.down, tiles.columns * contractions
    stages = tiles.stages * (rows + columns) * 2 * CHUNK
    sums = contractions * rows * (tiles.columns + 8) * 4
    if sums > stages or tiles.pingpong:
        return tiles
    return replace(tiles, most_splits=tiles.multicast if tiles.multicast > 1 else max(weights.chip.resident_clusters))


def batched_candidates(rows: int, contractions: int, transposed: bool) -> list[DenseTiles]:
    """The tiles that a kernel for a batch of x of these rows can have; the arguments are those of ``DenseWeights``."""
    return _fitting(_BATCHED, rows, contractions, transposed)


def _fitting(all_tiles: Sequence[DenseTiles], rows: int, contractions: int, transposed: bool) -> list[DenseTiles]:
    return [
        replace(tiles, columns=tiles.columns // contractions)
        for tiles in all_tiles
        if rows > 64 * (tiles.down - 1) and _fits(tiles.columns // contractions, tiles, transposed)
    ]


def _fits(columns: int, tiles: DenseTiles, transposed: bool) -> bool:
    width = columns // tiles.across
    return width in WGMMA_SIZES and columns % ((64 if transposed else 16) * max(tiles.across, tiles.multicast)) == 0


def dense_splits_and_microseconds(tiles: DenseTiles, rows: int, weights: DenseWeights) -> tuple[int, float]:
    """As ``splits_and_microseconds``, for dense weights."""
    fit = DENSE_PINGPONG if tiles.pingpong else DENSE
    height, width = 64 * tiles.down, tiles.columns * weights.contractions
    down = -(-rows // (height * tiles.multicast)) * tiles.multicast
    items = down * sum(-(-n // tiles.columns) for n in weights.columns) * tiles.ranges
    fetched = (height + width / tiles.multicast) * 2 * CHUNK
    alone = width / tiles.across * DENSE_WARPGROUP.column + DENSE_WARPGROUP.fixed
    products = height * width / 32 * fit.product
    held = (rows + sum(weights.columns)) * weights.length * 2 <= weights.chip.l2_bytes
    copies = fetched / (fit.l2_bytes if held else DENSE_MISSING_BYTES)
    lines = 1.0 if tiles.staged == 64 else HALF_LINES

    def chunk(sharing: int) -> float:
        cycles = max(products, copies) * sharing + fit.wait
        return (cycles if tiles.pingpong else max(cycles, alone)) / weights.chip.microsecond_cycles

    def epilogue(sharing: int) -> float:
        area, warpgroups = height * width / AREA, 1 if tiles.pingpong else tiles.down * tiles.across
        return lines * area * max(fit.epilogue * sharing, fit.warpgroup_epilogue / warpgroups) + fit.tile

    moved = _moved(rows, weights, 16, tiles.ranges)
    times = Times(fit, -(-weights.length // (CHUNK * tiles.ranges)), chunk, epilogue, tiles.resident, moved)
    if tiles.pingpong:
        return 1, times.pingpong(weights.chip, items)
    # With multicast a cluster always has all its blocks.
    return times.least(weights.chip, items, tiles.most_splits, tiles.multicast)


def batched_microseconds(tiles: DenseTiles, rows: int, matrices: int, weights: DenseWeights) -> float:
    """The estimated time of a batch, in microseconds."""
    (columns,), chip = weights.columns, weights.chip
    height, width = 64 * tiles.down, tiles.columns * weights.contractions
    items = matrices * -(-rows // height) * -(-columns // tiles.columns)
    waves = -(-items // (chip.multiprocessors * tiles.resident))
    sharing = min(tiles.resident, -(-items // chip.multiprocessors))  # blocks that share a multiprocessor
    fetched = (height + width) * 2 * CHUNK
    cycles = max(height * width / 32 * BATCHED.product, fetched / BATCHED.l2_bytes) * sharing + BATCHED.wait
    main = -(-weights.length // CHUNK) * cycles / chip.microsecond_cycles
    end = BATCHED.epilogue * height * width / AREA
    if tiles.pingpong:
        return (waves - 1) * max(main, (main + end) / 2) + main + end
    return waves * (main + end)
