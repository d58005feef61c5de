"""Tiles of the wgmma mainloops: the candidates, and their estimated times by the model of ``wgmma_model.py``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jitgen.chips import Chip
from jitgen.families.gemm.wgmma_model import (
    AREA,
    BATCHED,
    DECODE,
    DENSE,
    DENSE_MISSING_BYTES,
    DENSE_WARPGROUP,
    QUANTIZED,
    Times,
)

CHUNK = 64
"""Extent of K in a chunk of a stage."""
WGMMA_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""The n's of wgmma that ``wgmma_ptx.cuh`` has."""
MANY_TOKENS = (128, 96, 64, 192, 256)
"""Rows of a tile where x has more than 64; up to 128 rows, those that are not above it."""
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
    """

    tokens: int
    warpgroups: int
    blocks: int
    span: int
    most_splits: int = 1
    steps: int = 2

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


def candidates(fewest: int, most: int, weights: Weights) -> list[Tiles]:
    """The tiles that a kernel for ``fewest`` to ``most`` rows of x can have, each with the most splits that any of
    these rows gains from."""
    found = []
    for tiles in _all_tiles(most, weights):
        splits = [splits_and_microseconds(tiles, rows, weights)[0] for rows in sampled_rows(fewest, most)]
        found.append(replace(tiles, most_splits=max(splits)))
    return found


def cost(tilings: Sequence[AnyTiles], fewest: int, most: int, weights: AnyWeights) -> float:
    """The time of the best of ``tilings`` for each number of rows, as a multiple of the time of the best tiles there
    are, on average over rows from ``fewest`` to ``most``."""
    return excess([times(tiles, fewest, most, weights) for tiles in tilings], least(fewest, most, weights))


def excess(of_tilings: Sequence[Sequence[float]], shortest: Sequence[float]) -> float:
    """``cost`` from the ``times`` of tilings and the ``least`` times."""
    return sum(min(each) / best for *each, best in zip(*of_tilings, shortest, strict=True)) / len(shortest)


@functools.lru_cache(maxsize=4096)
def times(tiles: AnyTiles, fewest: int, most: int, weights: AnyWeights) -> tuple[float, ...]:
    """The estimated time of ``tiles`` in microseconds, for each of the sampled rows."""
    return tuple(estimate(tiles, rows, weights)[1] for rows in sampled_rows(fewest, most))


@functools.lru_cache(maxsize=256)
def least(fewest: int, most: int, weights: AnyWeights) -> tuple[float, ...]:
    """The estimated time of the best tiles in microseconds, for each of the sampled rows."""
    every = list(_all_tiles(most, weights)) if isinstance(weights, Weights) else _all_dense_tiles(most, weights)
    return tuple(map(min, zip(*(times(tiles, fewest, most, weights) for tiles in every), strict=True)))


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
    fitting = next(((tokens,) for tokens in (16, 32, 64) if rows <= tokens), MANY_TOKENS)
    for tokens in fitting:
        if tokens > 128 >= rows:
            continue
        for warpgroups, blocks in ((2, 2), (2, 1), (3, 1), (4, 1)):
            most = {2: 256, 3: 128, 4: 64}[warpgroups]  # the registers of a thread limit blocks * tokens
            if blocks % weights.contractions or blocks * tokens > most or (warpgroups > 2 and not weights.light):
                continue
            span = 2 if weights.bits <= 4 and blocks * tokens <= 128 and weights.length > CHUNK else 1
            yield Tiles(tokens, warpgroups, blocks, span, most_splits=max(weights.chip.resident_clusters))


def splits_and_microseconds(tiles: Tiles, rows: int, weights: Weights) -> tuple[int, float]:
    """How many blocks of a cluster should share K, at most ``tiles.most_splits``, and the estimated time of a kernel
    that has the device for itself, in microseconds."""
    width, height = tiles.columns(weights.contractions), tiles.warpgroups * tiles.blocks
    items = -(-rows // tiles.tokens) * sum(-(-n // width) for n in weights.columns)
    products = height * 4 * max(tiles.tokens / 2, 8) * QUANTIZED.product
    instructions = tiles.warpgroups * (DECODE.loop / tiles.span + DECODE.block * tiles.blocks)
    fetched = tiles.tokens * 2 * CHUNK + height * CHUNK * 8 * weights.bits
    cycles = max(products + instructions, fetched / QUANTIZED.l2_bytes) + QUANTIZED.wait / tiles.span
    chunk = cycles * tiles.span / weights.chip.microsecond_cycles
    chunks = -(-weights.length // (CHUNK * tiles.span))
    epilogue = QUANTIZED.epilogue * tiles.tokens * height
    times = Times(QUANTIZED, chunks, chunk, epilogue, QUANTIZED.split_epilogue * epilogue)
    return times.least(weights.chip, items, tiles.most_splits)


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
    """

    down: int
    across: int
    columns: int
    stages: int
    multicast: int = 1
    most_splits: int = 1
    resident: int = 1
    staged: int = 64


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
    DenseTiles(2, 1, 192, 4),
    DenseTiles(2, 1, 128, 6),
    DenseTiles(2, 1, 96, 7, staged=32),
    DenseTiles(2, 1, 64, 8),
    DenseTiles(1, 2, 256, 5, staged=32),
    DenseTiles(1, 2, 192, 6, staged=32),
    DenseTiles(1, 2, 128, 8),
    DenseTiles(1, 1, 128, 8),
    DenseTiles(1, 1, 96, 8, staged=32),
    DenseTiles(1, 1, 32, 8, resident=2, staged=32),
)
"""Tiles of one product of matrices."""

_BATCHED = (
    DenseTiles(2, 1, 256, 4),
    DenseTiles(2, 1, 192, 4),
    DenseTiles(2, 1, 128, 5),
    DenseTiles(2, 1, 64, 3, resident=2),
    DenseTiles(1, 1, 128, 4, resident=2),
    DenseTiles(1, 1, 64, 4, resident=3),
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
    if sums > stages:
        return tiles
    return replace(tiles, most_splits=tiles.multicast if tiles.multicast > 1 else max(weights.chip.resident_clusters))


def batched_candidates(rows: int, contractions: int, transposed: bool) -> list[DenseTiles]:
    """The tiles that a kernel for a batch of x of these rows can have; the arguments are those of ``DenseWeights``."""
    return _fitting(_BATCHED, rows, contractions, transposed)


def _fitting(all_tiles: Sequence[DenseTiles], rows: int, contractions: int, transposed: bool) -> list[DenseTiles]:
    return [
        replace(tiles, columns=tiles.columns // contractions)
        for tiles in all_tiles
        if (rows > 64 or tiles.down == 1) and _fits(tiles.columns // contractions, tiles, transposed)
    ]


def _fits(columns: int, tiles: DenseTiles, transposed: bool) -> bool:
    width = columns // tiles.across
    return width in WGMMA_SIZES and columns % ((64 if transposed else 16) * max(tiles.across, tiles.multicast)) == 0


def dense_splits_and_microseconds(tiles: DenseTiles, rows: int, weights: DenseWeights) -> tuple[int, float]:
    """As ``splits_and_microseconds``, for dense weights."""
    height, width = 64 * tiles.down, tiles.columns * weights.contractions
    down = -(-rows // (height * tiles.multicast)) * tiles.multicast
    items = down * sum(-(-n // tiles.columns) for n in weights.columns)
    sharing = min(tiles.resident, -(-items // weights.chip.multiprocessors))  # blocks that share a multiprocessor
    fetched = (height + width / tiles.multicast) * 2 * CHUNK
    alone = width / tiles.across * DENSE_WARPGROUP.column + DENSE_WARPGROUP.fixed
    products = height * width / 32 * DENSE.product
    held = (rows + sum(weights.columns)) * weights.length * 2 <= weights.chip.l2_bytes
    copies = fetched / (DENSE.l2_bytes if held else DENSE_MISSING_BYTES)
    cycles = max(max(products, copies) * sharing + DENSE.wait, alone)
    area = height * width / AREA
    chunk = cycles / weights.chip.microsecond_cycles
    times = Times(DENSE, -(-weights.length // CHUNK), chunk, DENSE.epilogue * area, DENSE.split_epilogue * area)
    # With multicast a cluster always has all its blocks.
    return times.least(weights.chip, items, tiles.most_splits, tiles.multicast, tiles.resident)


def batched_microseconds(tiles: DenseTiles, rows: int, matrices: int, weights: DenseWeights) -> float:
    """The estimated time of a batch, in microseconds."""
    (columns,), chip = weights.columns, weights.chip
    height, width = 64 * tiles.down, tiles.columns * weights.contractions
    items = matrices * -(-rows // height) * -(-columns // tiles.columns)
    waves = -(-items // (chip.multiprocessors * tiles.resident))
    sharing = min(tiles.resident, -(-items // chip.multiprocessors))  # blocks that share a multiprocessor
    fetched = (height + width) * 2 * CHUNK
    cycles = max(height * width / 32 * BATCHED.product, fetched / BATCHED.l2_bytes) * sharing + BATCHED.wait
    iterations = -(-weights.length // CHUNK)
    return waves * (iterations * cycles / chip.microsecond_cycles + BATCHED.epilogue * height * width / AREA)
