"""Chooses how a sort kernel takes its rows: pure functions from sizes and target to numbers, and to words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jitgen.device import Device
from jitgen.families.family import Problem
from jitgen.families.rows.sort.layout import MOST_ELEMENTS, Geometry, is_counted, is_merge, order_of
from jitgen.families.rows.sort.selection import are_selected, is_selection
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_of
from jitgen.kernel.launch import LaunchShape, blocks_of
from jitgen.kernel.operands import WARP, power_of_two
from jitgen.kernel.rows import RowLayout
from jitgen.schedule.declared import DeclaredSchedule, about

BLOCK_THREADS = 512
"""Threads of a CUDA block at most; each compares two elements at once or more."""
BLOCK_ELEMENTS = 1024
"""Elements of short rows that a block sorts together."""
SELECTION_WARPS = 4
"""Warps of a block that selects ranks, each of a row of its own."""
MERGE_THREADS = 256
"""Threads of a block that merges chunks; each finds the ranks of its own elements, and nothing is shared."""
COUNTING_WARPS = 16
"""Warps of a block that counts, each a piece of the row. Routing 1,000 tokens of 128 experts took 5.3 us with 16, 5.9
with 8, 6.5 with 32 and 5.7 with 4 (H200, ``docs/measured/h200-routing.json``)."""
LONG_ROW_WARPS, LONG_ROW = 32, 1 << 15
"""Warps where the row has more columns than that: of 65,536 and 131,072 numbers 32 took 0.88 to 1.00 of the time of 16,
and of 32,768 and fewer 16 took 0.80 to 1.04 of that of 32, but 1.20 once (H200)."""
COUNTING_CLUSTER = 8
"""Blocks of a cluster that counts, each on a multiprocessor of its own, where every warp has something to count."""
COUNTING_BLOCKS = 128
"""Blocks that count, in clusters, each of which counts the row and ranks a share of every warp's piece."""
COUNTING_BATCH = 8
"""Columns that a lane reads at once at most."""
COUNTING_BYTES = 96 << 10
"""Shared memory of a block that counts, in bytes: any chip of compute capability 8.0 or later has 99 KiB."""
TRITON_COMPARED = 8192
"""Columns times counters that a Triton program compares, in the registers of its threads."""
TRITON_COUNTING_THREADS = 256
"""Threads of a Triton program that counts."""
TRITON_COUNTED = 1024
"""Columns that it counts at once."""
TRITON_MERGED = 1024
"""Elements whose ranks a Triton program finds."""


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Says how rows are taken.

    Attributes:
        threads: of a block (GPU); 1 on the CPU.
        rows: that a block sorts at once.
        tile: a power of two: room for the elements of a row, or where chunks are merged, elements of a block.
        steps: where chunks are merged: steps of a bisection of a chunk.
        wide: 64-bit indices.
    """

    sentence: ClassVar[tuple[str, ...]] = (
        "{threads} threads a block",
        "{counted_rows} a block, with room for {tile} elements of each",
        "wide",
    )
    threads: int
    rows: int
    tile: int
    steps: int
    wide: bool = field(metadata=about("64-bit indices"))

    @property
    def counted_rows(self) -> str:
        return f"{self.rows} rows" if self.rows > 1 else "one row"


@dataclass(frozen=True)
class CpuSchedule(Schedule):
    """Says how CPU threads take rows: each sorts rows by itself."""

    sentence = ("a row a thread", "wide")


@dataclass(frozen=True)
class SelectionSchedule(Schedule):
    """Says how ranks of short rows are selected: a warp takes a row, of which each lane has ``tile`` elements."""

    sentence = ("{threads} threads a block", "a warp a row, {tile} elements a lane", "wide")


@dataclass(frozen=True)
class MergeSchedule(Schedule):
    """Says how chunks are merged."""

    sentence = (
        "{threads} threads a block",
        "the ranks of {tile} elements a block, {steps} steps of bisection in each chunk",
        "wide",
    )


@dataclass(frozen=True)
class CountSchedule(Schedule):
    """Says how numbers below a bound are counted: by the warps of a ``cluster`` of blocks, each of which has ``tile``
    counters.

    Attributes:
        cluster: blocks.
        batch: columns that a lane reads at once, and keeps where it has no more.
    """

    sentence = (
        "{threads} threads a block, {cluster} blocks a cluster, {tile} counters a warp",
        "{batch} columns a lane at once",
        "wide",
    )
    cluster: int = 1
    batch: int = 1

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of ``jitgen::Counts`` (count.cuh)."""
        warps = self.threads // WARP
        size = 4 * self.tile * (warps + self.cluster) + (8 if self.wide else 4) * (self.tile + warps)
        return -(-size // 8) * 8 if self.wide else size


@dataclass(frozen=True)
class TritonCountSchedule(Schedule):
    """Says how a Triton program counts them.

    Attributes:
        columns: that a program gives ranks to; each of ``tile`` counters is compared with each.
        together: columns that it counts at once.
    """

    sentence = ("{columns} columns a program, with {tile} counters; {together} columns are counted at once", "wide")
    columns: int = 0
    together: int = 0


@dataclass(frozen=True)
class CpuCountSchedule(Schedule):
    """Says how a CPU thread counts them."""

    sentence = ("one thread counts a row", "wide")


def candidates(problem: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns the schedule that the rule of ``device``'s dialect has for ``problem``."""
    (body,), (layout,), (geometry,) = problem.kernel.bodies, problem.layouts, problem.geometries
    if is_counted(body):
        if not device.is_gpu:
            return (CpuCountSchedule(1, 1, 1, 0, layout.wide),)
        if device.dialect == "triton":
            tile = max(WARP, power_of_two(geometry.bound))
            columns = max(1, min(TRITON_COMPARED // tile, power_of_two(geometry.length)))
            return (TritonCountSchedule(TRITON_COUNTING_THREADS, 1, tile, 0, layout.wide, columns, TRITON_COUNTED),)
        return (_counting(geometry, layout.wide, device),)
    if not device.is_gpu:
        return (CpuSchedule(1, 1, 1, 0, layout.wide),)
    if is_merge(body):
        steps = geometry.ranks.bit_length()
        tile = TRITON_MERGED if device.dialect == "triton" else MERGE_THREADS
        return (MergeSchedule(MERGE_THREADS, 1, tile, steps, layout.wide),)
    if is_selection(body) and are_selected(geometry.length, geometry.start + geometry.count, device):
        tile = max(1, -(-power_of_two(geometry.length) // WARP))
        return (SelectionSchedule(SELECTION_WARPS * WARP, SELECTION_WARPS, tile, 0, layout.wide),)
    most = MOST_ELEMENTS[device.dialect]
    tile = min(most, max(2, power_of_two(geometry.length)))
    rows = max(1, min(BLOCK_ELEMENTS // tile, power_of_two(geometry.rows)))
    threads = max(WARP, min(BLOCK_THREADS, rows * tile // (8 if device.dialect == "triton" else 2)))
    return (Schedule(threads, rows, tile, 0, layout.wide),)


def _counting(geometry: Geometry, wide: bool, device: Device) -> CountSchedule:
    """Schedules a row that is counted: a warp has at least 32 columns, and a cluster as many blocks as there are such
    warps for. A block has a thread for each number, where it can."""
    warps, tile, cluster = -(-geometry.length // WARP), max(WARP, power_of_two(geometry.bound)), 1
    most = LONG_ROW_WARPS if geometry.length > LONG_ROW else COUNTING_WARPS
    while device.has_clusters and cluster < COUNTING_CLUSTER and cluster * most < warps:
        cluster *= 2
    of_block = min(most, power_of_two(max(1, -(-warps // cluster), tile // WARP)))
    schedule = CountSchedule(WARP * of_block, 1, tile, 0, wide, cluster)
    while schedule.shared_bytes > COUNTING_BYTES:
        schedule = replace(schedule, threads=schedule.threads // 2)
    columns = -(-geometry.length // (schedule.threads * cluster))
    return replace(schedule, batch=min(COUNTING_BATCH, power_of_two(columns)))


def launch(
    kernel: Kernel, layouts: Sequence[RowLayout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Launches blocks for as many rows as each sorts at once, for each chunk, or for each tile of what is merged; a
    cluster for a row that is counted; on a CPU, for each row."""
    (geometry,), (body,) = geometries, kernel.bodies
    if is_counted(body):
        blocks = 1
        if isinstance(schedule, TritonCountSchedule):
            blocks = max(1, -(-geometry.length // schedule.columns))
        elif isinstance(schedule, CountSchedule):
            shared = schedule.shared_bytes
            steps = -(-geometry.length // (schedule.threads * schedule.cluster))  # of a warp
            blocks = schedule.cluster * max(1, min(COUNTING_BLOCKS // schedule.cluster, steps))
            return blocks_of(blocks, schedule.threads, device, cluster=schedule.cluster, shared_bytes=shared)
    elif is_merge(body):
        blocks = geometry.rows * -(-geometry.chunks * geometry.ranks // schedule.tile)
    else:
        blocks = -(-geometry.rows // schedule.rows) * geometry.chunks
    return blocks_of(blocks, schedule.threads, device)


def explain(kernel: Kernel, layouts: Sequence[RowLayout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and how a row is sorted."""
    (layout,), (body,) = layouts, kernel.bodies
    order = order_of(body)
    kinds = " and ".join(i.attr[0] for i in body.instructions if i.op in ("sort", "merge"))
    down = "descending" if order.descending else "ascending"
    ranks = f"{order.count} ranks from {order.start} on"
    if is_counted(body):
        lines = [f"numbers below {order.bound} counted along a row: {kinds}"]
        if isinstance(schedule, CountSchedule):
            lines.append(f"each warp of {schedule.cluster} blocks counts a piece of the row, and ranks it")
        else:
            ranked = "each block counts the row, and gives ranks to a piece of it"
            lines.append(ranked if device.is_gpu else "a thread counts a row")
        return lines
    if is_merge(body):
        lines = [f"merge of sorted chunks: {kinds}, {down}, {ranks}"]
        lines.append("the rank of an element is its rank in its chunk, and those before it in the others")
    else:
        lines = [f"sort along a row: {kinds}, {down}, {ranks}"]
    if order.chunk and not is_merge(body):
        lines.append(f"a row is cut into chunks of {order.chunk} elements, each sorted by a block of its own")
    if any(instruction.op == "limited" for instruction in body.instructions):
        lines.append("ranks are selected among the elements of the groups that count most")
    if not device.is_gpu:
        lines.append("a thread sorts a row by itself: by digits, or where few ranks are asked for, those alone")
        if is_selection(body):
            lines.append("it reduces the row before, and the ranks behind")
    elif isinstance(schedule, SelectionSchedule):
        lines.append("a warp selects the ranks one after another, and reduces the row before and the ranks behind")
    elif not is_merge(body):
        lines.append(f"a block sorts {schedule.rows} rows of up to {schedule.tile} elements by bitonic merges")
    if device.is_gpu and is_selection(body) and not isinstance(schedule, SelectionSchedule):
        lines.append("what is computed of a rank is computed where the rank is stored")
    return [*lines, operations_of(body, layout.along)]
