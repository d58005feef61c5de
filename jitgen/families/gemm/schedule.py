"""How a matmul kernel is computed: the mainloop and its tiles, chosen by a rule of each dialect.

``GemmSchedule`` is a part of the request key: for given weights it takes at most eight values over all numbers of rows
(the M buckets), so that a few kernels serve every batch size. ``Problem`` is all that a rule may look at.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.ir.body import Body, Contraction
from jitgen.ir.contractions import Decision, Prologue
from jitgen.ir.program import Kernel
from jitgen.spec import Target

ROW_BUCKETS = (1, 4, 8, 16, 64, 256, 1024)
"""Upper ends of the M buckets; more rows than the last are one bucket more."""


TRITON_FORMS = ("tokens", "weights", "slices")
"""Paths of the triton dialect, and what they begin with."""


@dataclass(frozen=True)
class GemmSchedule:
    """Attributes:
    path: the mainloop, by the name of its dialect's header or template part.
    block_m, block_n, block_k: the tile: rows (tokens), columns (of the weight's N) and K of one step.
    warps: of a block (GPU).
    stages: K steps in flight.
    split: blocks (of a cluster) that share one tile's K; their sums are added in order, and the epilogue runs once.
    parts: blocks that each store their sums of a part of one tile's K, for a kernel that follows to add in order and to
        run the epilogue of (``ir/split.py``). A rule must not choose it by the epilogue, which is not there any more
        once the product is split.
    multicast: blocks of a cluster that share a tile of one operand.
    steps: ``wgmma_quantized``: of 16 k's whose products are started together; ``stream``: elements of a lane's load.
    resident: blocks a multiprocessor is to hold at once where blocks stay and walk tiles; 0 where each has one tile.
    stagger: K steps by which a tile begins after its neighbour; each goes round all of K.
    raster: tile columns (or rows) that neighbouring blocks walk together, so that they share a cache.
    shared_bytes: of dynamic shared memory for a block.
    wide: 64-bit indices.
    """

    path: str
    block_m: int
    block_n: int
    block_k: int
    warps: int = 1
    stages: int = 1
    split: int = 1
    parts: int = 1
    multicast: int = 1
    steps: int = 1
    resident: int = 0
    raster: int = 1
    stagger: int = 0
    shared_bytes: int = 0
    wide: bool = False

    @property
    def pdl(self) -> bool:
        """Whether the mainloop is made for programmatic dependent launch: it waits for the kernel ahead of it in the
        stream before it reads what that may have written, and until then fetches weights or sets itself up."""
        ahead = ("mma", "rows", "columns", "stream", "stream_outer")
        return self.maps or self.path in ahead or self.path.startswith(TRITON_FORMS)

    @property
    def maps(self) -> bool:
        """Whether the mainloop copies by tensor maps."""
        return self.path.startswith("wgmma")

    @property
    def step(self) -> int:
        """Of K in one turn of the loop."""
        return self.block_k * (self.warps if self.path.startswith("slices") else 1)

    @property
    def block_threads(self) -> int:
        return self.warps * 32

    def blocks(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Blocks of the grid for regions of (rows, columns); at least one for a region without columns."""
        if self.resident and self.multicast > 1:  # a cluster's tiles lie side by side; one that is not whole idles
            return sum(self._clustered(rows, columns) for rows, columns in sizes)
        tiles = sum(-(-rows // self.block_m) * -(-columns // self.block_n) for rows, columns in sizes)
        return self.split * self.parts * tiles

    def _clustered(self, rows: int, columns: int) -> int:
        down, across = -(-rows // self.block_m), -(-columns // self.block_n)
        return self.multicast * max(down * -(-across // self.multicast), -(-down // self.multicast) * across)

    @property
    def cluster(self) -> int:
        return max(self.split, self.multicast)


@dataclass(frozen=True)
class Problem:
    """What a dialect's rule decides by.

    Attributes:
        rows: the upper end of the call's M bucket (so that a rule cannot tell two calls of one bucket apart); for the
            last bucket twice its lower end.
        columns: N of each region; ``length``: K.
        bodies: the regions, whose contractions are alike.
        layouts: of the regions.
        wide: 64-bit indices.
    """

    rows: int
    columns: tuple[int, ...]
    length: int
    bodies: tuple[Body, ...]
    layouts: tuple[GemmLayout, ...]
    wide: bool
    target: Target

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        """Of one region."""
        return self.bodies[0].contractions

    @property
    def dtype(self) -> str:
        """Of the activation."""
        return self.contractions[0].dtype

    @property
    def prologue(self) -> bool:
        """Whether the activation is computed."""
        return self.contractions[0].activation is None

    @property
    def quantized(self) -> bool:
        return self.contractions[0].format is not None


def bucket(rows: int) -> int:
    """The upper end of the M bucket that ``rows`` is in; twice the last one's lower end beyond it.

    No rows are in the bucket of two, the fewest that are a symbol in a trace: nothing is launched, and there should be
    no kernel of its own to compile for that.
    """
    return next((end for end in ROW_BUCKETS if (rows or 2) <= end), 2 * ROW_BUCKETS[-1])


def schedule(
    kernel: Kernel, layouts: tuple[GemmLayout, ...], geometries: tuple[GemmGeometry, ...], target: Target, backend: str
) -> GemmSchedule:
    """The schedule of ``kernel`` on ``target``, by the rule of ``backend`` (``schedules/<backend>.py``)."""
    problem = Problem(
        rows=bucket(geometries[0].rows),
        columns=tuple(geometry.columns for geometry in geometries),
        length=geometries[0].length,
        bodies=kernel.bodies,
        layouts=layouts,
        wide=any(layout.wide for layout in layouts),
        target=target,
    )
    chosen = importlib.import_module(f"jitgen.families.gemm.schedules.{backend}").choose(problem)
    if chosen.parts > 1:  # none of which may be empty
        return replace(chosen, parts=max(1, min(chosen.parts, problem.length // chosen.step)))
    return chosen


def prologue(computed: Prologue, target: Target, backend: str) -> Decision:
    """Whether a product computes its activation while reading it, by the rule of ``backend``: like a schedule, the same
    for all rows of one bucket."""
    rule = importlib.import_module(f"jitgen.families.gemm.schedules.{backend}").prologue
    decision: Decision = rule(replace(computed, rows=bucket(computed.rows)), target)
    return decision
