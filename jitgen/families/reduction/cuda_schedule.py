"""How a row kernel in CUDA C++ walks its rows, and how it walks columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.online import DEVIATIONS, SUM_EXP, online
from jitgen.families.reduction.residency import (
    EXPENSIVE_FLOPS,
    FEW_ELEMENTS,
    REGISTER_BYTES,
    first_needed,
    late_loads,
    passes,
    residency,
)
from jitgen.families.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    BUSY_ROWS,
    CLUSTER,
    CLUSTERS,
    COLUMN_THREADS,
    ENOUGH_ROWS,
    FEW_ROWS,
    HELD_BYTES,
    LEAST_THREADS,
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
    SOME_ROWS,
    THREAD_BYTES,
    TURN_BYTES,
    WARP,
    Persistent,
    Prefetch,
    RowSchedule,
    walked_size,
)
from jitgen.ir.ops import OPS
from jitgen.ir.parts import SPLIT_ROWS
from jitgen.ir.program import Kernel
from jitgen.spec import Target

FEW_ACCESSES = 4
"""What a thread of a short row aims at instead where accesses are narrow: the threads of a warp read side by side."""
MOST_HELD_BYTES = 160
"""Bytes a thread can hold beside what it computes with, of 1024 on a multiprocessor; measured on an H200."""
LATE_OPERANDS, LATE_RESIDENT_THREADS = 2, 512
"""Operands that only a later pass needs, from which on a cluster has half the threads, with twice the registers each:
room to ask for such operands ahead (LayerNorm of rows of 151936 in float32 is 8 % faster on an H200)."""
PAIR = 2
"""Blocks of a row where each has a multiprocessor to itself. An H200 holds 66 such clusters, but only 62 of 8 blocks
with a quarter of a multiprocessor each: 8 of its 132 multiprocessors are in no cluster of more than two."""
PAIR_BYTES = PAIR * MOST_THREADS * MOST_HELD_BYTES
PAIR_EVERY = 3
"""Of rows in such pairs, which are all under way at once, each so-manieth is prefetched, instead of the first of them:
RMSNorm of 64 rows of 98304 in bfloat16 takes 4 % less on an H200, LayerNorm 3 %."""
SEVEN, SEVEN_BYTES, SEVEN_HELD_BYTES = 7, 2**18, 352
"""Blocks of a row that is the sum of two operands, or as much; its bytes from which on, and those that one of 512
threads of a multiprocessor holds. An H200 has 32 such rows under way, with half a multiprocessor for each block, and 30
with 8 blocks."""
PREFETCHED_BYTES = 2048
"""Of a row, from which on it is asked for as a whole before its elements are."""
STAGGER_BYTES = 7 * 2**20
"""Of rows in clusters, from the first, that are prefetched where there are up to ``BUSY_ROWS``. These rows are stored
while the others are still read, and so on through the kernel: rows that all start alike take turns at leaving the
memory idle (64 rows of 151936 in bfloat16: softmax 0.89 of a copy's speed with all prefetched, 0.95 with 24)."""
REGISTER_VECTORS, SHARED_VECTORS = 8, 11
"""Of a thread, where a part of a row lies in shared memory: so many of 16 bytes in registers, and there at most. So a
multiprocessor has four blocks of 256 threads where, in registers alone, it has two of 512: of 64 rows nearly all are
under way at once (softmax of 151936 in float32: 0.93 of a copy's speed instead of 0.88)."""
COMBINED_BESIDE = 3
"""Reductions at most whose partial results fit the 48 KiB of a block beside that."""
WORD_BYTES = 4
"""Of an element that lies there, or of persistent rows: those of 16-bit elements are shorter in bytes, and what few
blocks do with one row after another takes longer than their transfer."""
PERSISTENT_THREADS, PERSISTENT_REGISTERS = 256, 200
"""Of a block that has a multiprocessor to itself; registers of each thread for the row and for what all rows read."""
BARRIER_BYTES = 1024
"""At least those of such a block's barriers."""
PERSISTENT_SHARES = ((CLUSTER // 2, 20, SOME_ROWS), (CLUSTER, 25, CLUSTERS))
"""Blocks of a cluster; vectors of a thread for a row, at most; rows that have blocks of their own, at most. On an H200
64 rows of 151936 in float32: LayerNorm 0.91 of a copy's speed instead of 0.82, RMSNorm 0.98 instead of 0.90."""
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
    if geometry.rows > BUSY_ROWS and length * max(sizes) >= ONCE_BYTES and passes(online(kernel)) == 1:
        return _read_once(layout, geometry, sizes, vector)
    share = _Share(threads)
    clusters = target.capability >= 90
    if clusters and length >= PERSISTENT_ROW and passes(online(kernel)) > 1:
        persistent = _persistent(kernel, layout, geometry, vector, target.shared_bytes)
        if persistent:
            return persistent
    if clusters and geometry.rows <= FEW_ROWS and LONG_ROW < length <= FEW_ROWS_BYTES // element:
        threads = 2 * WARP
        while threads * CLUSTER * THREAD_BYTES < length * element:
            threads *= 2
        share = _Share(threads, CLUSTER)
    elif length * element > threads * (HELD_BYTES // 2 if once and clusters else HELD_BYTES):
        share = _clustered(kernel, layout, geometry, length * element, narrow) if clusters else _Share(MOST_THREADS)
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
        online=share.online,
        shared_vectors=unroll - REGISTER_VECTORS if share.shared else 0,
    )
    # Long rows: on Hopper ptxas keeps them within half a multiprocessor's registers, elsewhere it would spill.
    roomy = unroll * vector <= FEW_ELEMENTS or target.capability == 90
    schedule = replace(schedule, turns=_turns(schedule, geometry, element))
    schedule = replace(schedule, blocks=max(1, share.resident // schedule.block_threads) if roomy else 1)
    return _fetched(kernel, layout, geometry, schedule)


def _own(kernel: Kernel, layout: RowLayout) -> tuple[int, ...]:
    """The operands with elements of their own for each row that the first pass over it needs."""
    (body,) = kernel.bodies
    first = [body.instructions[position] for position, number in first_needed(body).items() if number == 0]
    loads = {instruction.attr for instruction in first if instruction.op == "load"}
    return tuple(sorted(index for index in loads if not layout.shared[index]))


def _reductions(kernel: Kernel) -> int:
    (body,) = kernel.bodies
    return sum(instruction.op == "reduce" for instruction in body.instructions)


def _whole_accesses(kernel: Kernel, layout: RowLayout, operands: Sequence[int]) -> bool:
    """Whether the elements of each of ``operands`` are neighbours whose every row begins at a multiple of an access."""
    (body,) = kernel.bodies
    if any(layout.operands[index] != "contiguous" for index in operands):
        return False
    return layout.unit * min(item_size(body.operands[index].dtype) for index in operands) >= ACCESS_BYTES


def _fetched(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, schedule: RowSchedule) -> RowSchedule:
    """``schedule`` with how a kept row is read. What is fastest was measured on an H200.

    Blocks can prefetch where they start while the kernel ahead still runs. A block alone would prefetch when it can as
    well read. Of rows in clusters that are not many, some are prefetched and some not (``STAGGER_BYTES``); of more,
    those of 16-bit elements where blocks share a multiprocessor.
    """
    (body,) = kernel.bodies
    own = _own(kernel, layout)
    sizes = [item_size(body.operands[index].dtype) for index in own]
    if not own or not schedule.kept or schedule.turns > 1 or not _whole_accesses(kernel, layout, own):
        return schedule
    if schedule.tile * schedule.cluster * max(sizes) < PREFETCHED_BYTES:
        return schedule
    narrow = schedule.blocks > 1 and max(sizes) <= NARROW_BYTES
    if schedule.cluster == 1 or (narrow and geometry.rows > BUSY_ROWS):
        return replace(schedule, prefetch=Prefetch(own))
    if geometry.rows > BUSY_ROWS:
        return schedule
    if schedule.cluster == PAIR:
        return replace(schedule, prefetch=Prefetch(own, every=PAIR_EVERY), once=True)
    again = schedule.blocks > 1 and len(own) == 1 and _reductions(kernel) > 1
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


@dataclass(frozen=True)
class _Share:
    """Who holds a row: ``threads`` of each of ``cluster`` blocks, each at most ``held`` bytes of it.

    ``resident``: threads of a multiprocessor, which share its registers; ``online``: see ``RowSchedule``; ``shared``:
    whether what is beyond ``REGISTER_VECTORS`` lies in shared memory.
    """

    threads: int
    cluster: int = 1
    resident: int = RESIDENT_THREADS
    held: int = MOST_HELD_BYTES
    online: bool = False
    shared: bool = False


def _clustered(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, size: int, narrow: bool) -> _Share:
    """Of a row of ``size`` bytes: small blocks of several rows on a multiprocessor; of few rows, all of it for one.

    Blocks wait long for one another, and one pass less saves such a wait. It is worth its arithmetic where that takes
    no exponentials and elements have 16 bits, or where nothing else has the multiprocessor meanwhile.
    """
    (body,) = kernel.bodies
    streamed = online(kernel)
    (rewritten,) = streamed.bodies
    saves = passes(streamed) > 1 and narrow
    costly = any(
        (i.op, i.attr) == ("reduce", SUM_EXP) or (i.op in OPS and OPS[i.op].flops >= EXPENSIVE_FLOPS and not i.row)
        for i in rewritten.instructions
    )
    few = SOME_ROWS < geometry.rows <= FEW_ROWS and BEYOND_CACHE_BYTES < size <= PAIR_BYTES
    if saves and few and not costly:
        return _Share(MOST_THREADS, PAIR, online=True)
    saves = saves and any((i.op, i.attr) == ("reduce", DEVIATIONS) for i in rewritten.instructions)
    threads = BLOCK_THREADS
    while threads > LEAST_THREADS and size <= threads // 2 * CLUSTER * MOST_HELD_BYTES:
        threads //= 2
    if len(_own(kernel, layout)) > 1 and size > SEVEN_BYTES:
        half = _Share(threads // 2, SEVEN, LATE_RESIDENT_THREADS, SEVEN_HELD_BYTES, saves)
        seven = _Share(threads, SEVEN, held=SEVEN_HELD_BYTES // 2, online=saves) if narrow else half
        # A warp combines what all warps have sent: as many values as divide it, or more than it has lanes.
        if seven.threads // WARP * SEVEN > WARP and size <= SEVEN * seven.threads * seven.held:
            return seven
    if SPLIT_ROWS < geometry.rows <= BUSY_ROWS and threads == BLOCK_THREADS and _one_word(kernel, layout):
        both = _Share(threads // 2, CLUSTER, held=(REGISTER_VECTORS + SHARED_VECTORS) * ACCESS_BYTES, shared=True)
        if size <= CLUSTER * both.threads * both.held:
            return both
    if threads > LEAST_THREADS and late_loads(body) >= LATE_OPERANDS:
        return _Share(threads // 2, CLUSTER, LATE_RESIDENT_THREADS, 2 * MOST_HELD_BYTES, saves)
    return _Share(threads, CLUSTER, online=saves)


def _one_word(kernel: Kernel, layout: RowLayout) -> bool:
    """Whether one value of four bytes is all that is read and kept of an element, read by whole accesses.

    Such values follow one another in the same place of shared memory. What all rows share would have too few registers
    to be asked for ahead of its use, and many reductions would leave no room.
    """
    (body,) = kernel.bodies
    kept = residency(body, None)
    read = [index for index, operand in enumerate(body.operands) if operand.kind == "load" and not operand.row]
    if _reductions(kernel) > COMBINED_BESIDE or len(read) != 1 or kept.values != 1:
        return False
    if not _whole_accesses(kernel, layout, read):
        return False
    sizes = {item_size(body.instructions[position].dtype) for part in kept.kept for position in part}
    return sizes | {kept.bytes, item_size(body.operands[read[0]].dtype)} == {WORD_BYTES}


def _persistent(
    kernel: Kernel, layout: RowLayout, geometry: RowGeometry, vector: int, limit: int
) -> RowSchedule | None:
    """Clusters that take one long row after another; None where a row has blocks of its own.

    ``limit``: bytes of shared memory a block may ask for.

    A cluster's next row is copied into shared memory while this one is combined and stored, and what all rows read is
    read once for all that a cluster takes. Otherwise each row would bring it from the second-level cache again: the
    first-level cache is emptied wherever a cluster begins.
    """
    (body,) = kernel.bodies
    read = [index for index, operand in enumerate(body.operands) if operand.kind == "load" and not operand.row]
    common = [index for index in read if layout.shared[index]]
    own = _own(kernel, layout)
    words = {item_size(body.operands[index].dtype) for index in read} == {WORD_BYTES}
    first = len(read) == len(own) + len(common)  # no later pass needs more of a row
    if not (own and words and first and vector * WORD_BYTES == ACCESS_BYTES and _whole_accesses(kernel, layout, read)):
        return None
    kept = residency(body, None).bytes // REGISTER_BYTES
    fits = geometry.length * kept * REGISTER_BYTES <= CLUSTER * BLOCK_THREADS * MOST_HELD_BYTES  # by blocks of its own
    if fits and (not common or (geometry.rows > BUSY_ROWS and len(common) < LATE_OPERANDS)):
        return None
    warps = PERSISTENT_THREADS // WARP
    for cluster, most, rows in PERSISTENT_SHARES:
        most_vectors, fewest_vectors = _shared_out(geometry.length, cluster * warps, vector)
        unroll = -(-most_vectors // WARP)
        if unroll > most:
            continue
        room = PERSISTENT_REGISTERS // (unroll * vector) - kept
        parked = max(0, len(common) - room)
        places = PERSISTENT_THREADS * unroll * ACCESS_BYTES
        sent = 2 * cluster * warps * sum(_states(kernel, layout.wide))
        taken = (len(own) + parked) * places
        if geometry.rows <= rows or room < 0 or taken + sent + BARRIER_BYTES > limit:
            return None
        return RowSchedule(
            PERSISTENT_THREADS,
            1,
            cluster,
            vector,
            unroll,
            True,
            fewest_vectors // WARP,
            layout.wide,
            persistent=Persistent(parked, taken),
        )
    return None


def _shared_out(length: int, parts: int, vector: int) -> tuple[int, int]:
    """The most and the fewest vectors of a part where ``parts`` share a row by whole lines, as evenly as may be."""
    unit = LINE_BYTES // ACCESS_BYTES
    lines = -(-length // (unit * vector))
    last = length // vector - ((parts - 1) * (lines // parts) + min(parts - 1, lines % parts)) * unit
    return -(-lines // parts) * unit, min(lines // parts * unit, last)


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """Neighbouring elements of neighbouring rows: a thread takes as many rows as one access moves elements of.

    As many threads side by side as read a line of the cache, and as many below one another as the rows are long.
    """
    (body,) = kernel.bodies
    length, size, again = max(geometry.length, 1), walked_size(kernel, layout), passes(kernel) > 1
    states = _states(online(kernel), layout.wide)
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
    crowded = found.online or beside * sum(_states(kernel, False)) > STATE_BYTES
    resident = RESIDENT_THREADS // 2 if crowded else RESIDENT_THREADS
    return replace(found, blocks=max(1, resident // found.block_threads))


def _states(kernel: Kernel, wide: bool) -> list[int]:
    """Bytes of what each reduction of a row has accumulated, whose places are ``wide`` or not."""
    (body,) = kernel.bodies
    sizes = []
    for instruction in body.instructions:
        if instruction.op == "reduce":
            size = max(4, item_size(body.instructions[instruction.args[0]].dtype))
            numbers = {SUM_EXP: 2, DEVIATIONS: 3}.get(instruction.attr, 1)
            sizes.append(size * numbers + (8 if wide else 4) * instruction.attr.startswith("arg"))
    return sizes


def _shared_bytes(states: Sequence[int], threads: int, lanes: int, beside: int, cluster: int) -> int:
    """Of a block of columns: what its warps combine by turns, and what other blocks send."""
    lanes = max(lanes, SHORT_BLOCK_THREADS // threads)
    groups = threads * lanes // max(lanes, WARP) + 1
    sent = cluster * sum(states) if cluster > 1 else 0
    return lanes * beside * (groups * max(states, default=0) + sent)
