"""Holds the limits of Hopper's tensor cores, and the tensor maps of operands of products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from jitgen.families.attention.rule.cuda import BATCH_RANK
from jitgen.families.attention.rule.layout import TileGeometry, TileLayout
from jitgen.families.attention.rule.schedule import TileSchedule
from jitgen.ir.body import Body
from jitgen.kernel.operands import ACCESS_BYTES, MappedTensor, item_size, mapped_tensor
from jitgen.spec import Target

WARPGROUP = 128
"""Threads of a warpgroup."""
ROWS = 64
"""Rows of a consumer warpgroup: those of a wgmma."""
CHUNK = 64
"""Elements of a row of shared memory, of 128 bytes."""
SHARED_BYTES = Target("cuda", "sm_90a").shared_bytes
"""Shared memory of a block at most, on every chip with wgmma."""
RESERVED_BYTES = 1024
"""Shared memory that each block takes besides."""


@dataclass(frozen=True, kw_only=True)
class WgmmaTiles(TileSchedule):
    """Schedules Hopper's tensor cores.

    Attributes:
        warpgroups: that compute, with 64 rows each; one more copies.
        stages: tiles in shared memory.
    """

    warpgroups: int
    stages: int

    @property
    def block_m(self) -> int:
        """Returns the rows of a block."""
        return self.warpgroups * ROWS

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block, as the header's ``Shape::bytes``."""
        raise NotImplementedError


W = TypeVar("W", bound=WgmmaTiles)


def with_most_stages(schedule: W, stages: Iterable[int], blocks: int = 1) -> W:
    """Returns ``schedule`` with the most of ``stages`` with which ``blocks`` blocks fit shared memory."""
    staged = (replace(schedule, stages=count) for count in stages)
    most = (SHARED_BYTES + RESERVED_BYTES) // blocks - RESERVED_BYTES
    fitting = [candidate for candidate in staged if candidate.shared_bytes <= most]
    return max(fitting, key=lambda candidate: candidate.stages)


class Mapped(NamedTuple):
    """Describes an operand of products as matrices that a tensor map may copy.

    Attributes:
        operand: its number.
        rows: of a matrix.
        along: which of the operand's own two dimensions they are along.
    """

    operand: int
    rows: int
    along: int = 0

    def is_copied(self, body: Body, layout: TileLayout, geometry: TileGeometry) -> bool:
        """Returns whether a tensor map can describe an operand: rows that begin at multiples of 16 bytes, strides that
        are not negative, and few dimensions in front."""
        strides, batch = geometry.strides[self.operand], len(geometry.matrices)
        return (
            layout.operands[self.operand] == "contiguous"
            and layout.unit * item_size(body.operands[self.operand].dtype) >= ACCESS_BYTES
            and batch <= BATCH_RANK
            and self.rows > 0
            and (strides[self.along - 2] > 0 or self.rows == 1)
            and min((0, *strides[:batch])) == 0
        )


def tensor_maps(
    body: Body, geometry: TileGeometry, copied: Iterable[tuple[Mapped, int, int]]
) -> Iterator[MappedTensor]:
    """Yields the tensor maps of operands with their columns, which are copied so many rows at a time."""
    for (operand, rows, along), columns, box in copied:
        steps = geometry.strides[operand]
        yield mapped_tensor(
            body.operands[operand],
            geometry.offsets[operand],
            list(zip(geometry.matrices, steps, strict=False)),
            BATCH_RANK,
            (rows, columns),
            steps[along - 2],
            (box, CHUNK),
        )
