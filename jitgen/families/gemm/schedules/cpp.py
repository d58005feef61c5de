"""Which tiles the cpp dialect takes.

The mainloop is one for all sizes; a kernel for few rows has small tiles only, because each height of a tile is a
function that is compiled.
"""

from __future__ import annotations

from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.ir.contractions import Decision, Prologue
from jitgen.spec import Target

TILE_ROWS = 24
"""Of the tallest tile (on AVX-512; elsewhere the header has fewer): its accumulators and what meets in them are the
registers there are."""


SMALL_TILES = (1, 8)
"""Kernels for at most so many rows have tiles no taller than that."""


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``: tiles of 1, of up to 8 or of up to 24 rows."""
    rows = next((most for most in SMALL_TILES if problem.rows <= most), TILE_ROWS)
    return GemmSchedule("tiles", rows, 64, 256)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Rows of the activation are laid out anew for the mainloop anyway, once for all tiles."""
    return Decision(True, "as it is laid out for the mainloop")


def fewest_rows(schedule: GemmSchedule) -> int:
    """The least number of rows that a kernel of this schedule is called with: fewer have another schedule."""
    return 1 + max((most for most in SMALL_TILES if most < schedule.block_m), default=0)
