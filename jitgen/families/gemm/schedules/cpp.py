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


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``: tiles of 1, of up to 8 or of up to 24 rows."""
    rows = next((most for most in (1, 8) if problem.rows <= most), TILE_ROWS)
    return GemmSchedule("tiles", rows, 64, 256)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Rows of the activation are laid out anew for the mainloop anyway, once for all tiles."""
    return Decision(True, "as it is laid out for the mainloop")
