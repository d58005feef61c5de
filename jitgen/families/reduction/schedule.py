"""How a row kernel walks its rows: pure functions from layout, row length and target to numbers.

On a GPU a row belongs to ``threads`` threads of a block (a block may hold several rows), or to a cluster of blocks when
it is long. A thread keeps ``unroll`` vectors of ``vector`` elements in registers from pass to pass (QuACK's row kernels
do so, with clusters for the longest). A kernel of one pass keeps nothing, and a row too long for a cluster's registers
is read again by each pass: both *loop* over the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.families.layout import item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.ir.program import Kernel
from jitgen.spec import Target

BLOCK_THREADS = 512
SHORT_BLOCK_THREADS = 128
THREAD_BYTES = 64
"""Bytes of the widest operand a thread aims to hold: a few accesses in flight, before more threads are added."""
HELD_ELEMENTS = 40
"""Elements a thread of a full block may hold in registers."""
MAX_CLUSTER = 8
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40)


@dataclass(frozen=True)
class RowSchedule:
    """How rows are walked.

    Attributes:
        threads: of one row in one block (GPU), a power of two; 1 on the CPU.
        rows: rows of one block.
        cluster: blocks of one row.
        vector: elements of one access.
        unroll: vectors of one thread (resident), or started before the first is used (looping).
        resident: whether the row is kept on chip between passes.
        full: whether the row has exactly threads * cluster * vector * unroll elements, so that nothing is masked.
        wide: 64-bit indices.
    """

    threads: int
    rows: int
    cluster: int
    vector: int
    unroll: int
    resident: bool
    full: bool
    wide: bool

    @property
    def block_threads(self) -> int:
        return self.threads * self.rows


def passes(kernel: Kernel) -> int:
    """Passes over the row: one for each stage in which elements are reduced or stored."""
    (body,) = kernel.bodies
    stages = [
        instruction.stage - (instruction.op == "reduce")
        for instruction in body.instructions
        if instruction.op == "reduce" or (instruction.op == "store" and not instruction.row)
    ]
    return max(stages) + 1


def schedule(
    kernel: Kernel, layouts: tuple[RowLayout, ...], geometries: tuple[RowGeometry, ...], target: Target
) -> RowSchedule:
    """The schedule of ``kernel`` on ``target``."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    if target.kind == "cpu":
        return RowSchedule(1, 1, 1, 1, 1, False, False, True)
    length = max(geometry.length, 1)
    sizes = [item_size(o.dtype) for o in body.operands if o.buffer is not None and not o.row] or [4]
    vector = max(1, min(layout.unit, 16 // max(sizes)))
    once = passes(kernel) == 1
    per_thread = max(vector, THREAD_BYTES // max(sizes))
    threads = 4
    while threads < BLOCK_THREADS and threads * per_thread < length:
        threads *= 2
    rows = max(1, SHORT_BLOCK_THREADS // threads)
    if once or (geometry.rows == 1 and length > BLOCK_THREADS * HELD_ELEMENTS):
        unroll = max(1, min(4, -(-length // (threads * vector))))
        return RowSchedule(threads, rows, 1, vector, unroll, False, False, layout.wide)
    cluster, held = 1, max(HELD_ELEMENTS * 4 // max(*sizes, 4), vector)
    while cluster < MAX_CLUSTER and length > threads * cluster * held:
        cluster *= 2
    if target.kind != "cuda" or target.capability < 90:
        cluster = 1
    steps = -(-length // (threads * cluster * vector))
    unroll = next((step for step in STEPS if step >= steps), 0)
    if not unroll or unroll * vector > held:
        return RowSchedule(threads, rows, 1, vector, 4, False, False, layout.wide)
    full = threads * cluster * vector * unroll == length
    return RowSchedule(threads, rows, cluster, vector, unroll, True, full, layout.wide)
