"""What a call's memory is in numbers, as all families have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.ir.views import Strided


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The numbers of a region's operands in one call, in elements.

    Attributes:
        strides: for each operand, along the axes of the region.
        offsets: for each operand, its first element's distance from its buffer's pointer; an index's first value.
        gathered: for each operand, (size, stride) of each dimension that a computed index chooses along.
    """

    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def gathered_sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(size for size, _ in chosen) for chosen in self.gathered)

    @property
    def gathered_strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stride for _, stride in chosen) for chosen in self.gathered)


def gathered_of(views: Sequence[Strided], rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``Geometry.gathered`` of operands that are walked in ``rank`` dimensions: what ``views`` have behind these."""
    return tuple(tuple(zip(view.sizes[rank:], view.strides[rank:], strict=True)) for view in views)
