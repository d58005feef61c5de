"""Computes the facts by which the schedule of rows in CUDA C++ is chosen, each once for one kernel and call.

The rules in ``cuda_schedule.py``, ``cuda_resident.py`` and ``cuda_loads.py`` are functions of a ``RowProblem``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from jitgen.device import Device
from jitgen.families.rows.reduction.forms import LoopedRows, ResidentRows
from jitgen.families.rows.reduction.online import DEVIATIONS, SUM_EXP, online
from jitgen.families.rows.reduction.residency import EXPENSIVE_FLOPS, deferred_operands, first_needed, passes, residency
from jitgen.families.rows.reduction.schedule import (
    BLOCK_THREADS,
    FULL_THREAD_BYTES,
    ITERATION_BYTES,
    LATENCY_BYTES,
    LATENCY_ELEMENTS,
    MANY_ROWS,
    MAX_ROWS_PER_ITERATION,
    NARROW_BYTES,
    SHORT_BLOCK_THREADS,
    THREAD_BYTES,
    Occupancy,
    occupancy,
)
from jitgen.ir.body import Body
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size
from jitgen.kernel.rows import RowGeometry, RowLayout

MIN_THREADS = 4
"""Threads of the shortest row: a warp has 8 of those."""
ACCESSES = 4
"""Accesses that a thread of a short row aims at, where those are fewer than ``THREAD_BYTES``."""

Found = TypeVar("Found")


def first_that_applies(policies: Iterable[Callable[..., Found | None]], *arguments: Any) -> Found:
    """Returns the result of the first of ``policies`` that applies, and hence gives anything."""
    return next(result for result in (policy(*arguments) for policy in policies) if result is not None)


@dataclass(frozen=True)
class RowProblem:
    """Describes one kernel over rows of neighbouring elements, and the sizes of one call."""

    kernel: Kernel
    layout: RowLayout
    geometry: RowGeometry
    device: Device

    # ------------------------------------------------------------------------------------------------- sizes and rows

    @property
    def body(self) -> Body:
        (body,) = self.kernel.bodies
        return body

    @property
    def rows(self) -> int:
        return self.device.rows(self.geometry.rows)

    @cached_property
    def occupancy(self) -> Occupancy:
        return occupancy(self.device.model)

    @property
    def has_many_rows(self) -> bool:
        """Returns whether one block for each row keeps the device busy."""
        return self.rows > self.occupancy.full

    @property
    def length(self) -> int:
        """Returns the elements of a row, at least 1."""
        return max(self.geometry.length, 1)

    @cached_property
    def item_sizes(self) -> list[int]:
        """Returns the bytes of an element of each operand in memory that the kernel reads or writes element by
        element."""
        return [item_size(o.dtype) for o in self.body.operands if o.buffer is not None and not (o.row or o.block)] or [
            4
        ]

    @property
    def is_narrow(self) -> bool:
        """Returns whether all elements are narrow, see ``NARROW_BYTES``."""
        return max(self.item_sizes) <= NARROW_BYTES

    @cached_property
    def vector(self) -> int:
        """Returns the elements of one access of at most 16 bytes of the widest operand."""
        return max(1, min(self.layout.unit, ACCESS_BYTES // max(self.item_sizes)))

    @cached_property
    def element_bytes(self) -> int:
        """Returns the bytes of registers of one element: between passes, or of all operands if there is one pass."""
        return sum(self.item_sizes) if self.passes == 1 else residency(self.body, None).bytes_per_element

    @property
    def row_bytes(self) -> int:
        return self.length * self.element_bytes

    # --------------------------------------------------------------------------------------------------------- passes

    @cached_property
    def passes(self) -> int:
        return passes(self.kernel)

    @property
    def reduces_once(self) -> bool:
        """Returns whether the row is reduced in one pass and stored in the next."""
        return self.passes == 2

    @cached_property
    def online_kernel(self) -> Kernel:
        """Returns the kernel with its reductions accumulated online, see ``online.py``."""
        return online(self.kernel)

    @cached_property
    def online_passes(self) -> int:
        return passes(self.online_kernel)

    @cached_property
    def accumulates_moments(self) -> bool:
        """Returns whether online accumulation takes the squared deviations of a row that is needed again.

        Of elements in registers that takes no more arithmetic than a second pass over them, and the threads of a row
        wait for one another once less.
        """
        (body,) = self.online_kernel.bodies
        return self.online_passes > 1 and any((i.op, i.attr) == ("reduce", DEVIATIONS) for i in body.instructions)

    @cached_property
    def online_is_costly(self) -> bool:
        """Returns whether online accumulation evaluates a function (such as exp) for every element."""
        (body,) = self.online_kernel.bodies
        return any(
            (i.op, i.attr) == ("reduce", SUM_EXP) or (i.op in OPS and OPS[i.op].flops >= EXPENSIVE_FLOPS and not i.row)
            for i in body.instructions
        )

    # ------------------------------------------------------------------------------------------------------- operands

    @cached_property
    def operands_read(self) -> list[int]:
        """Returns the operands, by index, of which elements of a row are read."""
        return [index for index, o in enumerate(self.body.operands) if o.kind == "load" and not o.row]

    @cached_property
    def row_operands(self) -> tuple[int, ...]:
        """Returns the operands, by index, that the first pass needs and of which each row has its own elements."""
        first = [
            self.body.instructions[position] for position, number in first_needed(self.body).items() if number == 0
        ]
        loads = {instruction.attr for instruction in first if instruction.op == "load"}
        return tuple(sorted(index for index in loads if not self.layout.row_invariant[index]))

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """Returns the operands, by index, that only a later pass than the first needs."""
        return deferred_operands(self.body)

    @cached_property
    def deferred_row_invariant(self) -> tuple[int, ...]:
        """Returns those of ``deferred`` that all rows read, by whole accesses."""
        return tuple(i for i in self.deferred if self.layout.row_invariant[i] and self.has_whole_accesses((i,)))

    def item_size_of(self, operand: int) -> int:
        """Returns the bytes of an element of the operand with this index."""
        return item_size(self.body.operands[operand].dtype)

    def has_whole_accesses(self, operands: Sequence[int]) -> bool:
        """Returns whether every row of each of ``operands`` is contiguous and begins at a multiple of 16 bytes."""
        if any(self.layout.along[index] != "contiguous" for index in operands):
            return False
        return self.layout.unit * min(map(self.item_size_of, operands)) >= ACCESS_BYTES

    @property
    def reductions(self) -> int:
        return sum(instruction.op == "reduce" for instruction in self.body.instructions)

    # --------------------------------------------------------------------------------------------------------- threads

    @property
    def has_clusters(self) -> bool:
        return self.device.has_clusters

    @cached_property
    def threads(self) -> int:
        """Returns the threads of one block that would share a row: as many as hold ``THREAD_BYTES`` each, up to
        ``BLOCK_THREADS``.

        Less than a warp aims at fewer bytes where accesses are narrow, so that its threads read side by side.
        """
        fewer_bytes = min(THREAD_BYTES, ACCESSES * self.vector * max(self.item_sizes))
        threads = MIN_THREADS
        while threads < BLOCK_THREADS and threads * (fewer_bytes if threads < WARP else THREAD_BYTES) < self.row_bytes:
            threads *= 2
        half_suffices = self.row_bytes <= BLOCK_THREADS // 2 * FULL_THREAD_BYTES
        if threads == BLOCK_THREADS and self.is_narrow and not self.reduces_once and half_suffices:
            threads //= 2  # the two blocks of a multiprocessor hide each other's barriers
        short = self.length <= LATENCY_ELEMENTS if self.reduces_once else self.row_bytes <= LATENCY_BYTES
        divides = self.length % (2 * threads * self.vector) == 0
        if short and divides and self.passes > 1 and threads < BLOCK_THREADS:
            threads *= 2
        return threads

    @property
    def rows_per_block(self) -> int:
        return max(1, SHORT_BLOCK_THREADS // self.threads)


def state_bytes(kernel: Kernel, wide: bool) -> list[int]:
    """Returns the bytes of what each reduction of ``kernel`` accumulates, whose indices are 64-bit if ``wide``."""
    (body,) = kernel.bodies
    sizes = []
    for instruction in body.instructions:
        if instruction.op == "reduce":
            size = max(4, item_size(body.instructions[instruction.args[0]].dtype))
            numbers = {SUM_EXP: 2, DEVIATIONS: 4}.get(instruction.attr, 1)  # the three of deviations are moved as four
            sizes.append(size * numbers + (8 if wide else 4) * instruction.attr.startswith("arg"))
    return sizes


def rows_per_iteration(problem: RowProblem, schedule: LoopedRows | ResidentRows) -> int:
    """Returns how many rows a thread takes at once where there are many short ones, as many as make
    ``ITERATION_BYTES``.

    A row of more than a warp takes one: its threads would meet at a barrier for each.
    """
    if schedule.threads > WARP or problem.rows <= MANY_ROWS:
        return 1
    thread_bytes = schedule.vector * schedule.unroll * problem.element_bytes
    return max(1, min(MAX_ROWS_PER_ITERATION, ITERATION_BYTES // thread_bytes))
