"""How a row kernel walks its rows: pure functions from layout, row length and target to numbers.

On a GPU a row belongs to ``threads`` threads of a block (a block may hold several rows), or to a cluster of blocks when
it is long. A thread keeps ``unroll`` vectors of ``vector`` elements in registers from pass to pass (QuACK's row kernels
do so, with clusters for the longest). A kernel of one pass keeps nothing, and a row too long for a cluster's registers
is read again by each pass: both *loop* over the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jitgen.families.layout import ACCESS_BYTES, CPU_LANES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.online import DEVIATIONS, SUM_EXP, online
from jitgen.families.reduction.residency import EXPENSIVE_FLOPS, FEW_ELEMENTS, late_loads, passes, residency
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.spec import Target

BLOCK_THREADS = 512
SHORT_BLOCK_THREADS = 128
THREAD_BYTES = 64
"""Bytes of the widest operand a thread aims to hold: a few accesses in flight, before more threads are added."""
FEW_ACCESSES = 4
"""What a thread of a short row aims at instead where accesses are narrow: the threads of a warp read side by side."""
HELD_BYTES = 128
"""Bytes of its row a thread holds before a block of more threads is better; half as many before a cluster is, where a
row is combined but once."""
MOST_HELD_BYTES = 160
"""Bytes a thread can hold beside what it computes with, of 1024 on a multiprocessor; measured on an H200."""
SHORT_ROW_BYTES, SHORT_ROW = 4096, 4096
"""Rows up to so many bytes have twice the threads, for most of their time is latency, not transfer; where a row is
combined but once before it is stored, rows of up to so many elements."""
LATE_OPERANDS, LATE_RESIDENT_THREADS = 2, 512
"""Operands that only a later pass needs, from which on a cluster has half the threads, with twice the registers each:
room to ask for such operands ahead (LayerNorm of rows of 151936 in float32 is 8 % faster on an H200)."""
WARP = 32
RESIDENT_THREADS = 1024
"""Threads of a multiprocessor the registers should suffice for: with fewer, no row loads while another computes."""
MOST_THREADS = 1024
"""Threads of a block that has a multiprocessor to itself: what a row is read once for, where there are no clusters."""
HELD_IN_BLOCK = 32
"""Elements of a Triton block a thread holds: Triton keeps more beside them than a kernel with its own loops does. Half
as many where they take two registers, or each takes an access, hence an address, of its own."""
CLUSTER, LEAST_THREADS = 8, 128
"""Blocks of a row too long for one. Small blocks of different rows share a multiprocessor, so that one row is loaded
while others are combined or stored: in one block of 1024 threads such a row takes 2 to 8 % longer on an H200."""
NARROW_BYTES = 2
"""Elements up to so many bytes are computed with in more registers than they are kept in."""
PAIR = 2
"""Blocks of a row where each has a multiprocessor to itself. An H200 holds 66 such clusters, but only 62 of 8 blocks
with a quarter of a multiprocessor each: 8 of its 132 multiprocessors are in no cluster of more than two."""
PAIR_BYTES = PAIR * MOST_THREADS * MOST_HELD_BYTES
SOME_ROWS, FEW_ROWS = 32, 64
"""A block for each of ``FEW_ROWS`` or less leaves half of an H200 idle, two for each of ``SOME_ROWS`` or less too."""
MANY_ROWS, MOST_TURNS, TURN_BYTES = 2**16, 4, 64
"""Short rows from which on a thread takes several; at most how many, and how many bytes of them."""
FEW_TURNS = 1024
"""Elements from which on no row is short in that sense, or hardly one."""
LONG_ROW = 4096
"""Elements up to which schedules are the same however few rows there are, whatever an element takes."""
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)
BEYOND_CACHE_BYTES = 2**17
"""Bytes of a row from which on the rows under way in Triton do not stay in the second-level cache from pass to pass."""
LINE_BYTES = 128
"""Of neighbouring rows' elements that a block of columns reads at least, where they are aligned."""
COLUMN_THREADS = 512
"""Of a block of columns, before a cluster of blocks is better."""
COLUMN_UNROLL = 8
"""Accesses of a thread under way at once: on an H200 four are slower, sixteen no faster."""
STATE_BYTES, MOST_STATE_BYTES = 80, 256
"""Accumulated by a thread beside the accesses under way, from which on half as many threads fit a multiprocessor, and
from which on it takes fewer rows."""
SHARED_BYTES = 40 * 1024
"""Of shared memory for columns' results: all that a block has without asking is 48 KiB."""
MANY_COLUMNS = 16384
"""Columns from which on blocks are enough without clusters."""
HELD_BESIDE, SHARED_COLUMN = 64, 64
"""Elements a thread of a Triton program keeps of columns; elements of a short column for each thread that shares it."""

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
    pdl: ClassVar[bool] = True
    """A GPU's sources are made for programmatic dependent launch (see ``gemm/schedule.py``)."""

    @property
    def block_threads(self) -> int:
        return self.threads * self.lanes

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
    if backend == "triton":
        walk = _blocked_columns if layout.columns else _blocked
    else:
        walk = _columns if layout.columns else _threaded
    return walk(kernel, layout, geometry, target)


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
    return () if length <= LONG_ROW else (SOME_ROWS, FEW_ROWS)


def _threaded(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
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
    share = _Share(threads)
    clusters = target.capability >= 90
    if length * element > threads * (HELD_BYTES // 2 if once and clusters else HELD_BYTES):
        share = _clustered(kernel, layout, geometry, length * element, narrow) if clusters else _Share(MOST_THREADS)
    needed = -(-length // (share.threads * share.cluster * vector))
    unroll = next((step for step in STEPS if step >= needed), needed) if share.cluster == 1 else needed
    if unroll * vector * element > share.held + vector * element:
        return RowSchedule(BLOCK_THREADS, 1, 1, vector, 4, False, 0, layout.wide, online=True)
    steps = length // (share.threads * share.cluster * vector)
    whole = steps if steps >= unroll - 1 else 0
    schedule = RowSchedule(
        share.threads, rows, share.cluster, vector, unroll, True, whole, layout.wide, online=share.online
    )
    # Long rows: on Hopper ptxas keeps them within half a multiprocessor's registers, elsewhere it would spill.
    roomy = unroll * vector <= FEW_ELEMENTS or target.capability == 90
    schedule = replace(schedule, turns=_turns(schedule, geometry, element))
    return replace(schedule, blocks=max(1, share.resident // schedule.block_threads) if roomy else 1)


def _turns(schedule: RowSchedule, geometry: RowGeometry, element: int) -> int:
    """Rows a thread takes where there are many short ones, which no barrier divides: as many as make ``TURN_BYTES``."""
    if schedule.threads > WARP or geometry.rows < MANY_ROWS:
        return 1
    return max(1, min(MOST_TURNS, TURN_BYTES // (schedule.vector * schedule.unroll * element)))


@dataclass(frozen=True)
class _Share:
    """Who holds a row: ``threads`` of each of ``cluster`` blocks, each at most ``held`` bytes of it.

    ``resident``: threads of a multiprocessor, which share its registers; ``online``: see ``RowSchedule``.
    """

    threads: int
    cluster: int = 1
    resident: int = RESIDENT_THREADS
    held: int = MOST_HELD_BYTES
    online: bool = False


def _clustered(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, size: int, narrow: bool) -> _Share:
    """Of a row of ``size`` bytes: small blocks of several rows on a multiprocessor; of few rows, all of it for one.

    Blocks wait long for one another, and one pass less saves such a wait. It is worth its arithmetic where that takes
    no exponentials and elements have 16 bits, or where nothing else has the multiprocessor meanwhile.
    """
    (body,) = kernel.bodies
    streamed = online(kernel, layout)
    (rewritten,) = streamed.bodies
    saves = passes(streamed) > 1 and narrow
    costly = any(i.op in OPS and OPS[i.op].flops >= EXPENSIVE_FLOPS and not i.row for i in rewritten.instructions)
    few = SOME_ROWS < geometry.rows <= FEW_ROWS and BEYOND_CACHE_BYTES < size <= PAIR_BYTES
    if saves and few and not costly:
        return _Share(MOST_THREADS, PAIR, online=True)
    saves = saves and any((i.op, i.attr) == ("reduce", DEVIATIONS) for i in rewritten.instructions)
    threads = BLOCK_THREADS
    while threads > LEAST_THREADS and size <= threads // 2 * CLUSTER * MOST_HELD_BYTES:
        threads //= 2
    if threads > LEAST_THREADS and late_loads(body) >= LATE_OPERANDS:
        return _Share(threads // 2, CLUSTER, LATE_RESIDENT_THREADS, 2 * MOST_HELD_BYTES, saves)
    return _Share(threads, CLUSTER, online=saves)


def _columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """Neighbouring elements of neighbouring rows: a thread takes as many rows as one access moves elements of.

    As many threads side by side as read a line of the cache, and as many below one another as the rows are long.
    """
    (body,) = kernel.bodies
    length, size, again = max(geometry.length, 1), _walked_size(kernel, layout), passes(kernel) > 1
    states = _states(online(kernel, layout), layout.wide)
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


def _blocked_columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """The schedule of a Triton program for neighbouring elements of neighbouring rows, those of a line of the cache.

    Of short rows it takes more, so that they are combined by few threads each.
    """
    length, size, again = max(geometry.length, 1), _walked_size(kernel, layout), passes(kernel) > 1
    padded, block = 1 << (length - 1).bit_length(), SHORT_BLOCK_THREADS
    beside = max(1, min(layout.beside_unit, ACCESS_BYTES // size))
    held = HELD_BESIDE if beside > 1 else HELD_BESIDE // 4
    each = held // 2 if again else beside * SHARED_COLUMN
    line = LINE_BYTES // size
    rows = min(max(line, block * each // padded), block * beside)
    while again and block < COLUMN_THREADS // 2 and padded * rows > block * held:
        block *= 2
    if again and padded * rows > block * held and size <= NARROW_BYTES:
        rows //= 2
    kept = again and padded * rows <= block * held
    tile = padded
    if not kept:
        rows, block = max(rows, line), BLOCK_THREADS if again else block
        tile = min(padded, block * min(held, (THREAD_BYTES if again else HELD_BYTES) // size) // rows)
    beside = min(beside, rows)
    threads = block * beside // rows
    unroll = tile // threads
    whole = unroll if geometry.length > 0 and length % tile == 0 else 0
    return RowSchedule(threads, rows, 1, 1, unroll, kept, whole, layout.wide, online=again and not kept, beside=beside)


def _walked_size(kernel: Kernel, layout: RowLayout) -> int:
    """Bytes of the widest element of an operand that varies along the row."""
    (body,) = kernel.bodies
    walked = [o for o, kind in zip(body.operands, layout.operands, strict=True) if kind not in ("row", "broadcast")]
    return max((item_size(o.dtype) for o in walked if o.buffer is not None), default=4)


def _blocked(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """The schedule of a Triton program: a block of ``rows`` by ``tile`` elements, both powers of two, in registers.

    Triton itself spreads the block over the threads, so ``threads`` only says how many there are for a row. AMD's
    warps are twice as wide, and so are its blocks.
    """
    (body,) = kernel.bodies
    length = max(geometry.length, 1)
    sizes = [item_size(o.dtype) for o in body.operands if o.buffer is not None and not o.row] or [4]
    double = any(i.dtype in ("float64", "int64") and not i.row for i in body.instructions)
    single = layout.unit * max(sizes) < ACCESS_BYTES or "strided" in layout.operands
    held = HELD_IN_BLOCK // 2 if double or single else HELD_IN_BLOCK
    aim = min(held, THREAD_BYTES // max(sizes))
    padded = 1 << (length - 1).bit_length()
    rows, threads = SHORT_BLOCK_THREADS, 1
    if padded * max(sizes) <= SHORT_ROW_BYTES:
        aim = max(1, aim // 2)
    while threads * rows < BLOCK_THREADS and threads * aim < padded:
        threads *= 2
        rows = max(1, SHORT_BLOCK_THREADS // threads)
    most = BLOCK_THREADS if target.kind == "hip" else MOST_THREADS
    if padded == most * held and rows == 1 and max(sizes) > 2:
        threads = most
    kept, walks_less = padded <= threads * held, False
    if not kept:
        # Read again by each pass, from the second-level cache while few bytes are under way: an access for each thread,
        # or several where there are fewer rows than multiprocessors.
        # A pass less takes registers and arithmetic: it pays where that cache does not hold the rows under way.
        fewer = passes(online(kernel, layout))
        walks_less = fewer < passes(kernel) and (fewer == 1 or length * max(sizes) >= BEYOND_CACHE_BYTES)
        accesses = (2 if walks_less else 4) if rows == 1 and geometry.rows <= FEW_ROWS else 1
        aim = min(aim, accesses * ACCESS_BYTES // max(sizes))
        if rows == 1:
            threads = most // 2 if walks_less else most
    tile = padded if kept else threads * aim
    vector = max(1, min(layout.unit, ACCESS_BYTES // max(sizes), tile // threads))
    unroll = max(1, tile // (threads * vector))
    whole = unroll if geometry.length > 0 and length % tile == 0 else 0
    return RowSchedule(threads, rows, 1, vector, unroll, kept, whole, layout.wide, online=walks_less)
