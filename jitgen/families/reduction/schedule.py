"""How a row kernel walks its rows: pure functions from layout, row length and target to numbers.

On a GPU a row belongs to ``threads`` threads of a block (a block may hold several rows), or to a cluster of blocks when
it is long. A thread keeps ``unroll`` vectors of ``vector`` elements in registers from pass to pass (QuACK's row kernels
do so, with clusters for the longest). A kernel of one pass keeps nothing, and a row too long for a cluster's registers
is read again by each pass: both *loop* over the row.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import ClassVar

from jitgen.families.layout import ACCESS_BYTES, CPU_LANES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.residency import passes
from jitgen.ir.parts import SPLIT_ROW, SPLIT_ROWS
from jitgen.ir.program import Kernel
from jitgen.spec import Target

BLOCK_THREADS = 512
SHORT_BLOCK_THREADS = 128
THREAD_BYTES = 64
"""Bytes of the widest operand a thread aims to hold: a few accesses in flight, before more threads are added."""
HELD_BYTES = 128
"""Bytes of its row a thread holds before a block of more threads is better; half as many before a cluster is, where a
row is combined but once."""
SHORT_ROW_BYTES, SHORT_ROW = 4096, 4096
"""Rows up to so many bytes have twice the threads, for most of their time is latency, not transfer; where a row is
combined but once before it is stored, rows of up to so many elements."""
WARP = 32
RESIDENT_THREADS = 1024
"""Threads of a multiprocessor the registers should suffice for: with fewer, no row loads while another computes."""
MOST_THREADS = 1024
"""Threads of a block that has a multiprocessor to itself: what a row is read once for, where there are no clusters."""
CLUSTER, LEAST_THREADS = 8, 128
"""Blocks of a row too long for one. Small blocks of different rows share a multiprocessor, so that one row is loaded
while others are combined or stored: in one block of 1024 threads such a row takes 2 to 8 % longer on an H200."""
NARROW_BYTES = 2
"""Elements up to so many bytes are computed with in more registers than they are kept in."""
SOME_ROWS, FEW_ROWS = 32, 64
"""A block for each of ``FEW_ROWS`` or less leaves half of an H200 idle, two for each of ``SOME_ROWS`` or less too."""
BUSY_ROWS, ENOUGH_ROWS = 128, 1024
"""Long rows from which on a block for each keeps an H200 busy where none has to wait for another, and a small block."""
MANY_ROWS, MOST_TURNS, TURN_BYTES = 2**16, 4, 64
"""Short rows beyond which a thread takes several; at most how many, and how many bytes of them."""
FEW_TURNS = 1024
"""Elements from which on no row is short in that sense, or hardly one."""
LONG_ROW = 4096
"""Elements up to which schedules are the same however few rows there are, whatever an element takes."""
BEYOND_CACHE_BYTES = 2**17
"""Bytes of a row from which on the rows under way in Triton do not stay in the second-level cache from pass to pass."""
CLUSTERS, PERSISTENT_ROW = 15, 11 * 2**12
"""Clusters of 8 blocks that an H200 has under way where each block has a multiprocessor to itself: from so many rows on
they take one after another, where rows have so many elements."""
LINE_BYTES = 128
"""Of neighbouring rows' elements that a block of columns reads at least, where they are aligned."""
COLUMN_THREADS = 512
"""Of a block of columns, before a cluster of blocks is better."""
MANY_COLUMNS = 16384
"""Columns from which on blocks are enough without clusters."""

CPU_BESIDE = 1024
"""Neighbouring rows that a CPU thread walks together: a page of each operand in a row of memory."""
CPU_SHORT = 16
"""Rows shorter than this are walked together too: one alone does not fill a vector."""
CPU_KEPT = 2**18
"""Elements of a row up to which what is costly is kept. Beyond the second-level cache too, reading an exponential costs
less than computing it; rows much longer would drive others out of the last-level cache."""
CPU_LONG = 256
"""Rows shorter than this are taken by as many as the shortest has: more accumulators cost more than they hide."""


@dataclass(frozen=True)
class Persistent:
    """How clusters that stay take rows, of which each block has a multiprocessor to itself.

    Attributes:
        parked: of the operands that all rows read, so many, the first, lie in shared memory, and the others in
            registers.
        shared_bytes: of shared memory for a block.
    """

    parked: int
    shared_bytes: int


@dataclass(frozen=True)
class Staged:
    """What all rows read and only a later pass needs, on its way into shared memory while the row comes.

    Attributes:
        operands: by index, all that no earlier pass needs. An access moves as many elements of each as a vector has.
        vectors: of each thread, the first; the others come into registers.
    """

    operands: tuple[int, ...]
    vectors: int


@dataclass(frozen=True)
class Prefetch:
    """Which elements of rows are asked for before any is waited for.

    Attributes:
        operands: by index, with elements of their own for each row.
        rows: from the first, so many; None for all.
        every: of those, only each so-manieth.
        common: by index, operands that all rows read, of which every block asks for a share where there are few rows.
    """

    operands: tuple[int, ...]
    rows: int | None = None
    every: int = 1
    common: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowSchedule:
    """How rows are walked.

    Attributes:
        threads: of one row in one block (GPU), a power of two; 1 on the CPU.
        rows: rows of one block.
        cluster: blocks of one row.
        vector: elements of one access; on the CPU, of a group.
        unroll: vectors of one thread (kept), or started before the first is used (looping).
        kept: whether the row stays on chip between passes.
        whole: vectors of a thread that lie in the row for every thread, so that they need no mask: all of ``unroll``,
            or all but the last, or 0.
        wide: 64-bit indices.
        blocks: that must fit a multiprocessor's registers together.
        online: whether what an earlier pass can have is computed there (see ``online.py``).
        beside: neighbouring rows of one thread, whose elements it moves in one access; 1 where rows' own elements are
            neighbours.
        turns: rows that a thread takes one after another; all are asked for before the first is used.
        shared_vectors: of the vectors of one thread of a kept row, so many, the last, lie in shared memory.
        early: whether what only a later pass needs comes into registers with the row, not when the row has been read.
        staged: what of later passes' operands lies in shared memory.
        persistent: where clusters stay and take row after row; None where each row has blocks of its own.
        prefetch: what is brought into the second-level cache while the kernel ahead ends.
        once: whether elements that no other row has are read past the first-level cache, which is left to what rows
            share.
    """

    threads: int
    rows: int
    cluster: int
    vector: int
    unroll: int
    kept: bool
    whole: int
    wide: bool
    blocks: int = 1
    online: bool = False
    beside: int = 1
    turns: int = 1
    shared_vectors: int = 0
    early: bool = False
    staged: Staged | None = None
    persistent: Persistent | None = None
    prefetch: Prefetch | None = None
    once: bool = False
    pdl: ClassVar[bool] = True
    """A GPU's sources are made for programmatic dependent launch (see ``gemm/schedule.py``)."""

    @property
    def block_threads(self) -> int:
        return self.threads * self.lanes

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor where blocks stay; 0 where they do not."""
        return int(self.persistent is not None)

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory for a block."""
        if self.staged:
            return len(self.staged.operands) * self.staged.vectors * self.block_threads * ACCESS_BYTES
        return self.persistent.shared_bytes if self.persistent else 0

    @property
    def lanes(self) -> int:
        """Threads of a block side by side, each with other rows."""
        return self.rows // self.beside

    @property
    def elements(self) -> int:
        """That a thread holds at once."""
        return self.vector * self.unroll * self.beside

    @property
    def full(self) -> bool:
        """Whether the row is a multiple of what is held at once, so that nothing is masked."""
        return self.whole == self.unroll

    @property
    def tile(self) -> int:
        """Elements of a row that one block holds at once."""
        return self.threads * self.vector * self.unroll


def schedule(
    kernel: Kernel, layouts: tuple[RowLayout, ...], geometries: tuple[RowGeometry, ...], target: Target, backend: str
) -> RowSchedule:
    """The schedule of ``kernel`` on ``target``, made by ``backend``."""
    (layout,), (geometry,) = layouts, geometries
    if target.kind == "cpu":
        beside = layout.columns or geometry.length < CPU_SHORT
        lanes = CPU_LANES if beside or geometry.length >= CPU_LONG else CPU_SHORT
        kept = not beside and geometry.length <= CPU_KEPT and passes(kernel) > 1
        return RowSchedule(1, CPU_BESIDE if beside else 1, 1, lanes, 1, kept, 0, True)
    walks = importlib.import_module(f"jitgen.families.reduction.{backend}_schedule")
    found: RowSchedule = (walks.columns if layout.columns else walks.rows)(kernel, layout, geometry, target)
    return found


def row_blocks(target: Target, backend: str) -> int:
    """How many blocks of a kernel can share a row, in a cluster; 0 on the CPU, whose threads share what they like."""
    if target.kind == "cpu":
        return 0
    return CLUSTER if backend == "cuda" and target.capability >= 90 else 1


def row_buckets(length: int, columns: bool) -> tuple[int, ...]:
    """Upper ends of the numbers of rows between which schedules for rows of ``length`` elements differ.

    ``columns``: as of ``RowLayout``.
    """
    if columns:
        return (MANY_COLUMNS,)
    if length <= FEW_TURNS:
        return (MANY_ROWS,)
    if length <= LONG_ROW:
        return ()
    ends = {SOME_ROWS, FEW_ROWS, BUSY_ROWS, ENOUGH_ROWS}
    if length >= SPLIT_ROW:
        ends.add(SPLIT_ROWS)
    if length >= PERSISTENT_ROW:
        ends.add(CLUSTERS)
    return tuple(sorted(ends))


def walked_size(kernel: Kernel, layout: RowLayout) -> int:
    """Bytes of the widest element of an operand that varies along the row."""
    (body,) = kernel.bodies
    walked = [o for o, kind in zip(body.operands, layout.operands, strict=True) if kind not in ("row", "broadcast")]
    return max((item_size(o.dtype) for o in walked if o.buffer is not None), default=4)
