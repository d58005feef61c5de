"""Which tiles the wgmma mainloops take: those that a small model of an H200 finds fastest.

The models were fitted to some 1100 timings (eleven layer shapes of models of 7 to 70 billion parameters, 16 to 4096
rows; quantised: W4A16 with groups of 128). Among the tiles measured for a shape, the quantised model's choice takes 2 %
longer than the best on average and 22 % at the worst, the dense one's 1 % and 16 %.

What they say of a multiprocessor: wgmma takes 64 x 32 products of 16 k's in 16 cycles; instructions that decode and
keep house are issued from the same slots and add up with that; L2 delivers 32 bytes a cycle or more; tiles that do not
fill a whole wave of blocks leave multiprocessors idle. Blocks that share out k are clusters, of which fewer fit the chip
than its multiprocessors could hold, because a cluster lies within one group of 16 or 18 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""Clusters of so many blocks, one block to a multiprocessor, that an H200 runs at once (asked of the driver)."""
CYCLES_OF_MICROSECOND = 1750.0
CHUNK = 64
TYPICAL_LENGTH = 4096


@dataclass(frozen=True)
class Tiles:
    """Attributes:
    tokens, warpgroups, blocks, span, steps, split: as ``gemm_wgmma_quantized.cuh`` has them.
    stages: as many as are of use; fewer where shared memory does not hold them.
    """

    tokens: int
    warpgroups: int
    blocks: int
    span: int
    split: int
    steps: int = 2

    @property
    def stages(self) -> int:
        return 8 if self.span == 1 else 5

    def columns(self, contractions: int) -> int:
        """Output columns of a tile."""
        return self.warpgroups * self.blocks * 64 // contractions


def choose(rows: int, columns: Sequence[int], length: int, contractions: int, bits: int, light: bool) -> Tiles:
    """The tiles for x[rows, length] and regions of so many columns.

    Args:
        contractions: 1 or 2, of each region.
        bits: of a code.
        light: the codes are of 4 bits with scales in bfloat16, or have no groups, and x is bfloat16: other weights take
            more registers to decode, which only two warpgroups have.
    """
    candidates = _candidates(rows, length, contractions, bits, light)
    return min(candidates, key=lambda tiles: microseconds(tiles, rows, columns, length, contractions, bits))


def _candidates(rows: int, length: int, contractions: int, bits: int, light: bool) -> Iterator[Tiles]:
    tallest = next((tokens for tokens in (16, 32, 64) if rows <= tokens), 128)
    for tokens in (tallest, 64) if tallest == 128 else (tallest,):
        for warpgroups, blocks in ((2, 2), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2)):
            most = {2: 256, 3: 128, 4: 64}[warpgroups]  # of accumulators for two columns, by registers
            if blocks % contractions or blocks * tokens > most or (warpgroups > 2 and not light):
                continue
            held = warpgroups * blocks < 8  # a longer stage's codes, in registers
            span = 2 if bits == 4 and blocks * tokens <= 128 and length > CHUNK and held else 1
            for split in range(1, 9):
                if split == 1 or length >= 4 * split * span * CHUNK:
                    yield Tiles(tokens, warpgroups, blocks, span, split)


def microseconds(
    tiles: Tiles, rows: int, columns: Sequence[int], length: int, contractions: int, bits: int = 4
) -> float:
    """What the model says, of a kernel alone on the chip."""
    width, height = tiles.columns(contractions), tiles.warpgroups * tiles.blocks
    items = -(-rows // tiles.tokens) * sum(-(-n // width) for n in columns)
    waves = -(-items // RESIDENT[tiles.split])
    products = height * 4 * max(tiles.tokens / 2, 8)
    instructions = tiles.warpgroups * (45 / tiles.span + 36 * tiles.blocks)
    fetched = tiles.tokens * 2 * CHUNK + height * CHUNK * 8 * bits
    chunks = -(-length // (CHUNK * tiles.span * tiles.split)) * tiles.span
    cycles = max(products + instructions, fetched / 32) + 40 / tiles.span
    combining = 1.0 + 2.5 * (waves - 1) if tiles.split > 1 else 0.0  # no copies run ahead over it
    return 4.5 + combining + waves * (chunks * cycles / CYCLES_OF_MICROSECOND + 0.003 * tiles.tokens * height)


# ------------------------------------------------------------------------------------------------------------- dense


@dataclass(frozen=True)
class DenseTiles:
    """Attributes: as ``gemm_wgmma_dense.cuh`` has them, ``columns`` being those of one contraction."""

    down: int
    across: int
    columns: int
    stages: int
    multicast: int = 1
    resident: int = 1


_DENSE = (
    DenseTiles(2, 1, 256, 4, multicast=2),
    DenseTiles(2, 1, 192, 5),
    DenseTiles(2, 1, 128, 6),
    DenseTiles(1, 2, 256, 5),
    DenseTiles(1, 2, 128, 8),
    DenseTiles(1, 1, 64, 6, resident=2),
    DenseTiles(1, 1, 32, 8, resident=2),
)


def choose_dense(rows: int, columns: Sequence[int], contractions: int, transposed: bool) -> DenseTiles:
    """The tiles for so many rows of x and dense regions of so many columns, of 1 or 2 contractions each. K is of little
    account: nothing shares it out.

    Args:
        transposed: the weights lie as [K, N], which takes whole runs of 64 columns.
    """
    fitting = [
        replace(tiles, columns=tiles.columns // contractions)
        for tiles in _DENSE
        if (rows > 64 or tiles.down == 1) and _fits(tiles.columns // contractions, tiles, transposed)
    ]
    return min(fitting, key=lambda tiles: dense_microseconds(tiles, rows, columns, TYPICAL_LENGTH, contractions))


def _fits(columns: int, tiles: DenseTiles, transposed: bool) -> bool:
    return columns % ((64 if transposed else 16) * max(tiles.across, tiles.multicast)) == 0


def dense_microseconds(tiles: DenseTiles, rows: int, columns: Sequence[int], length: int, contractions: int) -> float:
    """What the model says, of a kernel alone on the chip."""
    height, width = 64 * tiles.down, tiles.columns * contractions
    down = -(-rows // (height * tiles.multicast)) * tiles.multicast
    items = down * sum(-(-n // tiles.columns) for n in columns)
    waves = -(-items // (RESIDENT[1] * tiles.resident))
    beside = min(tiles.resident, -(-items // RESIDENT[1]))  # blocks that share a multiprocessor
    products = height * width / 32 * 1.1
    fetched = (height + width / tiles.multicast) * 2 * CHUNK
    cycles = max(products, fetched / 48) * beside + 40
    chunks = -(-length // CHUNK)
    return 5.0 + waves * (chunks * cycles / CYCLES_OF_MICROSECOND + height * width / 32768)
