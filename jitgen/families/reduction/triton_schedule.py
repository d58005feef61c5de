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
    WARP,
    RowSchedule,
    walked_size,
)
from jitgen.ir.program import Kernel
from jitgen.spec import Target

HELD_IN_BLOCK = 32
"""Elements of a Triton block a thread holds: Triton keeps more beside them than a kernel with its own loops does. Half
as many where they take two registers, or each takes an access, hence an address, of its own."""
SINGLE_ROW, FEW_SINGLE = 1024, 256
"""Elements of a row up to which a warp or two can have it to themselves; up to which one is enough."""
ONCE_ELEMENTS = 8
"""Of a thread, where many rows are read but once."""
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
    single = layout.unit == 1 or "strided" in layout.operands
    held = HELD_IN_BLOCK // 2 if double or single else HELD_IN_BLOCK
    padded = 1 << (length - 1).bit_length()
    block, aim = _short(kernel, padded, max(sizes), single)
    aim = min(aim, held) if double else aim
    held, rows, threads = max(held, aim), block, 1
    while threads * rows < BLOCK_THREADS and threads * aim < padded:
        threads *= 2
        rows = max(1, block // threads)
    most = BLOCK_THREADS if target.kind == "hip" else MOST_THREADS
    fewer = passes(kernel if padded <= threads * held else online(kernel))
    if padded == most * held and rows == 1 and max(sizes) > NARROW_BYTES and (fewer > 1 or passes(kernel) == 1):
        threads = most
    kept, walks_less = padded <= threads * held, False
    if not kept:
        # Read again by each pass, from the second-level cache while few bytes are under way: an access for each thread,
        # or several where there are fewer rows than multiprocessors.
        # A pass less takes registers and arithmetic: it pays where that cache does not hold the rows under way.
        walks_less = fewer < passes(kernel) and (fewer == 1 or length * max(sizes) >= BEYOND_CACHE_BYTES)
        accesses = (2 if walks_less else 4) if rows == 1 and geometry.rows <= FEW_ROWS else 1
        aim = min(aim, accesses * ACCESS_BYTES // max(sizes))
        if rows == 1:
            threads = most // 2 if walks_less else most
        if walks_less and fewer == 1 and geometry.rows > FEW_ROWS:
            threads, aim = most // 4, min(held, ONCE_ELEMENTS)
    tile = padded if kept else threads * aim
    vector = max(1, min(layout.unit, ACCESS_BYTES // max(sizes), tile // threads))
    unroll = max(1, tile // (threads * vector))
    whole = unroll if geometry.length > 0 and length % tile == 0 else 0
    return RowSchedule(threads, rows, 1, vector, unroll, kept, whole, layout.wide, online=walks_less)


def _short(kernel: Kernel, padded: int, size: int, single: bool) -> tuple[int, int]:
    """Threads of a program of short rows, ``padded`` to a power of two, and the elements each aims at.

    ``single``: each access moves one element, so that a warp reads 32 of a row, and Triton gives longer rows several.
    Where one warp is the program it has all of each row and combines it by shuffles, which is up to twice as fast.
    """
    (body,) = kernel.bodies
    once = passes(kernel) == 1
    if single and padded <= SINGLE_ROW:
        if once:
            return (WARP if padded <= FEW_SINGLE else 2 * WARP), 2 * HELD_IN_BLOCK
        return (2 * WARP, HELD_IN_BLOCK // 2) if size <= NARROW_BYTES else (WARP, HELD_IN_BLOCK)
    places = any(i.op == "reduce" and i.attr.startswith("arg") for i in body.instructions)
    if once and places and FEW_SINGLE <= padded <= SINGLE_ROW:
        return WARP, 2 * HELD_IN_BLOCK
    aim = min(HELD_IN_BLOCK // 2 if single else HELD_IN_BLOCK, THREAD_BYTES // size)
    return SHORT_BLOCK_THREADS, aim // 2 if padded * size <= SHORT_ROW_BYTES and not once else aim


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
