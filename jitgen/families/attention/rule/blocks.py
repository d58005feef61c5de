"""Chooses the block sizes of a Triton program. How many rows it may have depends on how its tiles reach shared
memory."""

from __future__ import annotations

from collections.abc import Iterable

from jitgen.device import Device
from jitgen.kernel.operands import item_size, power_of_two

LEAST_BLOCK = 16
"""Elements of a dimension of a product in Triton, at least."""
ASYNC_BYTES = 4
"""Bytes of a copy by cp.async, at least. Triton copies tiles of shorter runs through registers."""
MMA_SYNC_ROWS = 32
"""Rows of a program up to which its products are mma.sync: a wgmma has 64 rows."""


def block_of(size: int) -> int:
    """Rounds ``size`` up to a power of two, at least that of a block."""
    return max(LEAST_BLOCK, power_of_two(size))


def most_rows(rows: int, tiles: Iterable[tuple[str, str]], unit: int, device: Device) -> int:
    """Returns how many rows a program may have that walks its tiles in several loops: ``rows``, or fewer.

    Where an iteration stores a tile in shared memory itself, the program has no wgmma: such kernels read beyond their
    shared memory (heads of 17 and 33 16-bit elements; Triton 3.6 with ptxas 12.8 on an H100). The same PTX was right
    where ptxas did not optimise it, and other numbers of stages made no difference.

    Args:
        tiles: kind of layout and dtype of each streamed operand; the kind is ``"contiguous"`` where runs of ``unit``
            elements are loaded as they are.
        unit: elements of such a run, of 16 at most.
    """
    copied = all(kind == "contiguous" and unit * item_size(dtype) >= ASYNC_BYTES for kind, dtype in tiles)
    return rows if copied or device.target.arch != "sm_90a" else min(rows, MMA_SYNC_ROWS)
