"""How a row kernel in CUDA C++ walks its rows, and how it walks columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.cuda_clusters import (
    BARRIER_BYTES,
    PAIR,
    REGISTER_VECTORS,
    Share,
    accumulates_moments,
    clustered,
    has_whole_accesses,
    late_common,
    own_operands,
    persistent,
    reductions,
    state_bytes,
)
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.online import online
from jitgen.families.reduction.residency import FEW_ELEMENTS, late_operands, passes, residency
from jitgen.families.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    BUSY_ROWS,
    CLUSTER,
    COLUMN_THREADS,
    ENOUGH_ROWS,
    FEW_ROWS,
    FEW_TURNS,
    HELD_BYTES,
    LINE_BYTES,
    LONG_ROW,
    MANY_COLUMNS,
    MANY_ROWS,
    MOST_THREADS,
    MOST_TURNS,
    NARROW_BYTES,
    PERSISTENT_ROW,
    RESIDENT_THREADS,
    SHORT_BLOCK_THREADS,
    SHORT_ROW,
    SHORT_ROW_BYTES,
    THREAD_BYTES,
    TURN_BYTES,
    WARP,
    Prefetch,
    RowSchedule,
    Staged,
    walked_size,
)
from jitgen.ir.program import Kernel
from jitgen.spec import Target

FEW_ACCESSES = 4
"""What a thread of a short row aims at instead where accesses are narrow: the threads of a warp read side by side."""
PAIR_ROWS = 16
"""Of rows in pairs of blocks, which are all under way at once, so many are prefetched, not the first but evenly among
them: RMSNorm of 64 rows of 98304 in bfloat16 takes 4 % less on an H200, LayerNorm 3 %."""
EARLY_VECTORS = 4
"""Of an operand that only a later pass needs, up to which a thread asks for all of it with the row, where rows are
short or blocks large: RMSNorm of 64 rows of 768 takes 10 to 17 % less on an H200, of 1024 rows of 8192 1 to 3 %."""
PREFETCHED_BYTES = 2048
"""Of a row, from which on it is asked for as a whole before its elements are."""
STAGGER_BYTES = 7 * 2**20
"""Of rows in clusters, from the first, that are prefetched where there are up to ``BUSY_ROWS``. These rows are stored
while the others are still read, and so on through the kernel: rows that all start alike take turns at leaving the
memory idle (64 rows of 151936 in bfloat16: softmax 0.89 of a copy's speed with all prefetched, 0.95 with 24)."""
ONCE_BYTES, ONCE_THREADS, ONCE_ELEMENTS, ONCE_LENGTH = 2**15, 256, 16, 2**16
"""Bytes of a row from which on nobody keeps it where all is known once it is read; threads of a small block, elements
of each under way, and the length of a row from which on there are twice as many threads."""
FEW_ROWS_BYTES = 2**17
"""Of each of a few long rows, up to which a cluster of the smallest blocks has it: latency counts, not registers."""
MOST_RESIDENT_THREADS, DOUBLE_BYTES = 2048, 8
"""Of a multiprocessor; elements so wide are combined in more registers than so many threads have."""
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)
COLUMN_UNROLL = 8
"""Accesses of a thread under way at once: on an H200 four are slower, sixteen no faster."""
STATE_BYTES, MOST_STATE_BYTES = 80, 256
"""Accumulated by a thread beside the accesses under way, from which on half as many threads fit a multiprocessor, and
from which on it takes fewer rows."""
SHARED_BYTES = 40 * 1024
"""Of shared memory for columns' results: all that a block has without asking is 48 KiB."""


def rows(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """Rows of neighbouring elements: as many threads as hold 64 bytes each; for longer rows more bytes for a thread,
    then a cluster of blocks."""
    (body,) = kernel.bodies
    length = max(geometry.length, 1)
    sizes = [item_size(o.dtype) for o in body.operands if o.buffer is not None and not o.row] or [4]
    vector = max(1, min(layout.unit, ACCESS_BYTES // max(sizes)))
    element = residency(body, None).bytes
    if passes(kernel) == 1:
        element = sum(sizes)
    threads = 4
    narrower = min(THREAD_BYTES, FEW_ACCESSES * vector * max(sizes))
    while threads < BLOCK_THREADS and threads * (narrower if threads < WARP else THREAD_BYTES) < length * element:
        threads *= 2
    once = passes(kernel) == 2
    narrow = max(sizes) <= NARROW_BYTES
    if threads == BLOCK_THREADS and narrow and not once and length * element <= BLOCK_THREADS // 2 * HELD_BYTES:
        threads //= 2  # two blocks wait for one another less than one does for itself
    short = length <= SHORT_ROW if once else length * element <= SHORT_ROW_BYTES
    if short and passes(kernel) > 1 and threads < BLOCK_THREADS and length % (2 * threads * vector) == 0:
        threads *= 2
    rows = max(1, SHORT_BLOCK_THREADS // threads)
    if passes(kernel) == 1:
        unroll = max(1, min(4, -(-length // (threads * vector))))
        found = RowSchedule(threads, rows, 1, vector, unroll, False, 0, layout.wide)
        single = length <= found.tile
        return replace(found, turns=_turns(found, geometry, element)) if single else found
    streamed = online(kernel)
    if geometry.rows > BUSY_ROWS and length * max(sizes) >= ONCE_BYTES and passes(streamed) == 1:
        return _read_once(layout, geometry, sizes, vector)
    share = Share(threads)
    clusters = target.capability >= 90
    if clusters and length >= PERSISTENT_ROW and passes(streamed) > 1:
        staying = persistent(kernel, layout, geometry, vector, target.shared_bytes)
        if staying:
            return staying
    if clusters and geometry.rows <= FEW_ROWS and LONG_ROW < length <= FEW_ROWS_BYTES // element:
        threads = 2 * WARP
        while threads * CLUSTER * THREAD_BYTES < length * element:
            threads *= 2
        share = Share(threads, CLUSTER, online=accumulates_moments(streamed))
    elif length * element > threads * (HELD_BYTES // 2 if once and clusters else HELD_BYTES):
        share = clustered(kernel, layout, geometry, length * element, narrow) if clusters else Share(MOST_THREADS)
    needed = -(-length // (share.threads * share.cluster * vector))
    unroll = next((step for step in STEPS if step >= needed), needed) if share.cluster == 1 else needed
    if unroll * vector * element > share.held + vector * element:
        return RowSchedule(BLOCK_THREADS, 1, 1, vector, 4, False, 0, layout.wide, online=True)
    steps = length // (share.threads * share.cluster * vector)
    whole = steps if steps >= unroll - 1 else 0
    schedule = RowSchedule(
        share.threads,
        rows,
        share.cluster,
        vector,
        unroll,
        True,
        whole,
        layout.wide,
        # Of wide elements moments take registers that long rows of a block have not.
        online=share.online
        or (share.cluster == 1 and accumulates_moments(streamed) and (narrow or unroll * vector < FEW_ELEMENTS)),
        shared_vectors=unroll - REGISTER_VECTORS if share.shared else 0,
    )
    # Long rows: on Hopper ptxas keeps them within half a multiprocessor's registers, elsewhere it would spill.
    roomy = unroll * vector <= FEW_ELEMENTS or target.capability == 90
    schedule = replace(schedule, turns=_turns(schedule, geometry, element))
    schedule = replace(schedule, blocks=max(1, share.resident // schedule.block_threads) if roomy else 1)
    return _with_late(kernel, layout, geometry, target, _fetched(kernel, layout, geometry, schedule))


def _with_late(
    kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target, schedule: RowSchedule
) -> RowSchedule:
    """``schedule`` with how what only a later pass than the first needs comes."""
    (body,) = kernel.bodies
    late = late_operands(body)
    if not schedule.kept or schedule.turns > 1 or schedule.shared_vectors or not late:
        return schedule
    common = late_common(kernel, layout)
    if schedule.cluster == PAIR:
        # All of them or none: vectors that lie in shared memory are not asked for, of any operand.
        whole = all(item_size(body.operands[index].dtype) * schedule.vector == ACCESS_BYTES for index in common)
        sent = PAIR * schedule.threads // WARP * sum(state_bytes(online(kernel), layout.wide))
        room = (target.shared_bytes - BARRIER_BYTES - sent) // ACCESS_BYTES
        vectors = min(schedule.unroll, room // schedule.threads // len(late))
        if common == late and whole and vectors:
            schedule = replace(schedule, staged=Staged(common, vectors))
    elif schedule.cluster == 1 and len(late) == 1 and schedule.unroll <= EARLY_VECTORS:
        large = schedule.threads >= BLOCK_THREADS
        schedule = replace(schedule, early=large or geometry.length <= FEW_TURNS)
    size = max((item_size(body.operands[index].dtype) for index in common), default=0)
    if schedule.prefetch and size * geometry.length <= BEYOND_CACHE_BYTES:
        schedule = replace(schedule, prefetch=replace(schedule.prefetch, common=common))
    return schedule


def _fetched(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, schedule: RowSchedule) -> RowSchedule:
    """``schedule`` with how a kept row is read. What is fastest was measured on an H200.

    Blocks can prefetch where they start while the kernel ahead still runs. A block alone would prefetch when it can as
    well read. Of rows in clusters that are not many, some are prefetched and some not (``STAGGER_BYTES``); of more,
    those of 16-bit elements where blocks share a multiprocessor.
    """
    (body,) = kernel.bodies
    own = own_operands(kernel, layout)
    sizes = [item_size(body.operands[index].dtype) for index in own]
    if not own or not schedule.kept or schedule.turns > 1 or not has_whole_accesses(kernel, layout, own):
        return schedule
    if schedule.tile * schedule.cluster * max(sizes) < PREFETCHED_BYTES:
        return schedule
    narrow = schedule.blocks > 1 and max(sizes) <= NARROW_BYTES
    if schedule.cluster == 1 or (narrow and geometry.rows > BUSY_ROWS):
        return replace(schedule, prefetch=Prefetch(own))
    if geometry.rows > BUSY_ROWS:
        return replace(schedule, once=max(sizes) > NARROW_BYTES)
    if schedule.cluster == PAIR:
        return replace(schedule, prefetch=Prefetch(own, every=-(-geometry.rows // PAIR_ROWS)), once=True)
    again = schedule.blocks > 1 and len(own) == 1 and reductions(kernel) > 1
    once = not (narrow or schedule.shared_vectors or again)
    # Of wide elements no second operand: more at once was slower.
    some = tuple(index for index, size in zip(own, sizes, strict=True) if index == own[0] or size <= NARROW_BYTES)
    count = max(1, STAGGER_BYTES // (max(geometry.length, 1) * sum(sizes)))
    return replace(schedule, prefetch=Prefetch(some, count), once=once)


def _turns(schedule: RowSchedule, geometry: RowGeometry, element: int) -> int:
    """Rows a thread takes where there are many short ones, which no barrier divides: as many as make ``TURN_BYTES``."""
    if schedule.threads > WARP or geometry.rows <= MANY_ROWS:
        return 1
    return max(1, min(MOST_TURNS, TURN_BYTES // (schedule.vector * schedule.unroll * element)))


def _read_once(layout: RowLayout, geometry: RowGeometry, sizes: Sequence[int], vector: int) -> RowSchedule:
    """A block for each row, which keeps nothing: larger where rows are long or not so many."""
    threads = ONCE_THREADS * (1 + (geometry.rows <= ENOUGH_ROWS)) * (1 + (geometry.length > ONCE_LENGTH))
    resident = MOST_RESIDENT_THREADS if max(sizes) < DOUBLE_BYTES and sum(sizes) <= ACCESS_BYTES else RESIDENT_THREADS
    unroll = max(1, min(ONCE_ELEMENTS, THREAD_BYTES // sum(sizes)) // vector)
    return RowSchedule(threads, 1, 1, vector, unroll, False, 0, layout.wide, resident // threads, online=True)


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """Neighbouring elements of neighbouring rows: a thread takes as many rows as one access moves elements of.

    As many threads side by side as read a line of the cache, and as many below one another as the rows are long.
    """
    (body,) = kernel.bodies
    length, size, again = max(geometry.length, 1), walked_size(kernel, layout), passes(kernel) > 1
    states = state_bytes(online(kernel), layout.wide)
    beside = max(1, min(layout.beside_unit, ACCESS_BYTES // size))
    while beside > 1 and beside * sum(states) > MOST_STATE_BYTES:
        beside //= 2
    held = COLUMN_UNROLL
    if again:
        held = max(1, min(held, HELD_BYTES // (beside * residency(body, None).bytes)))
    lanes = max(1, min(WARP, LINE_BYTES // (beside * size)))
    threads, cluster = 1, 1
    while threads * lanes < COLUMN_THREADS and threads * held < length:
        threads *= 2
    few = geometry.rows <= MANY_COLUMNS or again
    while target.capability >= 90 and few and cluster < CLUSTER and cluster * threads * held < length:
        cluster *= 2
    while again and threads * lanes < MOST_THREADS and cluster * threads * held < length:
        threads *= 2
    while cluster > 1 and _shared_bytes(states, threads, lanes, beside, cluster) > SHARED_BYTES:
        cluster //= 2
    while threads > 1 and _shared_bytes(states, threads, lanes, beside, cluster) > SHARED_BYTES:
        threads //= 2
    lanes = max(lanes, SHORT_BLOCK_THREADS // threads)
    needed = -(-length // (threads * cluster))
    if again and needed <= held:
        steps = length // (threads * cluster)
        whole = steps if steps >= needed - 1 else 0
        found = RowSchedule(threads, lanes * beside, cluster, 1, needed, True, whole, layout.wide, beside=beside)
    else:
        threads = min(threads, max(1, COLUMN_THREADS // lanes))
        if geometry.rows > MANY_COLUMNS:
            cluster = 1
        unroll = min(COLUMN_UNROLL, -(-length // (threads * cluster)))
        found = RowSchedule(
            threads, lanes * beside, cluster, 1, unroll, False, 0, layout.wide, online=again, beside=beside
        )
    crowded = found.online or beside * sum(state_bytes(kernel, False)) > STATE_BYTES
    resident = RESIDENT_THREADS // 2 if crowded else RESIDENT_THREADS
    return replace(found, blocks=max(1, resident // found.block_threads))


def _shared_bytes(states: Sequence[int], threads: int, lanes: int, beside: int, cluster: int) -> int:
    """Of a block of columns: what its warps combine by turns, and what other blocks send."""
    lanes = max(lanes, SHORT_BLOCK_THREADS // threads)
    groups = threads * lanes // max(lanes, WARP) + 1
    sent = cluster * sum(states) if cluster > 1 else 0
    return lanes * beside * (groups * max(states, default=0) + sent)
