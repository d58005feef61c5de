"""Long rows in CUDA C++ from Hopper on: which blocks of a cluster hold one, and which clusters take one after another.

``clustered`` asks each of ``_SHARES`` in turn, and the first that suits a row has it: another way of sharing rows is
one function more there. What suits was measured on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.online import DEVIATIONS, SUM_EXP, online
from jitgen.families.reduction.residency import (
    EXPENSIVE_FLOPS,
    REGISTER_BYTES,
    first_needed,
    late_operands,
    passes,
    residency,
)
from jitgen.families.reduction.schedule import (
    BEYOND_CACHE_BYTES,
    BLOCK_THREADS,
    BUSY_ROWS,
    CLUSTER,
    CLUSTERS,
    FEW_ROWS,
    LEAST_THREADS,
    LINE_BYTES,
    MOST_THREADS,
    RESIDENT_THREADS,
    SOME_ROWS,
    WARP,
    Persistent,
    RowSchedule,
)
from jitgen.ir.body import Body
from jitgen.ir.ops import OPS
from jitgen.ir.parts import SPLIT_ROWS
from jitgen.ir.program import Kernel

MOST_HELD_BYTES = 160
"""Bytes a thread can hold beside what it computes with, of 1024 on a multiprocessor."""
LATE_OPERANDS, LATE_RESIDENT_THREADS = 2, 512
"""Operands that only a later pass needs, from which on a cluster has half the threads, with twice the registers each:
room to ask for such operands ahead (LayerNorm of rows of 151936 in float32 is 8 % faster)."""
PAIR = 2
"""Blocks of a row where each has a multiprocessor to itself. An H200 holds 66 such clusters, but only 62 of 8 blocks
with a quarter of a multiprocessor each: 8 of its 132 multiprocessors are in no cluster of more than two."""
PAIR_BYTES = PAIR * MOST_THREADS * MOST_HELD_BYTES
SEVEN, SEVEN_BYTES, SEVEN_HELD_BYTES = 7, 2**18, 352
"""Blocks of a row that is the sum of two operands, or as much; its bytes from which on, and those that one of 512
threads of a multiprocessor holds. An H200 has 32 such rows under way, with half a multiprocessor for each block, and 30
with 8 blocks."""
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
"""At least those of a block's barriers."""
PERSISTENT_SHARES = ((CLUSTER // 2, 20, SOME_ROWS), (CLUSTER, 25, CLUSTERS))
"""Blocks of a cluster; vectors of a thread for a row, at most; rows that have blocks of their own, at most. On an H200
64 rows of 151936 in float32: LayerNorm 0.91 of a copy's speed instead of 0.82, RMSNorm 0.98 instead of 0.90."""


@dataclass(frozen=True)
class Share:
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


def clustered(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, size: int, narrow: bool) -> Share:
    """Of a row of ``size`` bytes, of elements that are ``narrow`` or not: small blocks of several rows on a
    multiprocessor, or, of few rows, all of it for one."""
    row = _Row(kernel, layout, geometry.rows, size, narrow)
    return next(found for found in (suits(row) for suits in _SHARES) if found)


# ------------------------------------------------------------------------------------------------------------- shares


@dataclass(frozen=True)
class _Row:
    """One of ``rows``, of ``size`` bytes, as what shares it asks for."""

    kernel: Kernel
    layout: RowLayout
    rows: int
    size: int
    narrow: bool

    @property
    def body(self) -> Body:
        (body,) = self.kernel.bodies
        return body

    @cached_property
    def threads(self) -> int:
        """Of each of ``CLUSTER`` blocks: the fewest that hold it."""
        threads = BLOCK_THREADS
        while threads > LEAST_THREADS and self.size <= threads // 2 * CLUSTER * MOST_HELD_BYTES:
            threads //= 2
        return threads

    @property
    def are_many(self) -> bool:
        return self.rows > BUSY_ROWS

    @cached_property
    def streamed(self) -> Kernel:
        return online(self.kernel)

    @property
    def saves_wait(self) -> bool:
        """Whether blocks wait for one another once less where the row is accumulated as it comes (``online.py``).

        That takes arithmetic, which pays where elements are narrow.
        """
        return passes(self.streamed) > 1 and self.narrow

    @property
    def online(self) -> bool:
        return accumulates_moments(self.streamed)

    @property
    def is_costly(self) -> bool:
        """Whether an element takes a function, accumulated as it comes."""
        (body,) = self.streamed.bodies
        return any(
            (i.op, i.attr) == ("reduce", SUM_EXP) or (i.op in OPS and OPS[i.op].flops >= EXPENSIVE_FLOPS and not i.row)
            for i in body.instructions
        )


def _pair(row: _Row) -> Share | None:
    """Few rows of narrow elements: a multiprocessor for each of two blocks, which wait for one another but once."""
    few = SOME_ROWS < row.rows <= FEW_ROWS and BEYOND_CACHE_BYTES < row.size <= PAIR_BYTES
    return Share(MOST_THREADS, PAIR, online=True) if few and row.saves_wait and not row.is_costly else None


def _seven(row: _Row) -> Share | None:
    """Rows of two operands or more; of narrow ones those that are not many."""
    if len(own_operands(row.kernel, row.layout)) < 2 or row.size <= SEVEN_BYTES or (row.narrow and row.are_many):
        return None
    if row.narrow:
        found = Share(row.threads, SEVEN, held=SEVEN_HELD_BYTES // 2, online=row.online)
    else:
        found = Share(row.threads // 2, SEVEN, LATE_RESIDENT_THREADS, SEVEN_HELD_BYTES, row.online)
    # A warp combines what all warps have sent: as many values as divide it, or more than it has lanes.
    combines = found.threads // WARP * SEVEN > WARP
    return found if combines and row.size <= SEVEN * found.threads * found.held else None


def _partly_shared(row: _Row) -> Share | None:
    """Rows of words that are not many: a part of each lies in shared memory, so that more are under way."""
    if row.rows <= SPLIT_ROWS or row.are_many or row.threads < BLOCK_THREADS or not _is_one_word(row):
        return None
    held = (REGISTER_VECTORS + SHARED_VECTORS) * ACCESS_BYTES
    fits = row.size <= CLUSTER * (row.threads // 2) * held
    return Share(row.threads // 2, CLUSTER, held=held, shared=True) if fits else None


def _is_one_word(row: _Row) -> bool:
    """Whether one value of four bytes is all that is read and kept of an element, read by whole accesses.

    Such values follow one another in the same place of shared memory. What all rows share would have too few registers
    to be asked for ahead of its use, and many reductions would leave no room.
    """
    kept = residency(row.body, None)
    read = elements_read(row.body)
    if reductions(row.kernel) > COMBINED_BESIDE or len(read) != 1 or kept.values != 1:
        return False
    if not has_whole_accesses(row.kernel, row.layout, read):
        return False
    sizes = {item_size(row.body.instructions[position].dtype) for part in kept.kept for position in part}
    return sizes | {kept.bytes, item_size(row.body.operands[read[0]].dtype)} == {WORD_BYTES}


def _late(row: _Row) -> Share | None:
    """Rows that weights belong to: fewer threads, which ask for those ahead.

    But for rows of narrow elements, too many for a pair of blocks each and not many: larger blocks are faster there.
    """
    some = row.narrow and row.rows > FEW_ROWS and not row.are_many
    if some or row.threads == LEAST_THREADS or len(late_operands(row.body)) < LATE_OPERANDS:
        return None
    return Share(row.threads // 2, CLUSTER, LATE_RESIDENT_THREADS, 2 * MOST_HELD_BYTES, row.online)


def _plain(row: _Row) -> Share:
    return Share(row.threads, CLUSTER, online=row.online)


_SHARES = (_pair, _seven, _partly_shared, _late, _plain)
"""In the order in which they are asked; the last suits every row."""


# -------------------------------------------------------------------------------------------------------- persistent


def persistent(kernel: Kernel, layout: RowLayout, geometry: RowGeometry, vector: int, limit: int) -> RowSchedule | None:
    """Clusters that take one long row after another; None where a row has blocks of its own.

    ``limit``: bytes of shared memory a block may ask for.

    A cluster's next row is copied into shared memory while this one is combined and stored, and what all rows read is
    read once for all that a cluster takes. Otherwise each row would bring it from the second-level cache again: the
    first-level cache is emptied wherever a cluster begins.
    """
    (body,) = kernel.bodies
    read = elements_read(body)
    common = [index for index in read if layout.shared[index]]
    own = own_operands(kernel, layout)
    words = {item_size(body.operands[index].dtype) for index in read} == {WORD_BYTES}
    first = len(read) == len(own) + len(common)  # no later pass needs more of a row
    if not (own and words and first and vector * WORD_BYTES == ACCESS_BYTES):
        return None
    if not has_whole_accesses(kernel, layout, read):
        return None
    kept, streamed = residency(body, None).bytes // REGISTER_BYTES, online(kernel)
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
        sent = 2 * cluster * warps * sum(state_bytes(streamed, layout.wide))
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
            online=accumulates_moments(streamed),
            persistent=Persistent(parked, taken),
        )
    return None


def _shared_out(length: int, parts: int, vector: int) -> tuple[int, int]:
    """The most and the fewest vectors of a part where ``parts`` share a row by whole lines, as evenly as may be."""
    unit = LINE_BYTES // ACCESS_BYTES
    lines = -(-length // (unit * vector))
    last = length // vector - ((parts - 1) * (lines // parts) + min(parts - 1, lines % parts)) * unit
    return -(-lines // parts) * unit, min(lines // parts * unit, last)


# ------------------------------------------------------------------------------------------------ what a kernel reads


def elements_read(body: Body) -> list[int]:
    """The operands of which elements of a row are read."""
    return [index for index, operand in enumerate(body.operands) if operand.kind == "load" and not operand.row]


def own_operands(kernel: Kernel, layout: RowLayout) -> tuple[int, ...]:
    """The operands with elements of their own for each row that the first pass over it needs."""
    (body,) = kernel.bodies
    first = [body.instructions[position] for position, number in first_needed(body).items() if number == 0]
    loads = {instruction.attr for instruction in first if instruction.op == "load"}
    return tuple(sorted(index for index in loads if not layout.shared[index]))


def late_common(kernel: Kernel, layout: RowLayout) -> tuple[int, ...]:
    """The operands that all rows read and only a later pass than the first needs, by whole accesses."""
    late = late_operands(kernel.bodies[0])
    return tuple(i for i in late if layout.shared[i] and has_whole_accesses(kernel, layout, (i,)))


def accumulates_moments(streamed: Kernel) -> bool:
    """Whether a thread of a kernel that is ``online`` has squared deviations of a row that is needed again.

    Of what it holds that takes no more arithmetic than a second pass, and a row's threads wait for one another once
    less.
    """
    (body,) = streamed.bodies
    return passes(streamed) > 1 and any((i.op, i.attr) == ("reduce", DEVIATIONS) for i in body.instructions)


def reductions(kernel: Kernel) -> int:
    (body,) = kernel.bodies
    return sum(instruction.op == "reduce" for instruction in body.instructions)


def has_whole_accesses(kernel: Kernel, layout: RowLayout, operands: Sequence[int]) -> bool:
    """Whether the elements of each of ``operands`` are neighbours whose every row begins at a multiple of an access."""
    (body,) = kernel.bodies
    if any(layout.operands[index] != "contiguous" for index in operands):
        return False
    return layout.unit * min(item_size(body.operands[index].dtype) for index in operands) >= ACCESS_BYTES


def state_bytes(kernel: Kernel, wide: bool) -> list[int]:
    """Bytes of what each reduction of a row has accumulated, whose places are ``wide`` or not."""
    (body,) = kernel.bodies
    sizes = []
    for instruction in body.instructions:
        if instruction.op == "reduce":
            size = max(4, item_size(body.instructions[instruction.args[0]].dtype))
            numbers = {SUM_EXP: 2, DEVIATIONS: 4}.get(instruction.attr, 1)  # three are moved as four
            sizes.append(size * numbers + (8 if wide else 4) * instruction.attr.startswith("arg"))
    return sizes
