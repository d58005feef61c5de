"""Numbers of Hopper's tensor cores, and the tensor maps of operands of products."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.rule.cuda import BATCH_RANK
from jitgen.ir.body import Operand
from jitgen.kernel.operands import ACCESS_BYTES, MappedTensor, item_size
from jitgen.spec import Target

WARPGROUP = 128
"""Threads of a warpgroup."""
ROWS = 64
"""Rows of a consumer warpgroup: those of a wgmma."""
CHUNK = 64
"""Elements of a row of shared memory, of 128 bytes."""
SHARED_BYTES = Target("cuda", "sm_90a").shared_bytes
"""Shared memory of a block at most, on every chip with wgmma."""


def is_mappable(operand: Operand, kind: str, unit: int, batch: Sequence[int], rows: int, row_stride: int) -> bool:
    """Whether a tensor map describes ``operand``: 16-byte aligned rows, strides that are not negative, and few
    dimensions before them.

    Args:
        kind: of its strides.
        unit: what sizes and strides of contiguous operands are multiples of, in elements.
        batch: strides of the dimensions before rows.
    """
    return (
        kind == "contiguous"
        and unit * item_size(operand.dtype) >= ACCESS_BYTES
        and len(batch) <= BATCH_RANK
        and rows > 0
        and (row_stride > 0 or rows == 1)
        and min((0, *batch)) == 0
    )


def tensor_map(
    operand: Operand,
    offset: int,
    batch: Sequence[tuple[int, int]],
    shape: tuple[int, int],
    row_stride: int,
    box: int,
) -> MappedTensor:
    """The tensor map of ``operand``, matrices of ``shape`` that are copied ``box`` rows at a time.

    Args:
        offset: of the first element from the buffer's pointer, in elements.
        batch: (size, stride) of each dimension before rows; along one of stride 0 there is one matrix.
    """
    padded = [(1, 0)] * (BATCH_RANK - len(batch)) + [(size if step else 1, step) for size, step in batch]
    assert operand.buffer is not None
    return MappedTensor(
        operand.buffer,
        offset * item_size(operand.dtype),
        operand.dtype,
        (*(size for size, _ in padded), *shape),
        (*(step for _, step in padded), row_stride, 1),
        (*(1,) * BATCH_RANK, box, CHUNK),
        2 * CHUNK,
    )
