"""The tiles of the cpp dialect.

One mainloop computes every size. Each height of a tile is a function of its own that has to be compiled, and therefore
a kernel for few rows has only low tiles.
"""

from __future__ import annotations

from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.ir.program import Decision
from jitgen.spec import Target

TILE_ROWS = 24
"""Rows of the tallest tile, on AVX-512 (the header has a lower limit elsewhere): its accumulators and the operands they
are computed from fill the vector registers."""

SMALL_TILES = (1, 8)
"""Row counts up to which a kernel has tiles of at most that many rows."""


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``: tiles of 1, of up to 8 or of up to 24 rows."""
    rows = next((most for most in SMALL_TILES if problem.rows <= most), TILE_ROWS)
    return GemmSchedule("tiles", block_m=rows, block_n=64, block_k=256)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Always fused: the mainloop packs the activation once for all tiles, and computes it while packing."""
    return Decision(True, "as it is laid out for the mainloop")


def fewest_rows(schedule: GemmSchedule) -> int:
    """The least number of rows that a kernel of this schedule is called with: fewer rows have another schedule."""
    return 1 + max((most for most in SMALL_TILES if most < schedule.block_m), default=0)
