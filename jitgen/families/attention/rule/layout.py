"""Layouts, geometries and parameters that attention and its backward have in common.

The kernels of both walk tiles of rows and keys, for each index of a batch; the dimensions of the batch are collapsed.
Dimensions of *groups* are walked within a kernel: attention packs their rows into one tile, its backward sums over
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.ir.views import Strided
from jitgen.kernel.geometry import Geometry
from jitgen.kernel.layout import unit_of
from jitgen.kernel.operands import Call, item_size
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared


@dataclass(frozen=True)
class TileLayout:
    """What of the strides decides the source. Device-neutral.

    Attributes:
        batch, groups: how many dimensions of these kinds there are, collapsed.
        operands: for each operand its kind; of those of scores ``"task"``, ``"row"``, ``"key"`` or ``"both"``, by what
            of a tile an element depends on.
        unit: the largest power of two, at most 16, that widths and the strides and addresses of contiguous operands are
            multiples of (GPU; else 1).
        wide: whether an index can reach 2**31, or a size 2**30.
    """

    batch: int
    groups: int
    operands: tuple[str, ...]
    unit: int
    wide: bool


@dataclass(frozen=True, kw_only=True)
class TileGeometry(Geometry):
    """A call's sizes; strides are along the batch, the groups, and an operand's own two dimensions. A dimension of one
    element has stride 0.

    Attributes:
        batch, groups: sizes of these dimensions, outermost first.
        rows, keys: of a tile: those of a block, and those that are streamed.
    """

    batch: tuple[int, ...]
    groups: tuple[int, ...]
    rows: int
    keys: int

    @property
    def tasks(self) -> int:
        return math.prod(self.batch)


def tile_parameters(kernel: Kernel, layout: TileLayout, sizes: Sequence[Integer]) -> KernelParameters:
    """The parameters of a kernel.

    The integers are ``rows``, ``keys`` and ``sizes``; ``b0`` ... the sizes of the batch and ``g0`` ... of groups; for
    each operand ``o<operand>``, the first value of an index, ``s<operand>_<dim>``, its strides, and
    ``n<operand>_<dim>`` and ``c<operand>_<dim>``, size and stride of a dimension that an index chooses along.
    """
    (body,) = kernel.bodies
    axes = [Integer("rows", "rows"), Integer("keys", "keys"), *sizes]
    axes += [Integer(f"b{dim}", "batch", dim=dim) for dim in range(layout.batch)]
    axes += [Integer(f"g{dim}", "groups", dim=dim) for dim in range(layout.groups)]
    strides = [""] * (layout.batch + layout.groups + 2)
    operands = [
        declared(
            operand,
            index,
            strides,
            gathered=tuple((f"n{index}_{dim}", f"c{index}_{dim}") for dim in range(operand.gathered)),
        )
        for index, operand in enumerate(body.operands)
    ]
    return KernelParameters((RegionParameters(tuple(axes), tuple(operands)),), layout.wide)


def unit_of_tiles(
    body: Body, geometry: Geometry, kinds: Sequence[str], sizes: Sequence[int], call: Call, inner: Mapping[str, int]
) -> int:
    """See ``TileLayout.unit``.

    Args:
        sizes: of the dimensions along which operands are contiguous.
        inner: which of an operand's own two dimensions that is, by its kind in the body; by default the second.
    """
    if not call.is_gpu:
        return 1
    accesses = []
    operands = zip(body.operands, kinds, geometry.strides, geometry.offsets, geometry.gathered, strict=True)
    for operand, kind, strides, offset, gathered in operands:
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            along = len(strides) - 2 + inner.get(operand.kind, 1)
            steps = [offset, *strides[:along], *strides[along + 1 :], *(step for _, step in gathered)]
            accesses.append((size, [call.buffers[operand.buffer].alignment, *(step * size for step in steps)]))
    return unit_of(sizes, accesses)


def free_strides(view: Strided) -> tuple[int, ...]:
    """The strides of ``view``; a dimension of one element has stride 0."""
    return tuple(0 if size == 1 else stride for size, stride in zip(view.sizes, view.strides, strict=True))


def score_kind(by_row: bool, by_key: bool) -> str:
    """The kind of an operand of scores, by what of a tile an element depends on; one of ``context.LEVELS``."""
    return "both" if by_row and by_key else "row" if by_row else "key" if by_key else "task"
