"""Schedules columns in CUDA C++: rows whose elements lie side by side with those of neighbouring rows.

A thread takes as many neighbouring rows as one access moves elements of. Across rows a block has as many threads as
read a line of the cache; along a row as many as the row is long. What was measured was so on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jitgen.device import Device
from jitgen.families.rows.reduction.cuda_problem import state_bytes
from jitgen.families.rows.reduction.forms import ColumnBlocks
from jitgen.families.rows.reduction.online import online
from jitgen.families.rows.reduction.residency import REGISTER_BYTES, passes, residency
from jitgen.families.rows.reduction.schedule import (
    CLUSTER_BLOCKS,
    COLUMN_THREADS,
    FULL_THREAD_BYTES,
    LINE_BYTES,
    MANY_COLUMNS,
    MAX_BLOCK_THREADS,
    MULTIPROCESSOR_THREADS,
    SHORT_BLOCK_THREADS,
)
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size
from jitgen.kernel.rows import RowGeometry, RowLayout

COLUMN_UNROLL = 8
"""Accesses of a thread in flight: four are slower on an H200, sixteen no faster."""
THREAD_BYTES = 176
"""Registers for what a thread accumulates and for its accesses in flight, in bytes, of the 256 bytes that a thread has
where a multiprocessor has ``MULTIPROCESSOR_THREADS``: as much as NVRTC 13.0 leaves without spills. Of one to nine
operands and one to eight accesses, on an H200, what fits was the fastest or at most 7 % behind."""
HALF_BYTES = 256
"""How many more a thread has where half as many threads fit."""
STATE_BYTES = 80
"""Bytes that a thread accumulates in addition to its loads, beyond which half as many threads fit a multiprocessor."""
MAX_STATE_BYTES = 256
"""Bytes that a thread accumulates beyond which it takes fewer rows."""
STATIC_SHARED_BYTES = 40 * 1024
"""Static shared memory for the partial results of columns, in bytes, of the 48 KiB that every block has."""


@dataclass(frozen=True)
class _Block:
    """Describes the shape of a block: ``threads`` of each of ``lanes`` times ``rows_per_thread`` rows, in a ``cluster``
    of blocks."""

    threads: int
    lanes: int
    rows_per_thread: int
    cluster: int

    def shared_bytes(self, states: Sequence[int]) -> int:
        """Counts the shared memory in bytes: what its warps combine for one reduction after another, and what other
        blocks send."""
        lanes = max(self.lanes, SHORT_BLOCK_THREADS // self.threads)
        groups = self.threads * lanes // max(lanes, WARP) + 1
        received = self.cluster * sum(states) if self.cluster > 1 else 0
        return lanes * self.rows_per_thread * (groups * max(states, default=0) + received)


def columns(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, device: Device) -> ColumnBlocks:
    """Schedules rows whose elements are neighbours across rows."""
    (body,) = kernel.bodies
    length, size = max(geometry.length, 1), _item_size_across(body, layout)
    several_passes = passes(kernel) > 1
    states = state_bytes(online(kernel), layout.wide)
    rows_per_thread = max(1, min(layout.unit, ACCESS_BYTES // size))
    while rows_per_thread > 1 and rows_per_thread * sum(states) > MAX_STATE_BYTES:
        rows_per_thread //= 2
    many_states = rows_per_thread * sum(state_bytes(kernel, False)) > STATE_BYTES
    registers = THREAD_BYTES + (several_passes or many_states) * HALF_BYTES - rows_per_thread * sum(states)
    in_flight = max(1, registers // max(1, _loaded_bytes(body, layout, rows_per_thread)))
    per_thread = COLUMN_UNROLL if several_passes else min(COLUMN_UNROLL, in_flight)
    if several_passes:
        element_bytes = rows_per_thread * residency(body, None).bytes_per_element
        per_thread = max(1, min(per_thread, FULL_THREAD_BYTES // element_bytes))
    block = _block(length, per_thread, max(1, min(WARP, LINE_BYTES // (rows_per_thread * size))), rows_per_thread)
    block = _with_enough_threads(block, length, per_thread, geometry.rows, several_passes, device)
    block = _within_shared_memory(block, states)
    block = replace(block, lanes=max(block.lanes, SHORT_BLOCK_THREADS // block.threads))
    needed = -(-length // (block.threads * block.cluster))
    if several_passes and needed <= per_thread:
        blocks = _resident(block, length, needed, layout.wide)
    else:
        blocks = _looping(block, length, geometry.rows, several_passes, layout.wide, in_flight)
    threads = MULTIPROCESSOR_THREADS // 2 if blocks.online or many_states else MULTIPROCESSOR_THREADS
    return replace(blocks, blocks_per_multiprocessor=max(1, threads // blocks.block_threads))


def _accesses(body: Body, layout: RowLayout, rows: int) -> Iterator[tuple[Operand, int]]:
    """Yields the operands that a thread accesses for each element of its ``rows``, and how many elements an access
    has."""
    for operand, along, across in zip(body.operands, layout.along, layout.across, strict=True):
        if along not in ("row", "broadcast") and operand.buffer is not None:
            yield operand, 1 if across == "broadcast" else rows


def _item_size_across(body: Body, layout: RowLayout) -> int:
    """Returns the bytes of the widest element of an operand that has one for each row."""
    return max((item_size(operand.dtype) for operand, count in _accesses(body, layout, 2) if count > 1), default=4)


def _loaded_bytes(body: Body, layout: RowLayout, rows: int) -> int:
    """Counts the registers, in bytes, that one access of each operand that is read takes."""
    loads = [(operand, count) for operand, count in _accesses(body, layout, rows) if operand.kind != "store"]
    return sum(max(count * item_size(operand.dtype), REGISTER_BYTES) for operand, count in loads)


def _block(length: int, per_thread: int, lanes: int, rows_per_thread: int) -> _Block:
    """Returns one block of up to ``COLUMN_THREADS``: enough threads for ``length`` elements, of which each holds
    ``per_thread``."""
    threads = 1
    while threads * lanes < COLUMN_THREADS and threads * per_thread < length:
        threads *= 2
    return _Block(threads, lanes, rows_per_thread, 1)


def _with_enough_threads(
    block: _Block, length: int, per_thread: int, rows: int, several_passes: bool, device: Device
) -> _Block:
    """Puts ``block`` in a cluster if columns are long, and few or needed again; gives it more threads if they then
    still are."""
    threads, cluster = block.threads, block.cluster
    few = rows <= MANY_COLUMNS or several_passes
    while device.has_clusters and few and cluster < CLUSTER_BLOCKS and cluster * threads * per_thread < length:
        cluster *= 2
    while several_passes and threads * block.lanes < MAX_BLOCK_THREADS and cluster * threads * per_thread < length:
        threads *= 2
    return replace(block, threads=threads, cluster=cluster)


def _within_shared_memory(block: _Block, states: Sequence[int]) -> _Block:
    """Takes blocks from the cluster of ``block``, then threads, until its partial results have room."""
    while block.cluster > 1 and block.shared_bytes(states) > STATIC_SHARED_BYTES:
        block = replace(block, cluster=block.cluster // 2)
    while block.threads > 1 and block.shared_bytes(states) > STATIC_SHARED_BYTES:
        block = replace(block, threads=block.threads // 2)
    return block


def _resident(block: _Block, length: int, unroll: int, wide: bool) -> ColumnBlocks:
    """Schedules columns that stay in registers from pass to pass."""
    complete = length // (block.threads * block.cluster)
    return ColumnBlocks(
        threads=block.threads,
        rows_per_block=block.lanes * block.rows_per_thread,
        cluster=block.cluster,
        unroll=unroll,
        resident=True,
        unmasked_vectors=complete if complete >= unroll - 1 else 0,
        wide=wide,
        rows_per_thread=block.rows_per_thread,
    )


def _looping(block: _Block, length: int, rows: int, several_passes: bool, wide: bool, in_flight: int) -> ColumnBlocks:
    """Schedules columns that each pass reads from memory: blocks of at most ``COLUMN_THREADS``, and no clusters for
    many."""
    threads = min(block.threads, max(1, COLUMN_THREADS // block.lanes))
    cluster = 1 if rows > MANY_COLUMNS else block.cluster
    return ColumnBlocks(
        threads=threads,
        rows_per_block=block.lanes * block.rows_per_thread,
        cluster=cluster,
        unroll=min(COLUMN_UNROLL, in_flight, -(-length // (threads * cluster))),
        resident=False,
        unmasked_vectors=0,
        wide=wide,
        online=several_passes,
        rows_per_thread=block.rows_per_thread,
    )
