"""Tiles of the wgmma mainloops: those that a small model of an H200 estimates to be fastest.

The models were fitted to about 1100 timings: eleven layer shapes of models of 7 to 70 billion parameters, at 16 to 4096
rows, quantised weights being W4A16 with groups of 128. Among the tiles that were measured for a shape, the choice for
quantised weights takes 2 % longer than the best on average and 22 % at worst; the choice for dense weights takes 1 %
longer on average and 16 % at worst.

What the models say of one multiprocessor:

* wgmma computes 64 x 32 products of 16 k's in 16 cycles.
* Instructions that decode weights or control the loop share issue slots with wgmma, so their time is added.
* The L2 cache delivers at least 32 bytes a cycle.
* The last wave of blocks may leave multiprocessors idle, and takes as long as a full one.
* Blocks that share K form a cluster. A cluster lies within one group of 16 or 18 multiprocessors (a GPC), so fewer
  clusters run at once than the number of multiprocessors suggests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""Clusters that an H200 runs at once, by the blocks of a cluster, with one block on each multiprocessor (from
cuOccupancyMaxActiveClusters)."""
CYCLES_PER_MICROSECOND = 1750.0
"""Clock of the multiprocessors, in MHz (H200)."""
CHUNK = 64
"""Extent of K in a chunk of a stage."""
TYPICAL_LENGTH = 4096
"""K for which tiles of one dense product are compared. No dense tile splits K, so that K has little influence on the
choice."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of ``gemm_wgmma_quantized.cuh``.

    Attributes:
        tokens: rows of x in a tile.
        warpgroups: warpgroups that compute.
        blocks: blocks of 64 rows of the weight that a warpgroup computes, of all contractions.
        span: chunks of K in a stage.
        cluster_k_splits: blocks of a cluster that share K (``Config::split``).
        steps: wgmma steps of 16 along K that are started together.
    """

    tokens: int
    warpgroups: int
    blocks: int
    span: int
    cluster_k_splits: int
    steps: int = 2

    @property
    def stages(self) -> int:
        """Stages beyond which more of them gain nothing; shared memory may hold fewer."""
        return 8 if self.span == 1 else 5

    def columns(self, contractions: int) -> int:
        """Output columns of a tile."""
        return self.warpgroups * self.blocks * 64 // contractions


def candidates(rows: int, length: int, contractions: int, bits: int, light: bool) -> Iterator[Tiles]:
    """The tiles that a kernel for x[rows, length] and a quantised weight can have.

    Args:
        contractions: contractions of each region, 1 or 2.
        bits: bits of a code.
        light: whether codes have 4 bits and no zero-points, x is bfloat16, and scales are bfloat16 or there are no
            groups. Other weights take more registers to decode, which a thread has only with two warpgroups.
    """
    tallest = next((tokens for tokens in (16, 32, 64) if rows <= tokens), 128)
    for tokens in (tallest, 64) if tallest == 128 else (tallest,):
        for warpgroups, blocks in ((2, 2), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2)):
            most = {2: 256, 3: 128, 4: 64}[warpgroups]  # the registers of a thread limit blocks * tokens
            if blocks % contractions or blocks * tokens > most or (warpgroups > 2 and not light):
                continue
            codes_fit = warpgroups * blocks < 8  # registers hold the codes of a stage of two chunks
            span = 2 if bits == 4 and blocks * tokens <= 128 and length > CHUNK and codes_fit else 1
            for splits in range(1, 9):
                if splits == 1 or length >= 4 * splits * span * CHUNK:
                    yield Tiles(tokens, warpgroups, blocks, span, splits)


def microseconds(
    tiles: Tiles, rows: int, columns: Sequence[int], length: int, contractions: int, bits: int = 4
) -> float:
    """The estimated time of a quantised kernel that has the device for itself, in microseconds."""
    width, height = tiles.columns(contractions), tiles.warpgroups * tiles.blocks
    items = -(-rows // tiles.tokens) * sum(-(-n // width) for n in columns)
    waves = -(-items // RESIDENT[tiles.cluster_k_splits])
    products = height * 4 * max(tiles.tokens / 2, 8)
    instructions = tiles.warpgroups * (45 / tiles.span + 36 * tiles.blocks)
    fetched = tiles.tokens * 2 * CHUNK + height * CHUNK * 8 * bits
    chunks = -(-length // (CHUNK * tiles.span * tiles.cluster_k_splits)) * tiles.span
    cycles = max(products + instructions, fetched / 32) + 40 / tiles.span
    combining = 1.0 + 2.5 * (waves - 1) if tiles.cluster_k_splits > 1 else 0.0  # copies do not overlap it
    return 4.5 + combining + waves * (chunks * cycles / CYCLES_PER_MICROSECOND + 0.003 * tiles.tokens * height)


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
        resident: blocks that a multiprocessor holds at once.
        epilogue_steps: an epilogue takes 32 times as many columns through shared memory at once (``Config::turn``).
    """

    down: int
    across: int
    columns: int
    stages: int
    multicast: int = 1
    resident: int = 1
    epilogue_steps: int = 1


_DENSE = (
    DenseTiles(2, 1, 256, 4, multicast=2),
    DenseTiles(2, 1, 192, 5),
    DenseTiles(2, 1, 128, 6),
    DenseTiles(1, 2, 256, 5),
    DenseTiles(1, 2, 128, 8),
    DenseTiles(1, 1, 64, 6, resident=2),
    DenseTiles(1, 1, 32, 8, resident=2),
)
"""Tiles of one product of matrices."""

_BATCHED = (
    DenseTiles(2, 1, 256, 3, epilogue_steps=2),
    DenseTiles(2, 1, 192, 4, epilogue_steps=2),
    DenseTiles(2, 1, 128, 5, epilogue_steps=2),
    DenseTiles(2, 1, 64, 3, resident=2, epilogue_steps=2),
    DenseTiles(1, 1, 128, 4, resident=2, epilogue_steps=2),
    DenseTiles(1, 1, 64, 4, resident=3, epilogue_steps=2),
)
"""Tiles of a batch of products. Their K is often short, so that most of the bytes moved are results."""


def dense_candidates(rows: int, matrices: int, contractions: int, transposed: bool) -> list[DenseTiles]:
    """The tiles that a kernel for ``matrices`` dense x of these rows can have.

    Args:
        contractions: contractions of each region, 1 or 2.
        transposed: whether the weights are contiguous along N, which takes a multiple of 64 columns.
    """
    return [
        replace(tiles, columns=tiles.columns // contractions)
        for tiles in (_BATCHED if matrices > 1 else _DENSE)
        if (rows > 64 or tiles.down == 1) and _fits(tiles.columns // contractions, tiles, transposed)
    ]


def _fits(columns: int, tiles: DenseTiles, transposed: bool) -> bool:
    return columns % ((64 if transposed else 16) * max(tiles.across, tiles.multicast)) == 0


def dense_microseconds(tiles: DenseTiles, rows: int, columns: Sequence[int], length: int, contractions: int) -> float:
    """The estimated time of a dense kernel that has the device for itself, in microseconds."""
    height, width = 64 * tiles.down, tiles.columns * contractions
    down = -(-rows // (height * tiles.multicast)) * tiles.multicast
    items = down * sum(-(-n // tiles.columns) for n in columns)
    waves = -(-items // (RESIDENT[1] * tiles.resident))
    sharing = min(tiles.resident, -(-items // RESIDENT[1]))  # blocks that share a multiprocessor
    products = height * width / 32 * 1.1
    fetched = (height + width / tiles.multicast) * 2 * CHUNK
    cycles = max(products, fetched / 48) * sharing + 40
    chunks = -(-length // CHUNK)
    return 5.0 + waves * (chunks * cycles / CYCLES_PER_MICROSECOND + height * width / 32768)


def batched_microseconds(
    tiles: DenseTiles, rows: int, columns: int, length: int, matrices: int, contractions: int
) -> float:
    """The estimated time of a batch, in microseconds.

    Two constants, the cycles that an iteration waits and the time of an epilogue, are fitted to ten batches of 7 to 256
    matrices on an H200. Choices take 2 % longer than the best on average and 14 % at worst.
    """
    height, width = 64 * tiles.down, tiles.columns * contractions
    items = matrices * -(-rows // height) * -(-columns // tiles.columns)
    waves = -(-items // (RESIDENT[1] * tiles.resident))
    sharing = min(tiles.resident, -(-items // RESIDENT[1]))  # blocks that share a multiprocessor
    cycles = max(height * width / 32 * 1.1, (height + width) * 2 * CHUNK / 48) * sharing + 150
    return waves * (-(-length // CHUNK) * cycles / CYCLES_PER_MICROSECOND + 1.7 * height * width / 32768)
