"""Chooses which threads hold a resident row in their registers in CUDA C++.

``HOLDERS`` is a list of policies, asked in order; the first that applies to a problem says who holds its rows. Another
way of holding rows is one function more there. The choices were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jitgen.families.rows.reduction.cuda_loads import with_deferred_loads, with_prefetch
from jitgen.families.rows.reduction.cuda_problem import RowProblem, first_that_applies, rows_per_iteration
from jitgen.families.rows.reduction.forms import ResidentRows
from jitgen.families.rows.reduction.residency import FEW_ELEMENTS, residency
from jitgen.families.rows.reduction.row_chunks import SINGLE_BLOCK_ROWS
from jitgen.families.rows.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    CLUSTER_BLOCKS,
    FULL_THREAD_BYTES,
    LONG_ROW,
    MAX_BLOCK_THREADS,
    MIN_CLUSTER_THREADS,
    MULTIPROCESSOR_THREADS,
    THREAD_BYTES,
)
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size

RESIDENT_THREAD_BYTES = 160
"""Bytes of its row that a thread can hold in addition to what it computes with, of 1024 threads on a multiprocessor."""
LATENCY_ROW_BYTES = 2**17
"""Bytes of each of a few rows up to which a cluster of the smallest blocks takes it: latency counts, not registers."""
PAIR_BYTES = 2 * MAX_BLOCK_THREADS * RESIDENT_THREAD_BYTES
"""Bytes of the longest row that two blocks of a whole multiprocessor each can hold."""
SEVEN_BLOCKS = 7
"""Blocks of a cluster of which an H200 runs 32 at once, with half a multiprocessor for each block; of 8 blocks it runs
30."""
SEVEN_BYTES = 2**18
"""Bytes of a row from which on seven blocks take it."""
SEVEN_THREAD_BYTES = 352
"""Bytes of its row that a thread of such a block holds, of 512 threads on a multiprocessor."""
REGISTER_VECTORS = 8
"""Vectors of 16 bytes that a thread keeps in registers where others of its vectors lie in shared memory."""
SHARED_VECTORS = 11
"""Vectors of 16 bytes that a thread has in shared memory at most: four blocks of 256 threads share 227 KiB."""
SHARED_REDUCTIONS = 3
"""Reductions whose partial results fit the 48 KiB of static shared memory together with those vectors, at most."""
WORD_BYTES = 4
"""Bytes of the only element size that a row partly in shared memory, or one of persistent clusters, may have. Rows of
16-bit elements have fewer bytes, and what few blocks do with each row takes longer than its transfer."""
DEFERRED_OPERANDS = 2
"""Deferred operands from which on a cluster has half the threads, with twice the registers for each: room to load such
operands ahead of their use (LayerNorm of rows of 151936 in float32 is 8 % faster on an H200)."""
DEFERRED_THREADS = 512
"""Threads of a multiprocessor that its registers should suffice for then."""
UNROLLS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)
"""Vectors of a thread of one block: row lengths between two of these share a source."""


@dataclass(frozen=True)
class Holder:
    """Describes the threads that hold a row.

    Attributes:
        threads: threads of each block that share a row.
        cluster: blocks that share a row.
        multiprocessor_threads: threads of a multiprocessor, which share its registers.
        thread_bytes: bytes of the row that a thread holds at most.
        online: as ``GpuRows.online``.
        uses_shared_memory: whether what is beyond ``REGISTER_VECTORS`` lies in shared memory.
    """

    threads: int
    cluster: int = 1
    multiprocessor_threads: int = MULTIPROCESSOR_THREADS
    thread_bytes: int = RESIDENT_THREAD_BYTES
    online: bool = False
    uses_shared_memory: bool = False


def resident(problem: RowProblem) -> ResidentRows | None:
    """Schedules rows that stay in registers from pass to pass, in the threads that ``HOLDERS`` choose; None if those
    cannot hold one."""
    return _kept_by(problem, first_that_applies(HOLDERS, problem))


def held_otherwise(problem: RowProblem) -> Iterator[ResidentRows]:
    """Yields the schedules by all of ``HOLDERS`` that apply, and by half and twice the threads of one block, if they
    can hold a row of the problem's blocks."""
    shares_rows = problem.has_clusters and problem.rows_per_block == 1 and problem.length > LONG_ROW
    holders: list[Holder] = []
    for holder in filter(None, (policy(problem) for policy in HOLDERS)):
        if holder.cluster == 1:
            counts = (holder.threads, holder.threads // 2, holder.threads * 2)
            holders += [replace(holder, threads=count) for count in counts if count >= WARP]
        elif shares_rows:
            holders.append(holder)
    for holder in holders:
        if holder.threads * problem.rows_per_block <= MAX_BLOCK_THREADS:
            schedule = _kept_by(problem, holder)
            if schedule is not None:
                yield schedule


def _kept_by(problem: RowProblem, holder: Holder) -> ResidentRows | None:
    """Schedules rows that ``holder`` holds; None if it cannot."""
    vector, element_bytes = problem.vector, problem.element_bytes
    step = holder.threads * holder.cluster * vector
    needed = -(-problem.length // step)
    unroll = next((count for count in UNROLLS if count >= needed), needed) if holder.cluster == 1 else needed
    if unroll * vector * element_bytes > holder.thread_bytes + vector * element_bytes:
        return None
    complete = problem.length // step
    # Moments of wide elements take registers that a long row of one block does not leave.
    block_online = problem.accumulates_moments and (problem.is_narrow or unroll * vector < FEW_ELEMENTS)
    schedule = ResidentRows(
        threads=holder.threads,
        rows_per_block=problem.rows_per_block,
        cluster=holder.cluster,
        vector=vector,
        unroll=unroll,
        unmasked_vectors=complete if complete >= unroll - 1 else 0,
        wide=problem.layout.wide,
        online=holder.online or (holder.cluster == 1 and block_online),
        shared_vectors=unroll - REGISTER_VECTORS if holder.uses_shared_memory else 0,
    )
    # ptxas keeps long rows within half a multiprocessor's registers on Hopper; for other targets it would spill.
    several_blocks = unroll * vector <= FEW_ELEMENTS or problem.device.target.has_warpgroup_products
    blocks = holder.multiprocessor_threads // schedule.block_threads if several_blocks else 1
    schedule = replace(
        schedule, rows_per_iteration=rows_per_iteration(problem, schedule), blocks_per_multiprocessor=max(1, blocks)
    )
    return with_deferred_loads(problem, with_prefetch(problem, schedule))


# ----------------------------------------------------------------------------------------------------------- policies


def cluster_of_small_blocks(problem: RowProblem) -> Holder | None:
    """Takes few long rows, of up to 128 KiB each: eight blocks with as few threads as hold ``THREAD_BYTES`` each.

    So few rows leave most of the device idle, and the latency of one row is what the kernel takes.
    """
    long = LONG_ROW < problem.length <= LATENCY_ROW_BYTES // problem.element_bytes
    if not (problem.has_clusters and problem.rows <= problem.occupancy.half and long):
        return None
    threads = 2 * WARP
    while threads * CLUSTER_BLOCKS * THREAD_BYTES < problem.row_bytes:
        threads *= 2
    return Holder(threads, CLUSTER_BLOCKS, online=problem.accumulates_moments)


def one_block(problem: RowProblem) -> Holder | None:
    """Takes rows that a block of up to 512 threads holds: no barrier reaches beyond the block.

    A row that is reduced once before it is stored goes to a cluster from half as many bytes on.
    """
    sooner = problem.reduces_once and problem.has_clusters
    limit = FULL_THREAD_BYTES // 2 if sooner else FULL_THREAD_BYTES
    return Holder(problem.threads) if problem.row_bytes <= problem.threads * limit else None


def largest_block(problem: RowProblem) -> Holder | None:
    """Takes longer rows before Hopper, which has no clusters: a block of 1024 threads."""
    return None if problem.has_clusters else Holder(MAX_BLOCK_THREADS)


def pair_of_largest_blocks(problem: RowProblem) -> Holder | None:
    """Takes 33 to 64 long rows of narrow elements: two blocks of 1024 threads, each with a multiprocessor to itself.

    An H200 runs 66 such clusters at once, but only 62 clusters of eight blocks with a quarter of a multiprocessor each:
    8 of its 132 multiprocessors are in no cluster of more than two. The row is accumulated online, so that the two
    blocks wait for one another once less, which pays unless every element then takes a function.
    """
    few = (
        problem.occupancy.quarter < problem.rows <= problem.occupancy.half
        and BEYOND_CACHE_BYTES < problem.row_bytes <= PAIR_BYTES
    )
    cheap = problem.online_passes > 1 and problem.is_narrow and not problem.online_is_costly
    return Holder(MAX_BLOCK_THREADS, 2, online=True) if few and cheap else None


def cluster_of_seven(problem: RowProblem) -> Holder | None:
    """Takes long rows that are made of two operands or more, such as a sum with a residual: seven blocks.

    An H200 runs 32 such clusters at once, with half a multiprocessor for each block, and 30 of eight blocks. Many rows
    of narrow elements are left to clusters of eight.
    """
    if len(problem.row_operands) < 2 or problem.row_bytes <= SEVEN_BYTES:
        return None
    if problem.is_narrow and problem.has_many_rows:
        return None
    threads, online = _cluster_threads(problem), problem.accumulates_moments
    if problem.is_narrow:
        holder = Holder(threads, SEVEN_BLOCKS, thread_bytes=SEVEN_THREAD_BYTES // 2, online=online)
    else:
        holder = Holder(threads // 2, SEVEN_BLOCKS, DEFERRED_THREADS, SEVEN_THREAD_BYTES, online)
    # A warp combines what all warps have sent: a number of values that divides 32, or more of them than 32.
    combines = holder.threads // WARP * SEVEN_BLOCKS > WARP
    return holder if combines and problem.row_bytes <= SEVEN_BLOCKS * holder.threads * holder.thread_bytes else None


def cluster_with_shared_memory(problem: RowProblem) -> Holder | None:
    """Takes 49 to 128 long rows of one float32 value for each element: beyond eight vectors of a thread, shared memory.

    So a multiprocessor has four blocks of 256 threads where, with registers alone, it has two of 512, and nearly all of
    64 rows are in flight at once (softmax of 151936 in float32: 0.93 of a copy's speed instead of 0.88).
    """
    if problem.rows <= SINGLE_BLOCK_ROWS or problem.has_many_rows:
        return None
    threads = _cluster_threads(problem)
    if threads < BLOCK_THREADS or not _is_one_word(problem):
        return None
    thread_bytes = (REGISTER_VECTORS + SHARED_VECTORS) * ACCESS_BYTES
    fits = problem.row_bytes <= CLUSTER_BLOCKS * (threads // 2) * thread_bytes
    return Holder(threads // 2, CLUSTER_BLOCKS, thread_bytes=thread_bytes, uses_shared_memory=True) if fits else None


def cluster_for_deferred_operands(problem: RowProblem) -> Holder | None:
    """Takes rows with two deferred operands or more, such as weight and bias: half the threads, with twice the
    registers.

    The registers are for loads of those operands ahead of their use. For 65 to 128 rows of narrow elements larger
    blocks are faster.
    """
    larger = problem.is_narrow and problem.rows > problem.occupancy.half and not problem.has_many_rows
    threads = _cluster_threads(problem)
    if larger or threads == MIN_CLUSTER_THREADS or len(problem.deferred) < DEFERRED_OPERANDS:
        return None
    online = problem.accumulates_moments
    return Holder(threads // 2, CLUSTER_BLOCKS, DEFERRED_THREADS, 2 * RESIDENT_THREAD_BYTES, online)


def cluster_of_eight(problem: RowProblem) -> Holder:
    """Takes every other row: eight blocks, as small as can hold it, so that several rows share a multiprocessor."""
    return Holder(_cluster_threads(problem), CLUSTER_BLOCKS, online=problem.accumulates_moments)


HOLDERS = (
    cluster_of_small_blocks,
    one_block,
    largest_block,
    pair_of_largest_blocks,
    cluster_of_seven,
    cluster_with_shared_memory,
    cluster_for_deferred_operands,
    cluster_of_eight,
)
"""The policies in the order in which they are asked; the last applies to every row."""


def _cluster_threads(problem: RowProblem) -> int:
    """Returns the threads of each of eight blocks: the fewest that hold the row, at most ``BLOCK_THREADS``."""
    threads = BLOCK_THREADS
    while threads > MIN_CLUSTER_THREADS and problem.row_bytes <= threads // 2 * CLUSTER_BLOCKS * RESIDENT_THREAD_BYTES:
        threads //= 2
    return threads


def _is_one_word(problem: RowProblem) -> bool:
    """Returns whether all that is read and stays resident of an element is one value of four bytes, read by whole
    accesses.

    Values that are stored over one another in shared memory must have the same size. A row-invariant operand would have
    too few registers to be loaded ahead of its use, and the partial results of many reductions would have no room.
    """
    registers = residency(problem.body, None)
    read = problem.operands_read
    if problem.reductions > SHARED_REDUCTIONS or len(read) != 1 or registers.values_per_element != 1:
        return False
    if not problem.has_whole_accesses(read):
        return False
    dtypes = (problem.body.instructions[position].dtype for positions in registers.resident for position in positions)
    sizes = {item_size(dtype) for dtype in dtypes} | {registers.bytes_per_element, problem.item_size_of(read[0])}
    return sizes == {WORD_BYTES}
