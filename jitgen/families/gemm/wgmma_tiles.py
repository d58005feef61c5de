"""Which tiles the wgmma mainloops take: quantised, those a small model of an H200 finds fastest; dense, by a rule.

The model was fitted to some 900 timings (six layer shapes of models of 8 and 70 billion parameters, 16 to 1024 rows,
W4A16 with groups of 128); its choice takes 2 % longer than the best tiles measured for a shape on average, 13 % at the
worst. What it says of a multiprocessor: a wgmma takes ``tokens`` / 2 cycles; the instructions that decode and keep
house are issued from the same slots and so add up with that; and L2 delivers about 32 bytes a cycle. Blocks that share
out k are clusters, of which fewer fit the chip than its multiprocessors could hold, because a cluster lies within one
group of 16 or 18 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""Clusters of so many blocks, one block to a multiprocessor, that an H200 runs at once (asked of the driver)."""
CYCLES_OF_MICROSECOND = 1750.0
CHUNK = 64


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
    instructions = tiles.warpgroups * (60 / tiles.span + 30 * tiles.blocks)
    fetched = tiles.tokens * 2 * CHUNK + height * CHUNK * 8 * bits
    chunks = -(-length // (CHUNK * tiles.span * tiles.split)) * tiles.span
    inner = chunks * max(products + instructions, fetched / 32) / CYCLES_OF_MICROSECOND
    return 4.5 + (0.5 if tiles.split > 1 else 0.0) + waves * (inner + 0.006 * tiles.tokens * height)


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


_LARGE = (DenseTiles(2, 1, 256, 4, multicast=2), DenseTiles(2, 1, 128, 6))
_SMALL = (
    DenseTiles(1, 2, 256, 5),
    DenseTiles(1, 2, 128, 8),
    DenseTiles(1, 1, 64, 6, resident=2),
    DenseTiles(1, 1, 32, 8, resident=2),
)
ENOUGH_TILES = 100


def choose_dense(rows: int, columns: Sequence[int], contractions: int, transposed: bool) -> DenseTiles:
    """The largest tiles of which there are enough to keep the chip busy; within 10 % of the best of eight measured on
    an H200 for three layer shapes at 32 to 256 rows (12 % in one case), and for all at 1024 rows and more.
    """
    fitting = [
        replace(tiles, columns=tiles.columns // contractions)
        for tiles in (*(_LARGE if rows > 64 else ()), *_SMALL)
        if not transposed or tiles.columns // contractions % (64 * max(tiles.across, tiles.multicast)) == 0
    ]
    for tiles in fitting:
        if -(-rows // (64 * tiles.down)) * sum(-(-n // tiles.columns) for n in columns) >= ENOUGH_TILES:
            return tiles
    return fitting[-1]
