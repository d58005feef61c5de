"""Chooses the schedule of a row kernel, and holds the numbers that the rules of all dialects share.

A schedule (``forms.py``) is a pure function of kernel, layout, sizes and device. Rows that stay in the registers of
their threads from pass to pass are held as QuACK's row kernels hold them. A row does not stay where the kernel has one
pass, and nothing is needed twice, or where it is too long for the registers of a cluster: then each pass loops over the
row in memory.

The rules are in ``cuda_schedule.py`` and ``triton_schedule.py``; that of the CPU is ``_host`` below. ``buckets.py``
tells at which numbers of rows they change.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.device import Device
from jitgen.families.family import Problem
from jitgen.families.rows.reduction.forms import (
    CudaRows,
    HostRows,
    LoopedRows,
    PersistentRows,
    ResidentRows,
    RowSchedule,
    TritonRows,
)
from jitgen.families.rows.reduction.online import online
from jitgen.families.rows.reduction.residency import passes
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_of, quantised_blocks
from jitgen.kernel.launch import LaunchShape, Persistence, blocks_of
from jitgen.kernel.operands import CPU_LANES, item_size
from jitgen.kernel.rows import RowGeometry, RowLayout
from jitgen.quant.codes import CODES
from jitgen.schedule.chips import Chip

BLOCK_THREADS = 512
"""Threads of a block up to which a longer row gets more threads; beyond, more bytes for each thread."""
SHORT_BLOCK_THREADS = 128
"""Threads of a block that holds several short rows."""
MAX_BLOCK_THREADS = 1024
"""Threads of the largest block there is (CUDA C++ Programming Guide, "Compute Capabilities")."""
MULTIPROCESSOR_THREADS = 1024
"""Threads of a multiprocessor that its registers should suffice for: with fewer, no row is loaded while another one is
reduced."""
THREAD_BYTES = 64
"""Bytes of the row that a thread aims at: four accesses of 16 bytes in flight. A row of more gets more threads."""
FULL_THREAD_BYTES = 128
"""Bytes of its row that a thread of a full block holds before a larger block or a cluster takes the row; half as many
before a cluster does where the row is reduced once before it is stored."""
LATENCY_BYTES = 4096
"""Bytes of a row up to which it gets twice the threads: most of its time is latency, not transfer."""
LATENCY_ELEMENTS = 4096
"""Elements of a row up to which it gets twice the threads where it is reduced once before it is stored."""
NARROW_BYTES = 2
"""Bytes of an element up to which it is called narrow: it is computed with in more registers than it is stored in."""
LINE_BYTES = 128
"""Bytes of a cache line: what a block that reduces columns reads at least of neighbouring columns, where aligned."""
COLUMN_THREADS = 512
"""Threads of a block that reduces columns; for longer columns a cluster of blocks is better than a larger block."""
BEYOND_CACHE_BYTES = 2**17
"""Bytes of a row from which on the rows in flight under Triton do not stay in the second-level cache between passes."""

CLUSTER_BLOCKS = 8
"""Blocks of a cluster that shares a row too long for one block. Small blocks of different rows share a multiprocessor,
so that one row is loaded while others are reduced or stored: in one block of 1024 threads such a row takes 2 to 8 %
longer (H200)."""
MIN_CLUSTER_THREADS = 128
"""Threads of the smallest block of such a cluster."""
LONG_ROW = 4096
"""Elements of a row up to which its schedule is the same however few rows there are."""
MANY_ROWS = 2**16
"""Short rows beyond which a thread takes several of them in one iteration."""
MAX_ROWS_PER_ITERATION = 4
"""Rows that a thread takes in one iteration at most."""
ITERATION_BYTES = 64
"""Bytes of all its rows that a thread aims at in one iteration."""
SHORT_ROW = 1024
"""Elements of a row up to which it is called short: its threads may take several rows in one iteration, and they load
deferred operands with the row."""
PERSISTENT_ROW = 11 * 2**12
"""Elements of a row from which on persistent clusters may take rows one after another."""
MANY_COLUMNS = 16384
"""Columns beyond which there are enough blocks without clusters."""

CPU_TILE_ROWS = 1024
"""Neighbouring rows that a CPU thread walks together, as a tile: a page (4 KiB of float32) of each operand in a
step."""
CPU_SHORT_ROW = 16
"""Elements below which rows are walked in tiles too: a shorter one does not fill a vector by itself."""
CPU_LONG_ROW = 256
"""Elements from which on a row has ``CPU_LANES`` accumulators. Shorter rows have ``CPU_SHORT_ROW``: more accumulators
would cost more to combine than they hide of an addition's latency."""
CPU_SCRATCH_ROW = 2**18
"""Elements of a row up to which values that are costly to compute stay in scratch memory between passes. Reading an
exponential costs less than computing it beyond the second-level cache too; much longer rows would drive others out of
the last-level cache."""
CPU_ROW_ENDS = (CPU_SHORT_ROW - 1, CPU_LONG_ROW - 1, CPU_SCRATCH_ROW)
"""Upper ends of the ranges of row lengths within which a CPU's schedule is the same."""


@dataclass(frozen=True)
class Occupancy:
    """Tells by numbers of rows how much of a chip a kernel occupies with the blocks of its rows.

    Attributes:
        quarter: rows up to which two blocks for each leave half of the multiprocessors idle.
        half: rows up to which one block for each leaves half of the multiprocessors idle.
        full: rows beyond which one block for each keeps the chip busy, where no block waits for another one.
        several: rows beyond which one small block for each keeps the chip busy: eight on a multiprocessor.
        clusters: clusters of ``CLUSTER_BLOCKS`` blocks that are resident where each block has a multiprocessor to
            itself; with more rows than that, clusters take one row after another. 0 without clusters.
    """

    quarter: int
    half: int
    full: int
    several: int
    clusters: int


def occupancy(chip: Chip) -> Occupancy:
    """Returns the numbers of rows that occupy ``chip``, rounded to powers of two so that buckets of rows begin
    there."""
    full = chip.rows_that_occupy(1)
    clusters = chip.resident_clusters.get(CLUSTER_BLOCKS, 0)
    return Occupancy(chip.rows_that_occupy(0.25), chip.rows_that_occupy(0.5), full, 8 * full, clusters)


def candidates(problem: Problem, device: Device) -> tuple[RowSchedule, ...]:
    """Returns the schedules that the rule of ``device``'s dialect has for ``problem``, its choice first."""
    (layout,), (geometry,) = problem.layouts, problem.geometries
    if not device.is_gpu:
        return (_host(problem.kernel, layout, geometry),)
    rules = importlib.import_module(f"jitgen.families.rows.reduction.{device.dialect}_schedule")
    rule = rules.columns if layout.columns else rules.rows
    schedules: tuple[RowSchedule, ...] = rule(problem.kernel, layout, geometry, device)
    blocks = {operand.block for operand in problem.kernel.bodies[0].operands if operand.block}
    if not blocks:
        return schedules
    fitting = tuple(schedule for schedule in schedules if _has_whole_blocks(schedule, max(blocks)))
    return fitting or (rules.reread_by_block(problem.kernel, layout, geometry, device),)


def _has_whole_blocks(schedule: RowSchedule, block: int) -> bool:
    """Returns whether neighbouring lanes of a warp have each block of a row."""
    return isinstance(schedule, LoopedRows | ResidentRows) and schedule.threads % (block // schedule.vector) == 0


def _host(kernel: Kernel, layout: RowLayout, geometry: RowGeometry) -> HostRows:
    """Schedules the CPU: tiles of neighbouring or very short rows, and any other row by itself."""
    tiled = layout.columns or geometry.length < CPU_SHORT_ROW
    return HostRows(
        tile_rows=CPU_TILE_ROWS if tiled else 1,
        group=CPU_LANES if tiled or geometry.length >= CPU_LONG_ROW else CPU_SHORT_ROW,
        scratch=not tiled and geometry.length <= CPU_SCRATCH_ROW and passes(kernel) > 1,
    )


def blocks_per_row(device: Device) -> int:
    """Returns the most blocks of a kernel that can share a row, in a cluster; 0 on the CPU, where any threads can."""
    if not device.is_gpu:
        return 0
    return CLUSTER_BLOCKS if device.dialect == "cuda" and device.has_clusters else 1


def row_item_size(kernel: Kernel, layout: RowLayout) -> int:
    """Returns the bytes of the widest element of an operand that varies along the row."""
    (body,) = kernel.bodies
    varying = [o for o, kind in zip(body.operands, layout.along, strict=True) if kind not in ("row", "broadcast")]
    return max((item_size(o.dtype) for o in varying if o.buffer is not None), default=4)


def launch(
    kernel: Kernel,
    layouts: Sequence[RowLayout],
    geometries: Sequence[RowGeometry],
    schedule: RowSchedule,
    device: Device,
) -> LaunchShape:
    """Launches one cluster (mostly of one block) for the rows that its threads take; persistent clusters loop over
    them."""
    (geometry,) = geometries
    if isinstance(schedule, HostRows):
        return blocks_of(-(-geometry.rows // schedule.tile_rows), 1, device)
    iterated = schedule.rows_per_iteration if isinstance(schedule, LoopedRows | ResidentRows) else 1
    cluster = schedule.cluster if isinstance(schedule, CudaRows) else 1
    return blocks_of(
        -(-geometry.rows // (schedule.rows_per_block * iterated)) * cluster,
        schedule.block_threads,
        device,
        cluster=cluster,
        shared_bytes=0 if isinstance(schedule, TritonRows) else schedule.shared_bytes,
        persistence=Persistence("clusters") if isinstance(schedule, PersistentRows) else None,
    )


def explain(kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and lines that say how the kernel deals its rows out."""
    (layout,) = layouts
    if schedule.online:
        kernel = online(kernel)
    (body,) = kernel.bodies
    kinds = [instruction.attr for instruction in body.instructions if instruction.op == "reduce"]
    count = passes(kernel)
    lines = [f"row reduction by {', '.join(kinds)} in {count} pass{'es' * (count != 1)} over a row"]
    if not isinstance(schedule, HostRows):
        lines.append(str(schedule))
        if isinstance(schedule, PersistentRows):
            lines.append("the next row is copied to shared memory while one is reduced and stored")
        if isinstance(schedule, ResidentRows) and schedule.staged:
            lines.append("row-invariant operands are copied to shared memory while the row is loaded")
    elif schedule.tile_rows > 1:
        lines.append(f"{schedule.tile_rows} neighbouring rows are walked together")
    return [*lines, *quantised_blocks(body), *_quantised_rows(body), operations_of(body, layout.along)]


def _quantised_rows(body: Body) -> list[str]:
    """Returns a line about codes that have one scale for each row; none where nothing has."""
    stores = [body.operands[index] for index in body.stores]
    if not any(store.dtype == "float32" and store.shape[-1:] == (1,) for store in stores):
        return []
    dtypes = dict.fromkeys(store.dtype for store in stores if store.dtype in CODES and store.shape[-1:] != (1,))
    why = "which takes whole rows: a tile of a product has none"
    return [f"quantised to {dtype} with a scale for each row, {why}" for dtype in dtypes]
