"""Tabulates the tiles of dense wgmma mainloops, of 16 bits and of bytes, among which ``wgmma_tiles.py`` chooses.

``WgmmaDense`` says what the numbers of a tile are, and the docstring of a table which timings its tiles are from.
"""

from __future__ import annotations

from jitgen.families.gemm.mainloops import WgmmaBytes, WgmmaDense

DENSE = (
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

BATCHED = (
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

FEW_ROWS = (
    WgmmaDense(1, 1, 16, stages=12, staged=16, swapped=True),
    WgmmaDense(2, 1, 16, stages=12, staged=16, swapped=True),
    WgmmaDense(1, 1, 16, stages=5, resident=4, staged=16, swapped=True),
    WgmmaDense(1, 1, 32, stages=8, resident=2, staged=32, swapped=True),
)
"""Further tiles of a batch whose x have at most ``FEW_TOKENS`` rows. Of twelve batches of 1 to 16 rows with weights
along N, eight were fastest with one of them on an H200, and the others with tiles of 64 columns: they took 0.65 to 0.95
of the time of the ``columns`` mainloop."""


GROUPED = (
    *BATCHED,
    WgmmaDense(2, 1, 256, stages=4, multicast=2),
    WgmmaDense(2, 1, 192, stages=4, multicast=2),
    WgmmaDense(2, 1, 128, stages=6, multicast=2, pingpong=True),
    WgmmaDense(1, 1, 256, stages=4, multicast=2, pingpong=True),
)
"""Tiles of a product of groups of rows."""
GROUPED_IN_TURN = (WgmmaDense(2, 1, 128, stages=6, multicast=2, pingpong=True, shares_x=True),)
"""Further tiles of groups of more than 64 rows on average, of one contraction: of 14 products on an H200 they have
0.949 of the speed of the fastest of 12 tiles, and 0.84 at worst, where what was chosen without them has 0.922 and 0.71;
of 5 on an H100 0.981 and 0.94, and 0.887 and 0.75 (``h200-grouped-tiles.json``, ``h100-grouped-tiles.json``)."""


DENSE_OF_MANY_ROWS = (
    WgmmaDense(2, 1, 256, stages=4, multicast=2, shares_x=True),
    WgmmaDense(2, 1, 192, stages=4, multicast=2, shares_x=True),
    WgmmaDense(3, 1, 192, stages=4, multicast=2, shares_x=True, staged=32),
    WgmmaDense(2, 1, 160, stages=5, multicast=2, shares_x=True, staged=32, pingpong=True),
    WgmmaDense(1, 1, 256, stages=4, multicast=2, shares_x=True, pingpong=True),
    WgmmaDense(1, 1, 192, stages=5, pingpong=True),
)
"""Further tiles of x with more rows than ``FEW_TOKENS`` has."""


def arranged(
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


NARROW = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1))
"""Blocks of 64 rows of x of tiles that are as wide as few columns need, and how many blocks share the weight's tile.
7698 x 136 x 14080 takes 63 us by 128 x 144 on an H200, by 128 x 160 66, and by 128 x 192 81."""


ARRANGED = (
    arranged(1, 32, x=4),
    arranged(1, 64, x=2),
    arranged(1, 64, x=4, weights=2),
    arranged(1, 96, x=4, weights=2),
    arranged(1, 128, x=4, weights=2),
    arranged(1, 128, x=2, weights=4),
    arranged(1, 192, weights=4, pingpong=True),
    arranged(2, 96, x=2, weights=2),
    arranged(2, 128, x=2, weights=2),
    arranged(2, 128, x=4, weights=2),
    arranged(2, 128, x=4, weights=2, pingpong=True),
    arranged(2, 160, weights=2),
    arranged(2, 160, x=2),
    arranged(2, 160, x=4, weights=2, pingpong=True),
    arranged(2, 192, x=2, weights=2),
    arranged(2, 192, x=2, weights=4),
    arranged(2, 192, weights=2, pingpong=True),
    arranged(2, 192, x=2, pingpong=True),
    arranged(2, 224, x=2),
    arranged(2, 256, x=2, weights=2),
    arranged(2, 256, x=2, weights=4),
    arranged(3, 96, x=4, weights=2),
    arranged(3, 128, x=4),
    arranged(3, 160),
    arranged(3, 160, x=4),
    arranged(1, 144, x=4, swapped=True),
    arranged(1, 96, x=4, weights=2, swapped=True),
    arranged(2, 96, swapped=True),
    arranged(2, 96, x=4, weights=2, swapped=True),
    arranged(2, 96, x=4, weights=2, swapped=True, pingpong=True),
    arranged(2, 112, weights=2, swapped=True),
    arranged(2, 128, x=2, weights=4, swapped=True),
    arranged(2, 160, x=4, weights=2, swapped=True),
    arranged(2, 160, x=2, swapped=True, pingpong=True),
    arranged(2, 160, x=4, weights=2, swapped=True, pingpong=True),
    arranged(2, 192, x=4, weights=2, swapped=True),
    arranged(2, 224, weights=2, swapped=True),
    arranged(2, 224, x=2, swapped=True),
    arranged(3, 96, weights=2, swapped=True),
    arranged(3, 96, x=2, weights=4, swapped=True),
    arranged(3, 128, x=2, weights=4, swapped=True),
    arranged(3, 160, swapped=True),
    arranged(3, 160, x=2, swapped=True),
    arranged(3, 160, x=2, weights=4, swapped=True),
    arranged(3, 192, swapped=True),
    arranged(3, 192, x=2, swapped=True),
    arranged(2, 160, swapped=True, blocks=2),
    arranged(2, 160, x=2, swapped=True, blocks=2),
)
"""Tiles of one product of more rows, with x and the weights swapped or of clusters that share operands: of some 120
that were timed on an H200, and of 80 by the model for 400 random products, those without which the fastest of the
others takes longer (``docs/measured/h200-candidates-fitted-3.json``). Of 260 random products of an H200 27 launch one
of 192 columns in turn, or of 160 rows of x that two blocks share in turn or that is tall: they take 0.923 of their
time."""

BYTES = (
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

PROMOTED = (
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

QUANTISING_TWO = (
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(1, 1, 256, stages=5),
)
"""Tiles of two products of which the result is quantised, so that a warpgroup has 128 columns of each. Where two blocks
shared a weight's tile they took 7 % longer for 4096 rows of Llama-3-8B's gate and up and 34 % for 128 (H200), and tiles
in turn 9 to 28 % longer from 512 rows on."""

BATCHED_BYTES = (
    WgmmaBytes(2, 1, 128, stages=5),
    WgmmaBytes(2, 1, 64, stages=3, resident=2),
    WgmmaBytes(1, 1, 128, stages=4, resident=2),
    WgmmaBytes(1, 1, 64, stages=4, resident=3),
    WgmmaBytes(1, 1, 128, stages=8, pingpong=True),
)
"""Tiles of a batch of products of operands of one byte."""

GROUPED_BYTES = (
    *BATCHED_BYTES,
    WgmmaBytes(2, 1, 256, stages=4, multicast=2),
    WgmmaBytes(2, 1, 256, stages=4),
    WgmmaBytes(2, 1, 128, stages=6, multicast=2),
    WgmmaBytes(2, 1, 128, stages=6),
    WgmmaBytes(1, 2, 256, stages=5, staged=32),
    WgmmaBytes(1, 2, 128, stages=8),
    WgmmaBytes(1, 1, 128, stages=8),
)
"""Tiles of a product of groups of rows of such, beside those."""
