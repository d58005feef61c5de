"""Chooses how the elements of resident rows are loaded in CUDA C++: prefetches, streaming loads, and deferred operands.

Blocks can prefetch into the second-level cache while the kernel ahead of them in the stream still runs, and load when
it has ended (programmatic dependent launch). ``PREFETCHES`` is a list of policies, asked in order; the first that
applies says which rows are prefetched, and whether the loads stream past the first-level cache. The choices were
measured on an H200.
"""

from __future__ import annotations

from dataclasses import replace

from jitgen.families.rows.reduction.cuda_problem import RowProblem, first_that_applies, state_bytes
from jitgen.families.rows.reduction.forms import Prefetch, ResidentRows, Staged
from jitgen.families.rows.reduction.schedule import BEYOND_CACHE_BYTES, BLOCK_THREADS, NARROW_BYTES, SHORT_ROW
from jitgen.kernel.operands import ACCESS_BYTES, WARP

PREFETCHED_BYTES = 2048
"""Bytes of a row from which on it is prefetched."""
PAIR_BLOCKS = 2
"""Blocks of a cluster whose blocks have a multiprocessor each."""
PAIR_ROWS = 16
"""How many rows are prefetched, evenly among all, where pairs of blocks hold them and all are in flight at once (H200,
64 rows of 98304 in bfloat16: RMSNorm takes 4 % less, LayerNorm 3 %)."""
STAGGER_BYTES = 7 * 2**20
"""Bytes of the first rows in clusters that are prefetched where rows are not many. These rows are stored while the
others are still loaded, and so on through the kernel: rows that all begin alike leave the memory idle at the same time
(H200, 64 rows of 151936 in bfloat16: softmax has 0.89 of a copy's speed with all rows prefetched, 0.95 with 24)."""
PRELOADED_VECTORS = 4
"""Vectors of a deferred operand up to which a thread loads all of them with the row, where rows are short or blocks
large (H200: RMSNorm of 64 rows of 768 takes 10 to 17 % less, of 1024 rows of 8192 1 to 3 %)."""
BARRIER_BYTES = 1024
"""Shared memory for the barriers of a block, in bytes, at least."""


def with_prefetch(problem: RowProblem, schedule: ResidentRows) -> ResidentRows:
    """Adds prefetches and streaming loads to ``schedule``, if rows are long enough and loaded by whole accesses."""
    operands = problem.row_operands
    if not operands or schedule.rows_per_iteration > 1 or not problem.has_whole_accesses(operands):
        return schedule
    if schedule.tile * schedule.cluster * max(map(problem.item_size_of, operands)) < PREFETCHED_BYTES:
        return schedule
    return first_that_applies(PREFETCHES, problem, schedule)


# ----------------------------------------------------------------------------------------------------------- policies


def all_rows(problem: RowProblem, schedule: ResidentRows) -> ResidentRows | None:
    """Prefetches every row, for rows of one block, and many rows of narrow elements whose blocks share a
    multiprocessor."""
    many = problem.has_many_rows and _has_narrow_neighbours(problem, schedule)
    return replace(schedule, prefetch=Prefetch(problem.row_operands)) if schedule.cluster == 1 or many else None


def no_row_of_many(problem: RowProblem, schedule: ResidentRows) -> ResidentRows | None:
    """Prefetches none of many other rows in clusters: the first few that could be make no difference."""
    return replace(schedule, streaming_loads=not _is_narrow(problem)) if problem.has_many_rows else None


def every_nth_row_of_pairs(problem: RowProblem, schedule: ResidentRows) -> ResidentRows | None:
    """Prefetches sixteen rows, evenly among all, for rows of two blocks, which are all in flight at once."""
    if schedule.cluster != PAIR_BLOCKS:
        return None
    prefetch = Prefetch(problem.row_operands, every_nth=-(-problem.rows // PAIR_ROWS))
    return replace(schedule, prefetch=prefetch, streaming_loads=True)


def first_rows(problem: RowProblem, schedule: ResidentRows) -> ResidentRows:
    """Prefetches the first ``STAGGER_BYTES`` of few rows in larger clusters.

    Of operands of wide elements only the first is: with a second one more was in flight, and slower. Loads stream,
    unless the row lies partly in shared memory, or blocks share a multiprocessor and the row is narrow or (being a
    single operand) reduced more than once.
    """
    operands = problem.row_operands
    sizes = [problem.item_size_of(index) for index in operands]
    reread = schedule.blocks_per_multiprocessor > 1 and len(operands) == 1 and problem.reductions > 1
    streaming = not (_has_narrow_neighbours(problem, schedule) or schedule.shared_vectors or reread)
    chosen = tuple(i for i, size in zip(operands, sizes, strict=True) if i == operands[0] or size <= NARROW_BYTES)
    count = max(1, STAGGER_BYTES // (problem.length * sum(sizes)))
    return replace(schedule, prefetch=Prefetch(chosen, count), streaming_loads=streaming)


PREFETCHES = (all_rows, no_row_of_many, every_nth_row_of_pairs, first_rows)
"""The policies in the order in which they are asked; the last applies to every row."""


def _is_narrow(problem: RowProblem) -> bool:
    """Returns whether the elements of each operand that differs from row to row are narrow."""
    return max(map(problem.item_size_of, problem.row_operands)) <= NARROW_BYTES


def _has_narrow_neighbours(problem: RowProblem, schedule: ResidentRows) -> bool:
    """Returns whether blocks of different rows of narrow elements share a multiprocessor."""
    return schedule.blocks_per_multiprocessor > 1 and _is_narrow(problem)


# -------------------------------------------------------------------------------------------------- deferred operands


def with_deferred_loads(problem: RowProblem, schedule: ResidentRows) -> ResidentRows:
    """Adds to ``schedule`` the way in which operands that only a later pass needs are loaded.

    Row-invariant ones (a weight) are staged in shared memory where two blocks hold a row. A single deferred operand of
    rows in one block is preloaded with the row where that takes few vectors. What is row-invariant is prefetched too,
    where rows are not so long that it would fill the second-level cache.
    """
    if schedule.rows_per_iteration > 1 or schedule.shared_vectors or not problem.deferred:
        return schedule
    operands = problem.deferred_row_invariant
    if schedule.cluster == PAIR_BLOCKS:
        vectors = _staged_vectors(problem, schedule)
        schedule = replace(schedule, staged=Staged(operands, vectors)) if vectors else schedule
    elif schedule.cluster == 1 and len(problem.deferred) == 1 and schedule.unroll <= PRELOADED_VECTORS:
        preload = schedule.threads >= BLOCK_THREADS or problem.length <= SHORT_ROW
        schedule = replace(schedule, preload_deferred=preload)
    size = max(map(problem.item_size_of, operands), default=0)
    if schedule.prefetch and size * problem.length <= BEYOND_CACHE_BYTES:
        few = problem.occupancy.full
        prefetch = replace(schedule.prefetch, row_invariant=operands, row_invariant_blocks=few)
        schedule = replace(schedule, prefetch=prefetch)
    return schedule


def _staged_vectors(problem: RowProblem, schedule: ResidentRows) -> int:
    """Returns how many vectors of each deferred operand a thread can have in shared memory; 0 if they cannot be staged.

    They are all staged or none: once some lie in shared memory, the kernel loads no vector ahead of its use.
    """
    operands = problem.deferred_row_invariant
    if operands != problem.deferred:
        return 0
    if any(problem.item_size_of(index) * schedule.vector != ACCESS_BYTES for index in operands):
        return 0
    received = PAIR_BLOCKS * schedule.threads // WARP * sum(state_bytes(problem.online_kernel, problem.layout.wide))
    room = (problem.device.target.shared_bytes - BARRIER_BYTES - received) // ACCESS_BYTES
    return max(0, min(schedule.unroll, room // schedule.threads // len(operands)))
