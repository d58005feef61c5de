"""The tiles of the cpp dialect.

One mainloop computes every size. Each height of a tile is a function of its own that has to be compiled, and therefore
a kernel for few rows has only low tiles.
"""

from __future__ import annotations

from jitgen.device import Device
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.mainloops import CppDecoded, CppSchedule, CppTiles
from jitgen.families.gemm.schedule import Problem
from jitgen.ir.program import Decision

TILE_ROWS = 24
"""Rows of the tallest tile, on AVX-512 (the header has a lower limit elsewhere): its accumulators and the operands they
are computed from fill the vector registers."""

SMALL_TILES = (1, 8)
"""Row counts up to which a kernel has tiles of at most that many rows."""


DECODED_ROWS = {"x86-64-v4": 64}
"""By level, rows of x above which quantised weights are decoded to a panel that all tiles read. Tiles that decode for
themselves repeat it; here there are three tiles of 24 rows or fewer, and 64 is the end of a bucket."""

DECODED_ROWS_OF_LOW_TILES = 8
"""The same for the other levels, where tiles have at most 6 rows (``gemm_compute.hpp``)."""


def candidates(problem: Problem) -> list[CppSchedule]:
    """One schedule: tiles of 1, of up to 8 or of up to 24 rows; for many rows, of decoded weights."""
    undecoded = DECODED_ROWS.get(problem.target.arch, DECODED_ROWS_OF_LOW_TILES)
    if problem.device.batch_invariant:
        kind = CppDecoded if problem.quantized and problem.rows > undecoded else CppTiles
        return [kind(TILE_ROWS, fewest_rows=1, invariant=True)]
    if problem.quantized and problem.rows > undecoded:
        return [CppDecoded(TILE_ROWS, fewest_rows=1 + undecoded)]
    rows = next((most for most in SMALL_TILES if problem.rows <= most), TILE_ROWS)
    fewest = 1 + max((most for most in SMALL_TILES if most < rows), default=0)
    return [CppTiles(rows, fewest_rows=fewest)]


def cost(problem: Problem, candidate: CppSchedule) -> float:
    """No estimate: there is only one candidate."""
    return 0.0


def prologue(computed: Prologue, device: Device) -> Decision:
    """Always fused: the mainloop packs the activation once for all tiles, and computes it while packing."""
    return Decision(True, "as it is laid out for the mainloop")
