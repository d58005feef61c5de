"""Which mainloop and tiles the triton dialect takes."""

from __future__ import annotations

from jitgen.families.gemm.schedule import GemmSchedule, Problem


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    return GemmSchedule("tiles", 16, 64, 64, wide=problem.wide)
