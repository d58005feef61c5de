"""Chooses the tiles of the cpp dialect.

One mainloop computes every size. Each height of a tile is a function of its own that has to be compiled, and therefore
a kernel for few rows has only low tiles.
"""

from __future__ import annotations

import functools
from statistics import geometric_mean

from jitgen.device import Device
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.mainloops import CppDecoded, CppSchedule, CppTiles
from jitgen.families.gemm.schedule import MOST_ROWS, ROW_BUCKETS, Problem, fewest_rows
from jitgen.families.gemm.tile_times import sampled_rows
from jitgen.ir.program import Decision

TILE_ROWS = 24
"""Rows of the tallest tile, on AVX-512 (the header has a lower limit elsewhere): its accumulators and the operands they
are computed from fill the vector registers."""

SMALL_TILES = (1, 8)
"""Row counts up to which a kernel has tiles of at most that many rows."""


TILE_ROWS_BELOW = 6
"""The same on the levels below AVX-512, by that limit (``gemm_compute.hpp``)."""

PANEL = 1.0
"""What it takes to store decoded weights to a panel and to read them from it for all tiles, as a multiple of decoding
them once: a panel pays from two tiles on. Measured on AVX2 (AMD EPYC, one thread, int4 and int8 weights of 4096 x
2048): tiles that decode for themselves take 0.85 to 0.91 of the panel's time at 7 rows, 1.12 to 1.24 at 12 and 1.2 at
24. On AVX-512 it gives the end of 64 rows that was measured there before."""


def candidates(problem: Problem) -> list[CppSchedule]:
    """Lists tiles of 1, of up to 8 or of up to 24 rows; for quantised weights also tiles of decoded weights."""
    level = problem.device.level.name
    if problem.device.batch_invariant:
        kind = CppDecoded if problem.quantized and problem.rows >= decoded_from(level) else CppTiles
        return [kind(TILE_ROWS, fewest_rows=1, invariant=True)]
    rows = next((most for most in SMALL_TILES if problem.rows <= most), TILE_ROWS)
    fewest = 1 + max((most for most in SMALL_TILES if most < rows), default=0)
    if problem.grouping:  # a group may have any number of rows; there is one row for each id
        rows, fewest = max(rows, SMALL_TILES[problem.grouping != "ids"]), 1
    tiles = CppTiles(rows, fewest_rows=fewest)
    if not problem.quantized:
        return [tiles]
    if problem.grouping:
        return [CppDecoded(TILE_ROWS, fewest_rows=1)] if problem.rows >= decoded_from(level) else [tiles]
    decoded = decoded_from(level)
    return [tiles, CppDecoded(TILE_ROWS, fewest_rows=decoded if problem.fewest_rows >= decoded else fewest)]


def cost(problem: Problem, candidate: CppSchedule) -> float:
    """Estimates how often weights are decoded, as far as candidates differ, by the geometric mean over rows of the
    bucket."""
    return _decodings(problem.fewest_rows, problem.rows, problem.device.level.name, isinstance(candidate, CppDecoded))


def _decodings(fewest: int, most: int, level: str, decoded: bool) -> float:
    if decoded:
        return 1 + PANEL
    tile = TILE_ROWS if level == "x86-64-v4" else TILE_ROWS_BELOW
    return geometric_mean(-(-rows // tile) for rows in sampled_rows(fewest, most))


@functools.cache
def decoded_from(level: str) -> int:
    """Returns the least rows of the buckets for which weights are decoded to a panel on this level. It is the same
    number in all of them, so that they share a source."""
    ends = (*ROW_BUCKETS, MOST_ROWS)
    return next(
        fewest_rows(end)
        for end in ends
        if _decodings(fewest_rows(end), end, level, True) < _decodings(fewest_rows(end), end, level, False)
    )


def prologue(computed: Prologue, device: Device) -> Decision:
    """Decides to fuse always: the mainloop packs the activation once for all tiles, and computes it while packing."""
    return Decision(True, "as it is laid out for the mainloop")
