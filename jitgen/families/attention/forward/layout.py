"""Lays out the operands of attention: batch dimensions, collapsed, and two strides of each operand's own.

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
    SOURCES,
    TileGeometry,
    TileLayout,
    addresses_of,
    free_strides,
    layout_attributes,
    tile_parameters,
)
from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import views_of
from jitgen.kernel.operands import Call, collapse
from jitgen.kernel.parameters import Integer, KernelParameters

PACKED_ROWS = 32
"""Rows of the query up to which heads that share keys are packed."""
_INNER = {"value": 0, "value_source": 0}
"""Which of an operand's own two strides is along D or E: of others than these the second."""
KEYS = ("key", "value", *SOURCES)
"""Kinds of operand that are keys or values, or that these are computed from."""


@dataclass(frozen=True)
class Layout(TileLayout):
    """Holds what the source depends on. The batch has the dimensions whose indices share no keys; the indices of groups
    share keys and count as rows.

    Operands that are not of scores are ``"contiguous"`` along D or E, ``"strided"``, ``"row"`` or ``"task"``, and
    ``"key"`` where they are the same for all elements of a key.

    Attributes:
        counts: whether all indices of keys that the rule reads step by 1 (GPU; else False).
    """

    counts: bool


@dataclass(frozen=True, kw_only=True)
class AttentionGeometry(TileGeometry):
    """Holds a call's sizes and strides; the indices of groups count rows."""

    @property
    def depth(self) -> int:
        """Returns D."""
        return self.depths[0]

    @property
    def width(self) -> int:
        """Returns E."""
        return self.widths[0]

    @property
    def task_rows(self) -> int:
        """Returns the rows that read the same keys."""
        return math.prod(self.groups) * self.rows

    @property
    def matrices(self) -> tuple[int, ...]:
        return self.batch


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[AttentionGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body; NotViewable if a movement needs a copy first."""
    (body,) = kernel.bodies
    *lead, rows, width = symbols.evaluated(body.shape, call.environment)
    depth, keys = (symbols.evaluate(contraction.length, call.environment) for contraction in body.contractions)
    views = views_of(body, call)
    free = [free_strides(view, len(body.shape)) for view in views]
    sizes, outer = collapse(tuple(lead), [strides[:-2] for strides in free], body.stores[0])
    if math.prod(sizes) == 1:  # as of any dimension of one element
        outer = ((0,) * len(sizes),) * len(free)
    shared = [
        all(outer[i][dim] == 0 for i, operand in enumerate(body.operands) if operand.kind in KEYS)
        for dim in range(len(sizes))
    ]
    packed = [dim for dim, size in enumerate(sizes) if shared[dim] and size > 1 and rows <= PACKED_ROWS]
    batch = [dim for dim in range(len(sizes)) if dim not in packed] if len(packed) < len(sizes) else []
    strides = tuple(
        (*(walked[dim] for dim in (*batch, *packed)), *own[-2:]) for walked, own in zip(outer, free, strict=True)
    )
    geometry = AttentionGeometry(
        **addresses_of(body, views, strides),
        batch=tuple(sizes[dim] for dim in batch),
        groups=tuple(sizes[dim] for dim in packed),
        rows=rows,
        keys=keys,
        depths=(depth,),
        widths=(width,),
    )
    steps = [step[-1] for o, step in zip(body.operands, strides, strict=True) if o.kind == "score" and o.buffer is None]
    counts = call.is_gpu and all(step in (0, 1) for step in steps)
    shared_layout = layout_attributes(body, geometry, views, call, packs=True, inner=_INNER)
    return (Layout(**shared_layout, counts=counts),), (geometry,)


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel: ``depth`` and ``width`` are its own."""
    (layout,) = layouts
    return tile_parameters(kernel, layout, [Integer("depth", "depth"), Integer("width", "width")])
