"""Declares the schedule of products by CUTLASS: the collectives of ``gemm_cutlass.cu.j2``, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.schedule.declared import DeclaredSchedule, about

EPILOGUE_ROWS, EPILOGUE_COLUMNS = 128, 32
"""Rows and columns of the piece of a tile that an epilogue computes and stores at once, as CUTLASS's builder has it."""


@dataclass(frozen=True)
class CutlassTile(DeclaredSchedule):
    """Schedules a kernel of CUTLASS 3.x for sm_90a: persistent blocks of a warpgroup that copies by tensor maps and two
    that compute each tile together.

    Attributes:
        block_m, block_n, block_k: the tile of a block.
        cluster: blocks of a cluster, which are neighbours along M and share the copies of the weight's tile.
        swizzle: tiles along one dimension that are walked together at most, so that blocks that run at the same time
            share operands in the L2 cache.
        stages: tiles of both operands in shared memory.
        shared_bytes: dynamic shared memory of a block, at least what CUTLASS's storage takes.
        wide: whether indices are 64-bit.
    """

    path: ClassVar[str] = "cutlass"
    template: ClassVar[str] = "gemm_cutlass"
    dependent_launch: ClassVar[bool] = False
    warps: ClassVar[int] = 12
    sentence = (
        *("{path} mainloop", "tiles of {block_m} x {block_n}, {block_k} of K a step", "stages"),
        *("cluster", "swizzle", "shared_bytes", "wide"),
    )
    block_m: int
    block_n: int
    block_k: int
    cluster: int = field(default=1, metadata=about("clusters of {} blocks"))
    swizzle: int = field(default=1, metadata=about("swizzle of at most {} tiles"))
    stages: int = field(default=0, metadata=about("{} stages"))
    shared_bytes: int = field(default=0, metadata=about("{} bytes of shared memory", least=1))
    wide: bool = field(default=False, metadata=about("64-bit indices"))
