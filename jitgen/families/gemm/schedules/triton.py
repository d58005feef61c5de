"""Which form and tiles the triton dialect takes; the forms are those of ``gemm/triton.py``.

Measured on an H200: int4 weights in groups of 128 and dense bfloat16 ones, 4096 x 4096, 28672 x 4096 and 4096 x 14336.
"""

from __future__ import annotations

from jitgen.families.gemm.schedule import GemmSchedule, Problem

SIXTEEN_BITS = ("float16", "bfloat16")


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    return GemmSchedule("slices", 16, 16, 32, 4, 3, wide=problem.wide)
