"""Chooses how a scan kernel walks its rows: pure functions from layout, sizes and target to numbers, and to words.

On a GPU ``Schedule.along`` threads take a tile of a row, each ``items`` consecutive elements of it, scan it together,
and go on to the next tile with the state of all tiles before it. Where neighbouring elements belong to neighbouring
rows (``RowLayout.columns``), the lanes of a warp have neighbouring rows, and the warps of a block share the tile. On a
CPU a thread takes a row by itself, or a tile of neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.device import Device
from jitgen.families.family import Problem
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_of
from jitgen.kernel.operands import WARP, item_size, power_of_two
from jitgen.kernel.rows import RowLayout
from jitgen.schedule.declared import DeclaredSchedule, about

CPU_BLOCK = 1024
"""Elements of a row that a CPU thread takes at once: what is scanned of them, its operands and its results fit the
first-level cache together."""
CPU_COLUMN_ROWS = 1024
"""Neighbouring rows that a CPU thread walks together: 4 KiB of float32, a page of each operand."""
CPU_SHORT_ROW = 32
"""Elements below which a row is *short*: a CPU thread walks several of them together, element by element, because a
block of so few elements does not pay; unless exponentials are computed of it, a vector at a time."""
CPU_SHORT_ROWS = 64
"""Short rows that a CPU thread walks together: their states are a vector for each few rows."""
BLOCK_THREADS = 256
"""Threads of a block in CUDA C++: eight warps, whose states one warp combines."""
ITEM_BYTES = 16
"""Bytes of its narrowest operand that a GPU thread takes of a row at once: one access."""
MOST_ITEM_BYTES = 32
"""The same of its widest operand."""
WARP_TILES = 8
"""Tiles of a row up to which one warp takes it, which needs no barrier and no shared memory."""
COLUMN_ITEMS = 8
"""Elements of each of its rows that a thread takes at once where rows lie side by side: loads in flight."""
LANE_BYTES = 4
"""Of its widest operand that a thread moves in one access there: 128 bytes for a warp."""
LEAST_LANES = 8
"""Neighbouring rows of a block at least, where rows lie side by side: a sector of 32 bytes of float32."""
CHUNK_UNIT = 16
"""Chunks are multiples of so many elements, so that they are as aligned as rows are."""
TRITON_TILE = 2048
"""Elements that a program holds at once: 8 for each thread of 8 warps."""


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Says how rows are walked.

    Attributes:
        threads: of a block (GPU); 1 on the CPU.
        rows: that a block, or a CPU thread, has at once.
        items: consecutive elements of a row that a thread takes at once; in Triton, that a program takes; on the CPU,
            that are walked before they are scanned: 1 where each is combined as it is met.
        vector: of these, how many one access moves where they are neighbours in memory.
        rows_per_thread: neighbouring rows that a thread moves in one access.
        chunks: into how many chunks a row is cut, each walked by a block of its own.
        loops: whether a row (a chunk of one) may be longer than what is taken at once.
        wide: 64-bit indices.
    """

    sentence: ClassVar[tuple[str, ...]] = (
        *("{threads} threads a block", "{rows:row} at once", "{items} elements of a row at once"),
        *("vector", "rows_per_thread", "chunks", "wide"),
    )
    threads: int
    rows: int
    items: int
    vector: int = field(metadata=about("accesses of {} elements"))
    rows_per_thread: int = field(metadata=about("{} neighbouring rows a thread"))
    chunks: int = field(metadata=about("rows in {} chunks"))
    loops: bool
    wide: bool = field(metadata=about("64-bit indices"))

    @property
    def along(self) -> int:
        """Returns the threads of a block that share a row."""
        return self.threads * self.rows_per_thread // self.rows

    @property
    def tile(self) -> int:
        """Returns the elements of a row that a block of CUDA threads takes at once."""
        return self.along * self.items


@dataclass(frozen=True)
class CpuSchedule(Schedule):
    """Says how CPU threads walk rows: each takes a row, or a tile of them."""

    sentence = ("{walk}",)

    @property
    def walk(self) -> str:
        if self.rows > 1:
            return f"tiles of {self.rows} neighbouring rows"
        return f"rows one by one, {f'{self.items} elements at once' if self.items > 1 else 'element by element'}"


def candidates(problem: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns the schedule that the rule of ``device``'s dialect has for ``problem``."""
    (body,), (layout,), (geometry,) = problem.kernel.bodies, problem.layouts, problem.geometries
    if not device.is_gpu:
        exponentials = any(i.op == "scan" and i.attr == "logsumexp" for i in body.instructions)
        is_short = geometry.length < CPU_SHORT_ROW and not (layout.columns or exponentials)
        items = 1 if is_short else CPU_BLOCK
        rows = CPU_COLUMN_ROWS if layout.columns else CPU_SHORT_ROWS if is_short else 1
        return (CpuSchedule(1, rows, items, 1, 1, body.chunks, True, True),)
    length, neighbours = max(geometry.length, 1), geometry.sizes[-1]
    if device.dialect == "triton":
        threads, rows, items = _triton(layout.columns, length, neighbours, body.chunks)
        vector = rows_per_thread = 1
        tile = items
    else:
        sizes = [item_size(operand.dtype) for operand in body.operands if operand.buffer is not None]
        threads, rows, items, rows_per_thread = _cuda(layout, sizes, length, neighbours, body.chunks)
        vector = 1 if layout.columns else min(items, layout.unit)
        tile = threads * rows_per_thread // rows * items
    loops = body.chunks > 1 or length > tile
    return (Schedule(threads, rows, items, vector, rows_per_thread, body.chunks, loops, layout.wide),)


def _cuda(
    layout: RowLayout, sizes: Sequence[int], length: int, neighbours: int, chunks: int
) -> tuple[int, int, int, int]:
    """Returns the threads, rows, items and neighbouring rows of a thread, for operands with elements of ``sizes``
    bytes."""
    if layout.columns:
        lanes = min(WARP, max(LEAST_LANES, power_of_two(neighbours)))
        rows_per_thread = max(1, min(layout.unit, LANE_BYTES // max(sizes))) if lanes == WARP else 1
        return BLOCK_THREADS, lanes * rows_per_thread, COLUMN_ITEMS, rows_per_thread
    items = max(1, min(ITEM_BYTES // min(sizes), MOST_ITEM_BYTES // max(sizes)))
    along = BLOCK_THREADS
    if chunks == 1 and length <= WARP * items * WARP_TILES:
        along = min(WARP, power_of_two(-(-length // items)))
    return BLOCK_THREADS, BLOCK_THREADS // along, items, 1


def _triton(columns: bool, length: int, neighbours: int, chunks: int) -> tuple[int, int, int]:
    """Returns the threads, rows and elements of a row of one program."""
    tile = min(TRITON_TILE, power_of_two(length))
    if columns:
        tile = min(tile, TRITON_TILE // WARP)
        rows = min(TRITON_TILE // tile, max(LEAST_LANES, power_of_two(neighbours)), 2 * WARP)
    else:
        rows = 1 if chunks > 1 else max(1, TRITON_TILE // 2 // tile)
    warps = max(1, min(BLOCK_THREADS // WARP, rows * tile // (8 * WARP)))
    return warps * WARP, rows, tile


def explain(kernel: Kernel, layouts: Sequence[RowLayout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and how a row is walked."""
    (layout,), (body,) = layouts, kernel.bodies
    kinds = [instruction.attr for instruction in body.instructions if instruction.op == "scan"]
    lines = [f"scan by {', '.join(kinds)} along a row, which is read once"]
    if body.chunks > 1:
        again = "" if body.stores and not all(body.operands[index].row for index in body.stores) else "; totals only"
        lines.append(f"a row is cut into {body.chunks} chunks, each walked by a block of its own{again}")
    if device.dialect == "cuda":
        rows = f" of each of {schedule.rows_per_thread} rows" if schedule.rows_per_thread > 1 else ""
        lines.append(f"a block of {schedule.threads} threads takes {schedule.rows} rows at once")
        lines.append(f"a thread takes {schedule.items} consecutive elements{rows}, {schedule.along} threads a row")
    elif device.is_gpu:
        lines.append(f"a program takes {schedule.rows} rows at once, {schedule.items} elements of each")
    elif schedule.rows > 1:
        lines.append(f"{schedule.rows} neighbouring rows are walked together")
    else:
        lines.append("a thread walks a row by itself; where rows are fewer than threads, they share each row")
    return [*lines, operations_of(body, layout.along)]
