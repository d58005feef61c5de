"""How a Triton program walks its rows, and how it walks columns."""

from __future__ import annotations

from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.online import online
from jitgen.families.reduction.residency import passes
from jitgen.families.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    COLUMN_THREADS,
    FEW_ROWS,
    HELD_BYTES,
    LINE_BYTES,
    MOST_THREADS,
    NARROW_BYTES,
    SHORT_BLOCK_THREADS,
    SHORT_ROW_BYTES,
    THREAD_BYTES,
    RowSchedule,
    walked_size,
)
from jitgen.ir.program import Kernel
from jitgen.spec import Target

HELD_IN_BLOCK = 32
"""Elements of a Triton block a thread holds: Triton keeps more beside them than a kernel with its own loops does. Half
as many where they take two registers, or each takes an access, hence an address, of its own."""
HELD_BESIDE, SHARED_COLUMN = 64, 64
"""Elements a thread of a Triton program keeps of columns; elements of a short column for each thread that shares it."""


def rows(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
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


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, target: Target) -> RowSchedule:
    """The schedule of a Triton program for neighbouring elements of neighbouring rows, those of a line of the cache.

    Of short rows it takes more, so that they are combined by few threads each.
    """
    length, size, again = max(geometry.length, 1), walked_size(kernel, layout), passes(kernel) > 1
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
