"""How a matmul kernel is computed: the mainloop and its tiles, chosen by a rule of each dialect.

``Problem`` is all that a rule (``schedules/<dialect>.py``) may look at, and ``GemmSchedule`` is what it returns. The
schedule is a part of the request key. A rule sees the bucket of a call's rows and not the rows themselves, so that
a set of weights has at most eight schedules, and a few kernels compute every number of rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from jitgen.device import Device
from jitgen.families.family import SizeBuckets
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.ir import symbols
from jitgen.ir.body import Body, Contraction
from jitgen.ir.equations import axes
from jitgen.ir.graph import Graph, topological
from jitgen.ir.program import Decision, Kernel
from jitgen.spec import Target

ROW_BUCKETS = (1, 8, 16, 64, 192, 512, 1536)
"""Upper ends of the buckets of M, in rows. Rows beyond the last end are one bucket more.

Of the ends that were compared by the models of ``wgmma_tiles`` on random M, N and K, tiles chosen for these buckets
lose the least against tiles chosen for each M."""

MOST_ROWS = 4096
"""The rows up to which the tiles of the last bucket are chosen."""

MATRIX_BUCKETS = (1, 8, 32, 128, 512)
"""Upper ends of the buckets of a batch, in matrices. Batches beyond the last end are one bucket more."""

DIALECTS_WITH_SPLIT_K = ("triton",)
"""Dialects whose rule may split K over a temporary (``k_splits``). The cuda dialect splits K within a cluster of blocks
instead (``cluster_k_splits``)."""

TRITON_FORMS = ("tokens", "weights", "slices")
"""What the paths of the triton dialect begin with; ``gemm/triton.py`` explains them."""

DEPENDENT_LAUNCH_PATHS = ("mma", "rows", "columns", "stream", "stream_outer")
"""Paths of the cuda dialect, besides the wgmma ones, that are made for programmatic dependent launch."""


@dataclass(frozen=True)
class GemmSchedule:
    """The mainloop of a kernel, its tiles, and how blocks share the work.

    K can be split in two ways. With ``cluster_k_splits`` the blocks of one cluster share a tile's K, exchange their
    sums through distributed shared memory, add them in rank order, and run the epilogue in the same kernel. (The wgmma
    mainloops do so with tiles that would leave blocks idle, and the launch chooses how many blocks share them.) With
    ``k_splits`` independent blocks store the sums of their ranges of K to a temporary, and a second kernel adds them in
    order and runs the epilogue (``split_k.py``).

    Attributes:
        path: the mainloop, by the name of its header or template form.
        block_m: rows of x (tokens) in a tile.
        block_n: columns of the result (rows of the weight) in a tile.
        block_k: extent of K that one iteration reads; see the table.
        warps: warps of a block (GPU).
        stages: iterations whose loads are in flight at once.
        cluster_k_splits: blocks of a cluster that share one tile's K; of the wgmma mainloops the most that may.
        k_splits: ranges of K whose sums go to a temporary.
        multicast: blocks of a cluster that share one operand's tile, of which each copies a piece for all.
        steps: an unrolling factor; see the table.
        resident: blocks that a multiprocessor holds at once, where blocks are persistent and take one tile after
            another; 0 where each block has one tile.
        raster: tiles that are walked along M before the next tile along N, so that blocks that run at the same time
            share operands in the L2 cache.
        stagger: iterations by which a tile begins later along K than its neighbour; each tile wraps round all of K.
        shared_bytes: dynamic shared memory of a block, in bytes.
        fewest_rows: rows of x that a call has at least, so that no tiles are compiled for fewer (cpp).
        wide: whether indices are 64-bit.

    What the fields mean for each mainloop. Fields that a row does not name are at their defaults, besides
    ``shared_bytes``, ``fewest_rows`` and ``wide``; ``G`` is the number of groups of warps that share a block's K.

    =====================  =========================================================================================
    path                   fields
    =====================  =========================================================================================
    ``tiles`` (cpp)        ``block_m``: rows of the tallest tile. The header has columns and K of its own.
    ``decoded`` (cpp)      as ``tiles``; quantised weights are decoded once for all tiles.
    ``mma``, ``rows``,     ``block_k``: ``64 * G``. ``stages``: chunks of 64 along K that a group has in flight.
    ``columns``            ``cluster_k_splits``.
    ``dense``              ``block_k``: ``64 * G``. ``stages``: tiles in shared memory. ``cluster_k_splits``.
    ``stream``             ``steps``: elements of a lane's load. ``block_k``: ``32 * steps * G``. ``stages``: tiles that
                           a group has in flight. ``cluster_k_splits``.
    ``stream_outer``       ``steps``: elements of a lane's load. ``block_n``: ``32 * steps``. ``block_k``: 8 for each of
                           ``G`` warps. ``cluster_k_splits``.
    ``simt``               ``block_k``: K of a tile in shared memory. ``stages``: 2. ``cluster_k_splits``.
    ``wgmma_quantized``    ``block_k``: 64 or 128. ``steps``: wgmma steps of 16 along K that are started together.
                           ``cluster_k_splits``, ``resident``, ``raster``, ``stagger``.
    ``wgmma_dense``        ``block_k``: 64. ``steps``: an epilogue takes ``32 * steps`` columns through shared memory at
                           once. ``multicast``, ``resident``, ``raster``.
    ``tokens``,            ``block_k``: K of an iteration. ``warps``, ``stages``: Triton's ``num_warps`` and
    ``weights`` (triton)   ``num_stages``. ``raster``, ``k_splits``.
    ``slices`` (triton)    as ``weights``, but ``block_k`` is of one warp: an iteration reads ``block_k * warps``.
    =====================  =========================================================================================
    """

    path: str
    block_m: int
    block_n: int
    block_k: int
    warps: int = 1
    stages: int = 1
    cluster_k_splits: int = 1
    k_splits: int = 1
    multicast: int = 1
    steps: int = 1
    resident: int = 0
    raster: int = 1
    stagger: int = 0
    shared_bytes: int = 0
    fewest_rows: int = 1
    wide: bool = False

    def __str__(self) -> str:
        """The schedule in words, for people; two schedules that differ have different ``repr``."""
        words = [f"{self.path} mainloop", f"tiles of {self.block_m} x {self.block_n}, {self.block_k} of K a step"]
        if self.warps > 1:
            words.append(f"{self.warps} warps a block")
        if self.stages > 1:
            words.append(f"{self.stages} stages")
        if self.cluster_k_splits > 1:
            words.append(f"{self.cluster_k_splits} blocks of a cluster share K")
        if self.k_splits > 1:
            words.append(f"split-K by {self.k_splits}")
        if self.multicast > 1:
            words.append(f"multicast to {self.multicast} blocks")
        if self.steps > 1:
            words.append(f"{self.steps} products or loads at once")
        if self.resident:
            words.append(f"persistent blocks, {self.resident} a multiprocessor")
        if self.raster > 1:
            words.append(f"raster of {self.raster} tiles")
        if self.stagger:
            words.append(f"neighbouring tiles begin {self.stagger} steps of K apart")
        if self.shared_bytes:
            words.append(f"{self.shared_bytes} bytes of shared memory")
        if self.wide:
            words.append("64-bit indices")
        return ", ".join(words)

    @property
    def dependent_launch(self) -> bool:
        """Whether the mainloop is made for programmatic dependent launch. It then waits for the preceding kernel of the
        stream only before it reads what that kernel may have written; until then it fetches weights or initialises."""
        return self.tensor_maps or self.path in DEPENDENT_LAUNCH_PATHS or self.path.startswith(TRITON_FORMS)

    @property
    def tensor_maps(self) -> bool:
        """Whether the mainloop copies by tensor maps (TMA)."""
        return self.path.startswith("wgmma")

    @property
    def k_per_iteration(self) -> int:
        """Extent of K that one iteration of a triton mainloop reads."""
        return self.block_k * (self.warps if self.path.startswith("slices") else 1)

    @property
    def block_threads(self) -> int:
        return self.warps * 32

    def blocks(self, sizes: Sequence[tuple[int, int]], splits: int) -> int:
        """Blocks of the grid for regions of these (rows, columns), with ``splits`` blocks of a cluster that share K."""
        if self.resident and self.multicast > 1:
            return splits * sum(self._blocks_of_clusters(rows, columns) for rows, columns in sizes)
        tiles = sum(-(-rows // self.block_m) * -(-columns // self.block_n) for rows, columns in sizes)
        return splits * self.k_splits * tiles

    def _blocks_of_clusters(self, rows: int, columns: int) -> int:
        """Blocks for one region where a cluster's tiles are neighbours along M or N: an incomplete cluster idles."""
        down, across = -(-rows // self.block_m), -(-columns // self.block_n)
        return self.multicast * max(down * -(-across // self.multicast), -(-down // self.multicast) * across)


@dataclass(frozen=True)
class Problem:
    """What a dialect's rule may decide by.

    Attributes:
        rows: the upper end of the call's bucket of M, so that a rule cannot distinguish two calls of one bucket; for
            the last bucket ``MOST_ROWS``.
        fewest_rows: the lower end of the bucket.
        columns: N of each region.
        length: K.
        bodies: the regions. Their contractions agree in everything but the weight and its N.
        layouts: of the regions; empty where split-K is decided, which happens before layout.
        wide: whether indices are 64-bit.
        target: of the device.
        matrices: the upper end of the bucket of the batch's number of matrices; 1 without a batch.
    """

    rows: int
    columns: tuple[int, ...]
    length: int
    bodies: tuple[Body, ...]
    layouts: tuple[GemmLayout, ...]
    wide: bool
    target: Target
    matrices: int = 1
    fewest_rows: int = 1

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        """The contractions of one region."""
        return self.bodies[0].contractions

    @property
    def dtype(self) -> str:
        """The activation's dtype."""
        return self.contractions[0].dtype

    @property
    def prologue(self) -> bool:
        """Whether the kernel computes the activation while it reads it."""
        return self.contractions[0].activation is None

    @property
    def quantized(self) -> bool:
        """Whether the weights are quantised."""
        return self.contractions[0].format is not None


def bucket(rows: int) -> int:
    """The upper end of the bucket of M that ``rows`` is in; for the last bucket ``MOST_ROWS``.

    A call without rows launches nothing. It is put into the bucket of two rows, the fewest that a trace has a symbol
    for, so that no kernel is compiled for it alone.
    """
    return next((end for end in ROW_BUCKETS if (rows or 2) <= end), MOST_ROWS)


def fewest_rows(rows: int) -> int:
    """The lower end of the bucket of M that ``rows`` is in."""
    return 1 + max((end for end in ROW_BUCKETS if end < (rows or 2)), default=0)


def problem(
    kernel: Kernel, layouts: Sequence[GemmLayout], geometries: Sequence[GemmGeometry], device: Device
) -> Problem:
    """The problem that the schedule of ``kernel`` is chosen for."""
    return Problem(
        rows=bucket(geometries[0].rows),
        columns=tuple(geometry.columns for geometry in geometries),
        length=geometries[0].length,
        bodies=kernel.bodies,
        layouts=tuple(layouts),
        wide=any(layout.wide for layout in layouts),
        target=device.target,
        matrices=next((end for end in MATRIX_BUCKETS if geometries[0].matrices <= end), 2 * MATRIX_BUCKETS[-1]),
        fewest_rows=fewest_rows(geometries[0].rows),
    )


def candidates(problem: Problem, device: Device) -> list[GemmSchedule]:
    """The schedules that the rules of ``device``'s dialect have for ``problem`` (``schedules/<dialect>.py``).

    ``k_splits`` is replaced by that of the kernel's contractions, because split-K was decided before (``split_k.py``).
    """
    found = _rules(device).candidates(problem)
    return [replace(each, k_splits=problem.contractions[0].k_splits) for each in found]


def cost(problem: Problem, candidate: GemmSchedule, device: Device) -> float:
    """The time that ``candidate`` is estimated to take, in microseconds; 0 from rules with one candidate."""
    estimated: float = _rules(device).cost(problem, candidate)
    return estimated


def k_splits(problem: Problem, device: Device) -> int:
    """How many ranges K should be split into over a temporary: 1 for none. Each range has at least one iteration."""
    if device.dialect not in DIALECTS_WITH_SPLIT_K:
        return 1
    (chosen,) = _rules(device).candidates(problem)
    return max(1, min(chosen.k_splits, problem.length // chosen.k_per_iteration))


def prologue(computed: Prologue, device: Device) -> Decision:
    """Whether a product computes its activation while it reads it, by the rule of ``device``'s dialect. As for a
    schedule, the answer is the same for all rows of one bucket."""
    decision: Decision = _rules(device).prologue(replace(computed, rows=bucket(computed.rows)), device.target)
    return decision


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """M of each product of ``graph``. Of a batch of products also their number, by which GPU schedules differ, and N
    and K: the second operand is then no weight of a fixed size."""
    found = []
    for product in topological(graph.results):
        if product.op == "contract":
            batch = len(axes(product.attrs[0]).batch)
            found.append(SizeBuckets(symbols.product(product.shape[batch:-1]), ROW_BUCKETS))
            if batch:
                matrices = symbols.product(product.shape[:batch])
                found.append(SizeBuckets(matrices, MATRIX_BUCKETS if device.is_gpu else ()))
                found += [SizeBuckets(product.shape[-1]), SizeBuckets(product.inputs[0].shape[-1])]
    return found


def _rules(device: Device) -> ModuleType:
    return importlib.import_module(f"jitgen.families.gemm.schedules.{device.dialect}")
