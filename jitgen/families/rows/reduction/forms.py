"""Declares the schedules of row kernels: a class for each form of execution, with what decides its source and its
launch.

On a GPU a row belongs to some threads of one block (which may hold several rows) or, where it is long, to the threads
of a cluster of blocks. A row is *resident* where a thread keeps its ``unroll`` vectors of ``vector`` elements in
registers from pass to pass. An operand is *deferred* where only a later pass than the first reads it, *row-invariant*
where all rows read the same elements of it. What is the same for every schedule of a class is a class variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from jitgen.kernel.operands import ACCESS_BYTES
from jitgen.schedule.declared import DeclaredSchedule, about, derived


@dataclass(frozen=True)
class HostRows(DeclaredSchedule):
    """Shares rows among the threads of a CPU.

    Attributes:
        tile_rows: neighbouring rows that a thread walks together.
        group: elements that a thread computes at once.
        scratch: whether values that are costly to compute stay in scratch memory between passes.
    """

    sentence = ("{rows_at_once}", "groups of {group} elements", "scratch")
    wide: ClassVar[bool] = True
    online: ClassVar[bool] = False
    tile_rows: int
    group: int
    scratch: bool = field(metadata=about("costly values stay in scratch memory"))

    @property
    def rows_at_once(self) -> str:
        return "one row at a time" if self.tile_rows == 1 else f"tiles of {self.tile_rows} rows"


class _MayBeResident(Protocol):
    @property
    def resident(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class GpuRows(DeclaredSchedule):
    """Holds what the forms on a GPU have in common.

    Attributes:
        threads: threads of one block that share a row, a power of two.
        unroll: vectors that a thread holds of a resident row; of another, that it loads before it uses the first.
        unmasked_vectors: how many of the ``unroll`` vectors, the first, lie inside the row for every thread and so need
            no mask: all, all but the last, or 0.
        wide: whether indices have 64 bits.
        vector: elements of one access.
        rows_per_block: rows of one block.
        rows_per_thread: neighbouring rows of a thread, whose elements it moves in one access; 1 where the elements of
            one row are neighbours.
        online: whether reductions that wait for another one are accumulated in the same pass (``online.py``).
    """

    sentence = (
        *("{row_threads}", "rows_per_block", "rows_per_thread", "rows_per_iteration"),
        *("{unroll:access|accesses} a thread of {vector:element}", "masked", "{residence}", "shared_vectors"),
        *("online", "is_persistent", "is_staged", "preload_deferred", "is_prefetched", "streaming_loads"),
        *("blocks_per_multiprocessor", "wide"),
    )
    threads: int
    unroll: int
    unmasked_vectors: int
    wide: bool = field(metadata=about("64-bit indices"))
    vector: int = 1
    rows_per_block: int = field(default=1, metadata=about("{} rows a block"))
    rows_per_thread: int = field(default=1, metadata=about("{} neighbouring rows a thread"))
    online: bool = field(default=False, metadata=about("online accumulation"))

    @property
    def row_threads(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)} a row"

    @property
    def residence(self: _MayBeResident) -> str:
        return "the row stays in registers" if self.resident else "each pass reads the row from memory"

    @derived("{}")
    def masked(self) -> str:
        """Returns which vectors need a mask."""
        if self.is_unmasked:
            return ""
        return f"the first {self.unmasked_vectors} unmasked" if self.unmasked_vectors else "all masked"

    @property
    def block_threads(self) -> int:
        return self.threads * self.lanes

    @property
    def lanes(self) -> int:
        """Returns the threads of a block that lie side by side, each with rows of its own."""
        return self.rows_per_block // self.rows_per_thread

    @property
    def elements_per_thread(self) -> int:
        """Returns the elements that a thread holds at once."""
        return self.vector * self.unroll * self.rows_per_thread

    @property
    def is_unmasked(self) -> bool:
        """Returns whether the row is a multiple of what its threads hold at once, so that no access needs a mask."""
        return self.unmasked_vectors == self.unroll

    @property
    def tile(self) -> int:
        """Returns the elements of a row that one block holds at once."""
        return self.threads * self.vector * self.unroll


@dataclass(frozen=True, kw_only=True)
class TritonRows(GpuRows):
    """Schedules a program that holds a block of ``rows_per_block`` rows by ``tile`` elements.

    Attributes:
        resident: whether the block has the whole row.
    """

    resident: bool


@dataclass(frozen=True, kw_only=True)
class CudaRows(GpuRows):
    """Holds what the forms in CUDA C++ have in common.

    Attributes:
        cluster: blocks that share a row.
        blocks_per_multiprocessor: blocks that the registers of a multiprocessor must suffice for.
    """

    cluster: int = 1
    blocks_per_multiprocessor: int = field(default=1, metadata=about("{} blocks a multiprocessor"))

    @property
    def row_threads(self) -> str:
        return super().row_threads + (f" in each of {self.cluster} blocks" if self.cluster > 1 else "")


@dataclass(frozen=True, kw_only=True)
class ColumnBlocks(CudaRows):
    """Schedules rows whose elements are neighbours across rows: ``cuda_columns.j2``.

    Attributes:
        resident: whether columns stay in registers between passes.
    """

    shared_vectors: ClassVar[int] = 0
    shared_bytes: ClassVar[int] = 0
    resident: bool


@dataclass(frozen=True, kw_only=True)
class LoopedRows(CudaRows):
    """Schedules rows that each pass reads from memory: ``cuda_rows.j2``.

    Attributes:
        rows_per_iteration: rows that a thread takes one after another, all of which it loads before it uses the first.
    """

    resident: ClassVar[bool] = False
    shared_vectors: ClassVar[int] = 0
    shared_bytes: ClassVar[int] = 0
    preload_deferred: ClassVar[bool] = False
    staged: ClassVar[None] = None
    prefetch: ClassVar[None] = None
    streaming_loads: ClassVar[bool] = False
    rows_per_iteration: int = field(default=1, metadata=about("{} rows an iteration"))


@dataclass(frozen=True)
class Staged:
    """Describes deferred row-invariant operands that are copied to shared memory while the row is loaded.

    Attributes:
        operands: all of them, by index. An access moves as many elements of each as a vector has.
        vectors: how many vectors of each thread, the first, are copied there; the others are loaded into registers.
    """

    operands: tuple[int, ...]
    vectors: int


@dataclass(frozen=True)
class Prefetch:
    """Describes what is prefetched into the second-level cache before the kernel waits for the one ahead of it.

    Attributes:
        operands: by index, operands of which each row has its own elements.
        first_rows: how many rows, from the first, are prefetched; None for all.
        every_nth: of those, every nth row is prefetched.
        row_invariant: by index, operands that all rows read; every block prefetches a share of them where there are
            few blocks.
        row_invariant_blocks: how many blocks, or clusters of blocks, are few.
    """

    operands: tuple[int, ...]
    first_rows: int | None = None
    every_nth: int = 1
    row_invariant: tuple[int, ...] = ()
    row_invariant_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class ResidentRows(CudaRows):
    """Schedules rows that stay in registers from pass to pass: ``cuda_rows.j2``.

    Attributes:
        rows_per_iteration: as of ``LoopedRows``.
        shared_vectors: how many of the ``unroll`` vectors, the last, lie in shared memory.
        preload_deferred: whether deferred operands are loaded into registers with the row, not after it was reduced.
        staged: deferred operands that are copied to shared memory.
        prefetch: what is prefetched while the kernel ahead ends.
        streaming_loads: whether loads of elements that no other row has bypass the first-level cache, which is left to
            row-invariant operands.
    """

    resident: ClassVar[bool] = True
    rows_per_iteration: int = field(default=1, metadata=about("{} rows an iteration"))
    shared_vectors: int = field(
        default=0, metadata=about("its last {:access|accesses} a thread in shared memory", least=1)
    )
    preload_deferred: bool = field(default=False, metadata=about("deferred operands loaded with the row"))
    staged: Staged | None = None
    prefetch: Prefetch | None = None
    streaming_loads: bool = field(default=False, metadata=about("streaming loads"))

    @derived("deferred operands staged in shared memory")
    def is_staged(self) -> bool:
        return self.staged is not None

    @derived("prefetch to the L2 cache")
    def is_prefetched(self) -> bool:
        return self.prefetch is not None

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, in bytes."""
        if self.staged is None:
            return 0
        return len(self.staged.operands) * self.staged.vectors * self.block_threads * ACCESS_BYTES


@dataclass(frozen=True, kw_only=True)
class PersistentRows(CudaRows):
    """Schedules clusters that take one row after another, each block with a multiprocessor to itself:
    ``cuda_persistent.j2``.

    Attributes:
        shared_operands: how many of the row-invariant operands, the first, lie in shared memory; the others lie in
            registers.
        shared_bytes: dynamic shared memory of a block, in bytes.
    """

    resident: ClassVar[bool] = True
    shared_vectors: ClassVar[int] = 0
    shared_operands: int
    shared_bytes: int

    @derived("persistent clusters")
    def is_persistent(self) -> bool:
        return True


CudaSchedule = LoopedRows | ResidentRows | PersistentRows | ColumnBlocks
RowSchedule = HostRows | TritonRows | CudaSchedule
"""The schedule of a row kernel."""
SCHEDULES: tuple[type, ...] = (HostRows, TritonRows, LoopedRows, ResidentRows, PersistentRows, ColumnBlocks)
"""Every class of ``RowSchedule``."""
