"""Schedules row kernels in CUDA C++.

``POLICIES`` is a list, asked in order; the first policy that applies to a problem gives its schedule. Those of others
that apply, and of other threads that hold a row, are further candidates, for ``jitgen tune``. What each of them gives
was measured on an H200. Two of the choices have files of their own: which threads hold a resident row
(``cuda_resident.py``) and how its elements are loaded (``cuda_loads.py``). Columns, whose elements are neighbours
across rows, have ``cuda_column_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jitgen.device import Device
from jitgen.families.rows.reduction import cuda_column_schedule
from jitgen.families.rows.reduction.cuda_loads import BARRIER_BYTES
from jitgen.families.rows.reduction.cuda_problem import MIN_THREADS, RowProblem, rows_per_iteration, state_bytes
from jitgen.families.rows.reduction.cuda_resident import (
    DEFERRED_OPERANDS,
    RESIDENT_THREAD_BYTES,
    WORD_BYTES,
    held_otherwise,
    resident,
)
from jitgen.families.rows.reduction.forms import CudaRows, LoopedRows, PersistentRows
from jitgen.families.rows.reduction.residency import REGISTER_BYTES
from jitgen.families.rows.reduction.schedule import (
    BLOCK_THREADS,
    CLUSTER_BLOCKS,
    LINE_BYTES,
    MAX_BLOCK_THREADS,
    MULTIPROCESSOR_THREADS,
    PERSISTENT_ROW,
    THREAD_BYTES,
    Occupancy,
)
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP
from jitgen.kernel.rows import RowGeometry, RowLayout

SINGLE_PASS_UNROLL = 4
"""Accesses of a thread in flight where the kernel has one pass."""
STREAMED_BYTES = 2**15
"""Bytes of one operand's row from which on no thread keeps any of it, where one online pass computes all results."""
STREAMED_THREADS = 256
"""Threads of a block of such a row; twice as many where rows are at most ``Occupancy.several``, twice as many where
they are longer than ``STREAMED_LENGTH``."""
STREAMED_LENGTH = 2**16
"""Elements of a row beyond which its block has twice the threads."""
STREAMED_ELEMENTS = 16
"""Elements of a thread in flight there."""
MAX_MULTIPROCESSOR_THREADS = 2048
"""Threads of a multiprocessor, at most (CUDA C++ Programming Guide, "Compute Capabilities": 9.0)."""
DOUBLE_BYTES = 8
"""Bytes of an element from which on so many threads have too few registers to combine it."""
REREAD_UNROLL = 4
"""Accesses of a thread in flight where each pass reads the row from memory."""
PERSISTENT_THREADS = 256
"""Threads of a block of a persistent cluster, which has a multiprocessor to itself."""
PERSISTENT_REGISTERS = 200
"""Registers of each of these threads for the row and for row-invariant operands."""


@dataclass(frozen=True)
class PersistentShape:
    """Describes a shape of persistent clusters.

    Attributes:
        cluster: blocks of a cluster.
        max_unroll: vectors of a thread, at most.
        max_own_rows: rows up to which each has a cluster of its own instead.
    """

    cluster: int
    max_unroll: int
    max_own_rows: int


def persistent_shapes(occupancy: Occupancy) -> tuple[PersistentShape, ...]:
    """Lists the shapes in the order in which they are asked: the first whose threads can hold a row is taken."""
    return (
        PersistentShape(CLUSTER_BLOCKS // 2, max_unroll=20, max_own_rows=occupancy.quarter),
        PersistentShape(CLUSTER_BLOCKS, max_unroll=25, max_own_rows=occupancy.clusters),
    )


def rows(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> tuple[CudaRows, ...]:
    """Schedules rows of neighbouring elements: the choice of the policies first, then what else they have."""
    return tuple(dict.fromkeys(_by_policies(RowProblem(kernel, layout, geometry, device))))


def _by_policies(problem: RowProblem) -> Iterator[CudaRows]:
    if problem.passes == 1:
        yield from single_passes(problem)
        return
    yield from (schedule for schedule in (policy(problem) for policy in POLICIES) if schedule is not None)
    yield from held_otherwise(problem)


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> tuple[CudaRows, ...]:
    """Schedules rows whose elements are neighbours across rows."""
    return (cuda_column_schedule.columns(kernel, layout, geometry, device),)


# ----------------------------------------------------------------------------------------------------------- policies


def single_passes(problem: RowProblem) -> Iterator[LoopedRows]:
    """Schedules kernels of one pass: nothing is needed twice, so nothing is resident; threads loop over a row with up
    to four accesses in flight. Of many short rows a thread takes several at once. Half and twice the threads, where a
    block may have so many, are further candidates."""
    yield _single_pass(problem, problem.threads)
    for threads in (problem.threads // 2, problem.threads * 2):
        if threads >= MIN_THREADS and threads * problem.rows_per_block <= MAX_BLOCK_THREADS:
            yield _single_pass(problem, threads)


def _single_pass(problem: RowProblem, threads: int) -> LoopedRows:
    vector = problem.vector
    schedule = LoopedRows(
        threads=threads,
        rows_per_block=problem.rows_per_block,
        vector=vector,
        unroll=max(1, min(SINGLE_PASS_UNROLL, -(-problem.length // (threads * vector)))),
        unmasked_vectors=0,
        wide=problem.layout.wide,
    )
    if problem.length > schedule.tile:
        return schedule
    return replace(schedule, rows_per_iteration=rows_per_iteration(problem, schedule))


def single_online_pass(problem: RowProblem) -> LoopedRows | None:
    """Schedules many long rows of which one online pass computes all results (a log-sum-exp, a variance): a block for
    each row, which keeps nothing. Keeping the row would take registers, hence threads, and save no read."""
    sizes = problem.item_sizes
    if not problem.has_many_rows or problem.length * max(sizes) < STREAMED_BYTES or problem.online_passes > 1:
        return None
    threads = STREAMED_THREADS
    if problem.rows <= problem.occupancy.several:
        threads *= 2
    if problem.length > STREAMED_LENGTH:
        threads *= 2
    light = max(sizes) < DOUBLE_BYTES and sum(sizes) <= ACCESS_BYTES
    multiprocessor_threads = MAX_MULTIPROCESSOR_THREADS if light else MULTIPROCESSOR_THREADS
    return LoopedRows(
        threads=threads,
        vector=problem.vector,
        unroll=max(1, min(STREAMED_ELEMENTS, THREAD_BYTES // sum(sizes)) // problem.vector),
        unmasked_vectors=0,
        wide=problem.layout.wide,
        blocks_per_multiprocessor=multiprocessor_threads // threads,
        online=True,
    )


def persistent_clusters(problem: RowProblem) -> PersistentRows | None:
    """Schedules long rows of float32 with row-invariant operands, or too long for eight blocks: clusters take row after
    row.

    The next row of a cluster is copied to shared memory while this one is reduced and stored, and what all rows read is
    loaded once for all rows of a cluster. Otherwise each row would load it from the second-level cache: the first-level
    cache is emptied wherever a cluster begins. On an H200 with 64 rows of 151936, LayerNorm has 0.91 of a copy's speed
    instead of 0.82, RMSNorm 0.98 instead of 0.90.
    """
    if not problem.has_clusters or problem.length < PERSISTENT_ROW or problem.online_passes == 1:
        return None
    if not _can_be_copied(problem):
        return None
    invariant = [index for index in problem.operands_read if problem.layout.row_invariant[index]]
    registers = problem.element_bytes // REGISTER_BYTES
    fits_eight = problem.length * registers * REGISTER_BYTES <= CLUSTER_BLOCKS * BLOCK_THREADS * RESIDENT_THREAD_BYTES
    if fits_eight and (not invariant or (problem.has_many_rows and len(invariant) < DEFERRED_OPERANDS)):
        return None
    warps = PERSISTENT_THREADS // WARP
    for shape in persistent_shapes(problem.occupancy):
        most_vectors, fewest_vectors = _vectors_per_warp(problem, shape.cluster * warps)
        unroll = -(-most_vectors // WARP)
        if unroll > shape.max_unroll:
            continue
        room = PERSISTENT_REGISTERS // (unroll * problem.vector) - registers
        in_shared = max(0, len(invariant) - room)
        copied = (len(problem.row_operands) + in_shared) * PERSISTENT_THREADS * unroll * ACCESS_BYTES
        received = 2 * shape.cluster * warps * sum(state_bytes(problem.online_kernel, problem.layout.wide))
        fits = room >= 0 and copied + received + BARRIER_BYTES <= problem.device.target.shared_bytes
        if problem.rows <= shape.max_own_rows or not fits:
            return None
        return PersistentRows(
            threads=PERSISTENT_THREADS,
            cluster=shape.cluster,
            vector=problem.vector,
            unroll=unroll,
            unmasked_vectors=fewest_vectors // WARP,
            wide=problem.layout.wide,
            online=problem.accumulates_moments,
            shared_operands=in_shared,
            shared_bytes=copied,
        )
    return None


def reread(problem: RowProblem) -> LoopedRows:
    """Schedules every other row: it is too long to stay in registers, so each pass reads it from memory, as few as
    online accumulation leaves."""
    return LoopedRows(
        threads=BLOCK_THREADS,
        vector=problem.vector,
        unroll=REREAD_UNROLL,
        unmasked_vectors=0,
        wide=problem.layout.wide,
        online=True,
    )


def reread_by_block(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> LoopedRows:
    """Schedules any row by a block of threads that reads it in each pass."""
    return reread(RowProblem(kernel, layout, geometry, device))


POLICIES = (single_online_pass, persistent_clusters, resident, reread)
"""The policies for several passes in the order in which they are asked; the last applies to every row."""


def _can_be_copied(problem: RowProblem) -> bool:
    """Returns whether all that is read of a row is float32 or int32, needed by the first pass or row-invariant, and
    copied to shared memory by whole accesses."""
    read = problem.operands_read
    invariant = [index for index in read if problem.layout.row_invariant[index]]
    is_words = {problem.item_size_of(index) for index in read} == {WORD_BYTES}
    first_pass_needs_all = len(read) == len(problem.row_operands) + len(invariant)
    if not (problem.row_operands and is_words and first_pass_needs_all):
        return False
    return problem.vector * WORD_BYTES == ACCESS_BYTES and problem.has_whole_accesses(read)


def _vectors_per_warp(problem: RowProblem, warps: int) -> tuple[int, int]:
    """Returns the most and the fewest vectors of a warp if ``warps`` of them share a row as evenly as whole lines
    allow."""
    line_vectors = LINE_BYTES // ACCESS_BYTES
    length, vector = problem.geometry.length, problem.vector
    lines = -(-length // (line_vectors * vector))
    before_last = (warps - 1) * (lines // warps) + min(warps - 1, lines % warps)
    last = length // vector - before_last * line_vectors
    return -(-lines // warps) * line_vectors, min(lines // warps * line_vectors, last)
