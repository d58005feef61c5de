"""Schedules row kernels in Triton.

A program holds a block of ``rows_per_block`` rows by ``tile`` elements, both powers of two, in registers. Triton itself
spreads the block over the threads, so ``threads`` only says how many of them there are for each row. AMD's wavefronts
are twice as wide as NVIDIA's warps, and so are the programs for them.
"""

from __future__ import annotations

from jitgen.device import Device
from jitgen.families.rows.reduction.forms import TritonRows
from jitgen.families.rows.reduction.online import online
from jitgen.families.rows.reduction.residency import passes
from jitgen.families.rows.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    COLUMN_THREADS,
    FULL_THREAD_BYTES,
    LATENCY_BYTES,
    LINE_BYTES,
    MAX_BLOCK_THREADS,
    NARROW_BYTES,
    SHORT_BLOCK_THREADS,
    THREAD_BYTES,
    occupancy,
    row_item_size,
)
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size, power_of_two
from jitgen.kernel.rows import RowGeometry, RowLayout

BLOCK_ELEMENTS = 32
"""Elements of a block that a thread holds: fewer than in a kernel with loops of its own, because Triton keeps more
registers for other values. Half as many where an element takes two registers, or an access (hence an address) of its
own."""
SINGLE_WARP_ROW = 1024
"""Elements of a row up to which a program of one or two warps can have it to itself."""
ONE_WARP_ROW = 256
"""Elements of a row up to which one warp is enough for that."""
STREAMED_ELEMENTS = 8
"""Elements of a thread in flight where there are many rows and one online pass computes all results."""
COLUMN_ELEMENTS = 64
"""Elements of columns that a thread keeps; a quarter of that where it has a single column."""
SHARED_COLUMN_ELEMENTS = 64
"""Elements of a short column for each thread that shares it."""


def rows(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> tuple[TritonRows]:
    """Schedules rows of neighbouring elements."""
    (body,) = kernel.bodies
    half = occupancy(device.model).half
    length = max(geometry.length, 1)
    sizes = [item_size(o.dtype) for o in body.operands if o.buffer is not None and not o.row] or [4]
    double = any(i.dtype in ("float64", "int64") and not i.row for i in body.instructions)
    single = layout.unit == 1 or "strided" in layout.along
    limit = BLOCK_ELEMENTS // 2 if double or single else BLOCK_ELEMENTS
    padded = power_of_two(length)
    program_threads, aim = _short_rows(kernel, padded, max(sizes), single)
    aim = min(aim, limit) if double else aim
    limit, rows_per_block, threads = max(limit, aim), program_threads, 1
    while threads * rows_per_block < BLOCK_THREADS and threads * aim < padded:
        threads *= 2
        rows_per_block = max(1, program_threads // threads)
    most = BLOCK_THREADS if device.target.kind == "hip" else MAX_BLOCK_THREADS
    least_passes = passes(kernel if padded <= threads * limit else online(kernel))
    alone = padded == most * limit and rows_per_block == 1 and max(sizes) > NARROW_BYTES
    if alone and (least_passes > 1 or passes(kernel) == 1):
        threads = most
    resident, is_online = padded <= threads * limit, False
    if not resident:
        # Each pass reads the row again, from the second-level cache as long as few bytes are in flight: one access for
        # each thread, or several where there are fewer rows than multiprocessors. Online accumulation saves passes but
        # takes registers and arithmetic, so it pays only where that cache does not hold the rows in flight.
        beyond_cache = length * max(sizes) >= BEYOND_CACHE_BYTES
        is_online = least_passes < passes(kernel) and (least_passes == 1 or beyond_cache)
        accesses = (2 if is_online else 4) if rows_per_block == 1 and device.rows(geometry.rows) <= half else 1
        aim = min(aim, accesses * ACCESS_BYTES // max(sizes))
        if rows_per_block == 1:
            threads = most // 2 if is_online else most
        if is_online and least_passes == 1 and device.rows(geometry.rows) > half:
            threads, aim = most // 4, min(limit, STREAMED_ELEMENTS)
    tile = padded if resident else threads * aim
    vector = max(1, min(layout.unit, ACCESS_BYTES // max(sizes), tile // threads))
    unroll = max(1, tile // (threads * vector))
    schedule = TritonRows(
        threads=threads,
        rows_per_block=rows_per_block,
        vector=vector,
        unroll=unroll,
        resident=resident,
        unmasked_vectors=unroll if geometry.length > 0 and length % tile == 0 else 0,
        wide=layout.wide,
        online=is_online,
    )
    return (schedule,)


def _short_rows(kernel: Kernel, padded: int, size: int, single: bool) -> tuple[int, int]:
    """Returns the threads of a program of short rows, and the elements that each of them aims at.

    Args:
        padded: elements of a row, rounded up to a power of two.
        size: bytes of the widest element.
        single: whether each access moves one element, so that a warp reads 32 of a row at a time; then Triton gives
            longer rows several warps.

    A program of one warp has all of each of its rows and combines it by shuffles, which is up to twice as fast.
    """
    (body,) = kernel.bodies
    one_pass = passes(kernel) == 1
    if single and padded <= SINGLE_WARP_ROW:
        if one_pass:
            return (WARP if padded <= ONE_WARP_ROW else 2 * WARP), 2 * BLOCK_ELEMENTS
        return (2 * WARP, BLOCK_ELEMENTS // 2) if size <= NARROW_BYTES else (WARP, BLOCK_ELEMENTS)
    finds_index = any(i.op == "reduce" and i.attr.startswith("arg") for i in body.instructions)
    if one_pass and finds_index and ONE_WARP_ROW <= padded <= SINGLE_WARP_ROW:
        return WARP, 2 * BLOCK_ELEMENTS
    aim = min(BLOCK_ELEMENTS // 2 if single else BLOCK_ELEMENTS, THREAD_BYTES // size)
    return SHORT_BLOCK_THREADS, aim // 2 if padded * size <= LATENCY_BYTES and not one_pass else aim


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> tuple[TritonRows]:
    """Schedules rows whose elements are neighbours across rows: a program has those of one cache line.

    It has more of them where rows are short, so that few threads combine each.
    """
    length, size, several_passes = max(geometry.length, 1), row_item_size(kernel, layout), passes(kernel) > 1
    padded, program_threads = power_of_two(length), SHORT_BLOCK_THREADS
    rows_per_thread = max(1, min(layout.unit, ACCESS_BYTES // size))
    limit = COLUMN_ELEMENTS if rows_per_thread > 1 else COLUMN_ELEMENTS // 4
    aim = limit // 2 if several_passes else rows_per_thread * SHARED_COLUMN_ELEMENTS
    line = LINE_BYTES // size
    rows_per_block = min(max(line, program_threads * aim // padded), program_threads * rows_per_thread)
    while (
        several_passes and program_threads < COLUMN_THREADS // 2 and padded * rows_per_block > program_threads * limit
    ):
        program_threads *= 2
    if several_passes and padded * rows_per_block > program_threads * limit and size <= NARROW_BYTES:
        rows_per_block //= 2
    resident = several_passes and padded * rows_per_block <= program_threads * limit
    tile = padded
    if not resident:
        rows_per_block = max(rows_per_block, line)
        program_threads = BLOCK_THREADS if several_passes else program_threads
        thread_bytes = THREAD_BYTES if several_passes else FULL_THREAD_BYTES
        tile = min(padded, program_threads * min(limit, thread_bytes // size) // rows_per_block)
    rows_per_thread = min(rows_per_thread, rows_per_block)
    threads = program_threads * rows_per_thread // rows_per_block
    unroll = tile // threads
    schedule = TritonRows(
        threads=threads,
        rows_per_block=rows_per_block,
        unroll=unroll,
        resident=resident,
        unmasked_vectors=unroll if geometry.length > 0 and length % tile == 0 else 0,
        wide=layout.wide,
        online=several_passes and not resident,
        rows_per_thread=rows_per_thread,
    )
    return (schedule,)
