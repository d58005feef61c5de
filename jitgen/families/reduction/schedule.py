"""How a row kernel deals its rows out to threads: the schedule, and the numbers that the rules of all dialects share.

A schedule is a pure function of kernel, layout, sizes and target. On a GPU a row belongs to some threads of one block
(which may hold several rows) or, where it is long, to the threads of a cluster of blocks. The row is *resident* where a
thread keeps its ``unroll`` vectors of ``vector`` elements in registers from pass to pass, as QuACK's row kernels do. It
is not where the kernel has one pass, and nothing is needed twice, or where the row is too long for the registers of a
cluster: then each pass loops over the row in memory.

The rules are in ``cuda_schedule.py`` and ``triton_schedule.py``; that of the CPU is ``_host`` below. ``buckets.py``
tells at which numbers of rows they change.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from jitgen.chips import Chip
from jitgen.device import Device
from jitgen.families.family import Problem
from jitgen.families.operands import ACCESS_BYTES, CPU_LANES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.residency import passes
from jitgen.ir.program import Kernel

WARP = 32
"""Threads of a warp. AMD's wavefronts have 64, and Triton makes its blocks of them twice as large."""
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
"""Bytes of an element up to which it is called narrow: it is computed with in more registers than it is kept in."""
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
"""Elements of a row up to which values that are costly to compute are kept in scratch memory between passes. Reading an
exponential costs less than computing it beyond the second-level cache too; much longer rows would drive others out of
the last-level cache."""
CPU_ROW_ENDS = (CPU_SHORT_ROW - 1, CPU_LONG_ROW - 1, CPU_SCRATCH_ROW)
"""Upper ends of the ranges of row lengths within which a CPU's schedule is the same."""


@dataclass(frozen=True)
class Occupancy:
    """Numbers of rows that tell how much of a chip a kernel occupies with the blocks of its rows.

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
    """The numbers of rows that occupy ``chip``, rounded to powers of two so that buckets of rows begin there."""
    full = chip.rows_that_occupy(1)
    clusters = chip.resident_clusters.get(CLUSTER_BLOCKS, 0)
    return Occupancy(chip.rows_that_occupy(0.25), chip.rows_that_occupy(0.5), full, 8 * full, clusters)


@dataclass(frozen=True)
class Persistent:
    """Clusters that take one row after another, each block with a multiprocessor to itself.

    Attributes:
        shared_operands: how many of the row-invariant operands, the first, lie in shared memory; the others lie in
            registers.
        shared_bytes: dynamic shared memory of a block, in bytes.
    """

    shared_operands: int
    shared_bytes: int


@dataclass(frozen=True)
class Staged:
    """Deferred row-invariant operands that are copied to shared memory while the row is loaded.

    Attributes:
        operands: all of them, by index. An access moves as many elements of each as a vector has.
        vectors: how many vectors of each thread, the first, are copied there; the others are loaded into registers.
    """

    operands: tuple[int, ...]
    vectors: int


@dataclass(frozen=True)
class Prefetch:
    """What is prefetched into the second-level cache before the kernel waits for the one ahead of it.

    Attributes:
        operands: by index, operands of which each row has its own elements.
        first_rows: how many rows, from the first, are prefetched; None for all.
        every_nth: of those, every nth row is prefetched.
        row_invariant: by index, operands that all rows read; every block prefetches a share of them where there are
            few blocks.
        row_invariant_blocks: how many blocks, or clusters of blocks, are few.
    """

    operands: tuple[int, ...]
    first_rows: int | None = None
    every_nth: int = 1
    row_invariant: tuple[int, ...] = ()
    row_invariant_blocks: int = 0


@dataclass(frozen=True)
class RowSchedule:
    """How the rows of one kernel are dealt out.

    An operand is *deferred* where only a later pass than the first reads it, *row-invariant* where all rows read the
    same elements of it.

    Attributes:
        threads: threads of one block that share a row (GPU), a power of two; 1 on the CPU.
        rows_per_block: rows of one block; on the CPU, rows of one tile.
        cluster: blocks that share a row.
        vector: elements of one access; on the CPU, of one group.
        unroll: vectors that a thread holds of a resident row; of another, that it loads before it uses the first.
        resident: whether the row stays in registers between passes; on the CPU, whether costly values stay in scratch
            memory.
        unmasked_vectors: how many of the ``unroll`` vectors, the first, lie inside the row for every thread and so need
            no mask: all, all but the last, or 0.
        wide: whether indices have 64 bits.
        blocks_per_multiprocessor: blocks that the registers of a multiprocessor must suffice for.
        online: whether reductions that wait for another one are accumulated in the same pass (``online.py``).
        rows_per_thread: neighbouring rows of a thread, whose elements it moves in one access; 1 where the elements of
            one row are neighbours.
        rows_per_iteration: rows that a thread takes one after another, all of which it loads before it uses the first.
        shared_vectors: how many of the ``unroll`` vectors of a resident row, the last, lie in shared memory.
        preload_deferred: whether deferred operands are loaded into registers with the row, not after it was reduced.
        staged: deferred operands that are copied to shared memory.
        persistent: set where clusters take one row after another; None where each row has a cluster of its own.
        prefetch: what is prefetched while the kernel ahead ends.
        streaming_loads: whether loads of elements that no other row has bypass the first-level cache, which is left to
            row-invariant operands.
    """

    threads: int
    rows_per_block: int
    cluster: int
    vector: int
    unroll: int
    resident: bool
    unmasked_vectors: int
    wide: bool
    blocks_per_multiprocessor: int = 1
    online: bool = False
    rows_per_thread: int = 1
    rows_per_iteration: int = 1
    shared_vectors: int = 0
    preload_deferred: bool = False
    staged: Staged | None = None
    persistent: Persistent | None = None
    prefetch: Prefetch | None = None
    streaming_loads: bool = False

    @property
    def block_threads(self) -> int:
        return self.threads * self.lanes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        if self.staged:
            return len(self.staged.operands) * self.staged.vectors * self.block_threads * ACCESS_BYTES
        return self.persistent.shared_bytes if self.persistent else 0

    @property
    def lanes(self) -> int:
        """Threads of a block that lie side by side, each with rows of its own."""
        return self.rows_per_block // self.rows_per_thread

    @property
    def elements_per_thread(self) -> int:
        """Elements that a thread holds at once."""
        return self.vector * self.unroll * self.rows_per_thread

    @property
    def is_unmasked(self) -> bool:
        """Whether the row is a multiple of what its threads hold at once, so that no access needs a mask."""
        return self.unmasked_vectors == self.unroll

    @property
    def tile(self) -> int:
        """Elements of a row that one block holds at once."""
        return self.threads * self.vector * self.unroll

    @property
    def is_host(self) -> bool:
        """Whether the schedule is a CPU's: no block of a GPU has a single thread, or 1024 threads with a row each."""
        return self.threads == 1 and self.lanes in (1, CPU_TILE_ROWS)

    def __str__(self) -> str:
        """The schedule in words, for people; ``repr`` tells any two schedules apart."""
        return ", ".join(self._host_words() if self.is_host else self._gpu_words())

    def _host_words(self) -> list[str]:
        words = ["one row at a time" if self.rows_per_block == 1 else f"tiles of {self.rows_per_block} rows"]
        words.append(f"groups of {self.vector} elements")
        if self.resident:
            words.append("costly values stay in scratch memory")
        return words

    def _gpu_words(self) -> list[str]:
        words = [
            f"{_counted(self.threads, 'thread')} a row" + f" in each of {self.cluster} blocks" * (self.cluster > 1)
        ]
        if self.rows_per_block > 1:
            words.append(f"{self.rows_per_block} rows a block")
        if self.rows_per_thread > 1:
            words.append(f"{self.rows_per_thread} neighbouring rows a thread")
        if self.rows_per_iteration > 1:
            words.append(f"{self.rows_per_iteration} rows an iteration")
        words.append(f"{_counted(self.unroll, 'access', 'es')} a thread of {_counted(self.vector, 'element')}")
        if not self.is_unmasked:
            words.append(f"the first {self.unmasked_vectors} unmasked" if self.unmasked_vectors else "all masked")
        words.append("the row stays in registers" if self.resident else "each pass reads the row from memory")
        if self.shared_vectors:
            words.append(f"its last {_counted(self.shared_vectors, 'access', 'es')} a thread in shared memory")
        if self.online:
            words.append("online accumulation")
        if self.persistent:
            words.append("persistent clusters")
        if self.staged:
            words.append("deferred operands staged in shared memory")
        if self.preload_deferred:
            words.append("deferred operands loaded with the row")
        if self.prefetch:
            words.append("prefetch to the L2 cache")
        if self.streaming_loads:
            words.append("streaming loads")
        if self.blocks_per_multiprocessor > 1:
            words.append(f"{self.blocks_per_multiprocessor} blocks a multiprocessor")
        if self.wide:
            words.append("64-bit indices")
        return words


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def candidates(problem: Problem, device: Device) -> tuple[RowSchedule, ...]:
    """The schedule that the rule of ``device``'s dialect has for ``problem``."""
    (layout,), (geometry,) = problem.layouts, problem.geometries
    if not device.is_gpu:
        return (_host(problem.kernel, layout, geometry),)
    rules = importlib.import_module(f"jitgen.families.reduction.{device.dialect}_schedule")
    rule = rules.columns if layout.columns else rules.rows
    return (rule(problem.kernel, layout, geometry, device),)


def _host(kernel: Kernel, layout: RowLayout, geometry: RowGeometry) -> RowSchedule:
    """The schedule of the CPU: tiles of neighbouring or very short rows, and any other row by itself."""
    tiled = layout.columns or geometry.length < CPU_SHORT_ROW
    return RowSchedule(
        threads=1,
        rows_per_block=CPU_TILE_ROWS if tiled else 1,
        cluster=1,
        vector=CPU_LANES if tiled or geometry.length >= CPU_LONG_ROW else CPU_SHORT_ROW,
        unroll=1,
        resident=not tiled and geometry.length <= CPU_SCRATCH_ROW and passes(kernel) > 1,
        unmasked_vectors=0,
        wide=True,
    )


def blocks_per_row(device: Device) -> int:
    """The most blocks of a kernel that can share a row, in a cluster; 0 on the CPU, where any threads can."""
    if not device.is_gpu:
        return 0
    return CLUSTER_BLOCKS if device.dialect == "cuda" and device.has_clusters else 1


def row_item_size(kernel: Kernel, layout: RowLayout) -> int:
    """Bytes of the widest element of an operand that varies along the row."""
    (body,) = kernel.bodies
    varying = [o for o, kind in zip(body.operands, layout.operands, strict=True) if kind not in ("row", "broadcast")]
    return max((item_size(o.dtype) for o in varying if o.buffer is not None), default=4)
