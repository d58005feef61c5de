"""Where the operands of attention lie: batch dimensions, collapsed, and two strides of each operand's own.

The batch is everything before the rows of the query. Along some of its dimensions all keys and values are the same
memory (heads that share keys). Where the rows are few, these dimensions are *packed*: their indices count rows too, so
that a tile of keys is read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.device import Device
from jitgen.families.attention.rule.layout import (
    TileGeometry,
    TileLayout,
    free_strides,
    score_kind,
    tile_parameters,
    unit_of_tiles,
)
from jitgen.families.attention.rule.narrow import MOST_INDEX
from jitgen.ir import symbols
from jitgen.ir.body import Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.geometry import gathered_of
from jitgen.kernel.layout import reaches_wide, views_of
from jitgen.kernel.operands import Call, base_of, collapse
from jitgen.kernel.parameters import Integer, KernelParameters

PACKED_ROWS = 32
"""Rows of the query up to which heads that share keys are packed."""
_INNER = {"value": 0, "value_source": 0}
"""Which of an operand's own two strides is along D or E: of others than these the second."""
_SHARED = ("key", "value", "key_source", "value_source")
SOURCES = ("key_source", "value_source")
"""Kinds of operand that keys or values are computed from."""


@dataclass(frozen=True)
class Layout(TileLayout):
    """The batch has the dimensions whose indices share no keys; groups have those that share them and count as rows.

    Operands that are not of scores are ``"contiguous"`` along D or E, ``"strided"``, ``"row"`` or ``"task"``, and
    ``"key"`` where they are the same for all elements of a key.

    Attributes:
        counts: whether all indices of keys that the rule reads step by 1 (GPU; else False).
    """

    counts: bool


@dataclass(frozen=True, kw_only=True)
class AttentionGeometry(TileGeometry):
    """A call's sizes and strides; ``depth`` and ``width`` are D and E."""

    depth: int
    width: int

    @property
    def packed_rows(self) -> int:
        """Rows that read the same keys."""
        return math.prod(self.groups) * self.rows


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[AttentionGeometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable where a movement needs a copy first."""
    (body,) = kernel.bodies
    *lead, rows, width = (symbols.evaluate(size, call.environment) for size in body.shape)
    depth, keys = (symbols.evaluate(contraction.length, call.environment) for contraction in body.contractions)
    views = views_of(body, call)
    rank = len(body.shape)
    free = [free_strides(view)[:rank] for view in views]
    gathered = gathered_of(views, rank)
    leader = body.stores[0]
    sizes, outer = collapse(tuple(lead), [strides[:-2] for strides in free], leader)
    shared = [
        all(outer[i][dim] == 0 for i, operand in enumerate(body.operands) if operand.kind in _SHARED)
        for dim in range(len(sizes))
    ]
    packed = [dim for dim, size in enumerate(sizes) if shared[dim] and size > 1 and rows <= PACKED_ROWS]
    batch = [dim for dim in range(len(sizes)) if dim not in packed] if len(packed) < len(sizes) else []
    strides = tuple(
        (*(walked[dim] for dim in (*batch, *packed)), *own[-2:]) for walked, own in zip(outer, free, strict=True)
    )
    geometry = AttentionGeometry(
        batch=tuple(sizes[dim] for dim in batch),
        groups=tuple(sizes[dim] for dim in packed),
        rows=rows,
        keys=keys,
        depth=depth,
        width=width,
        strides=strides,
        offsets=tuple(view.offset for view in views),
        gathered=gathered,
    )
    kinds = tuple(_kind(operand, step[len(batch) :]) for operand, step in zip(body.operands, strides, strict=True))
    large = [
        size
        for operand in body.operands
        if operand.buffer is None
        for size in base_of(operand, call.environment, call.buffers).sizes
    ]
    walked_sizes = ((*zip(v.sizes, f, strict=False), *g) for v, f, g in zip(views, free, gathered, strict=True))
    wide = reaches_wide(walked_sizes) or max((rows, keys, *large)) >= MOST_INDEX
    unit = unit_of_tiles(body, geometry, kinds, (depth, width), call, _INNER)
    steps = [step[-1] for o, step in zip(body.operands, strides, strict=True) if o.kind == "score" and o.buffer is None]
    counts = call.is_gpu and all(step in (0, 1) for step in steps)
    return (Layout(len(batch), len(packed), kinds, unit, wide, counts),), (geometry,)


def _kind(operand: Operand, strides: Sequence[int]) -> str:
    """The kind of an operand with ``strides`` along packed dimensions and its own two."""
    *packed, first, second = strides
    if operand.kind == "score":
        return score_kind(any((*packed, first)), second != 0)
    if operand.row:
        return "row"
    inner = (first, second)[_INNER.get(operand.kind, 1)]
    if operand.kind in SOURCES and inner == 0:
        return "key"
    return "contiguous" if inner == 1 else "strided"


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """The parameters of the kernel: ``depth`` and ``width`` are its own."""
    (layout,) = layouts
    return tile_parameters(kernel, layout, [Integer("depth", "depth"), Integer("width", "width")])
