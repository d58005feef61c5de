"""Where the operands of attention lie: batch dimensions, collapsed, and two strides of each operand's own.

The batch is everything before the rows of the query. Along some of its dimensions all keys and values are the same
memory (heads that share keys). Where the rows are few, these dimensions are *packed*: their indices count rows too, so
that a tile of keys is read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.families.attention.rule.layout import free_strides, score_kind
from jitgen.families.attention.rule.narrow import MOST_INDEX
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import reaches_wide, unit_of, views_of
from jitgen.kernel.operands import Call, base_of, collapse, item_size

PACKED_ROWS = 32
"""Rows of the query up to which heads that share keys are packed."""
_INNER = {"query": 1, "key": 1, "key_source": 1, "value": 0, "value_source": 0, "load": 1, "store": 1}
"""Which of an operand's own two strides is along D or E."""
_SHARED = ("key", "value", "key_source", "value_source")
SOURCES = ("key_source", "value_source")
"""Kinds of operand that keys or values are computed from."""


@dataclass(frozen=True)
class Layout:
    """What of the strides decides the source. Device-neutral.

    Attributes:
        batch: dimensions whose indices share no keys, collapsed.
        packed: dimensions whose indices share keys and count as rows.
        operands: for each operand: of scores ``"task"``, ``"row"``, ``"key"`` or ``"both"``, by what an element depends
            on beside the batch; of others ``"contiguous"`` along D or E, ``"strided"``, ``"row"`` or ``"task"``, and
            ``"key"`` where it is the same for all elements of a key.
        unit: the largest power of two, at most 16, that D, E and the strides and addresses of contiguous operands are
            multiples of (GPU; else 1).
        wide: whether an index can reach 2**31, or a size 2**30.
        counts: whether all indices of keys that the rule reads step by 1 (GPU; else False).
    """

    batch: int
    packed: int
    operands: tuple[str, ...]
    unit: int
    wide: bool
    counts: bool = False


@dataclass(frozen=True)
class Geometry:
    """A call's sizes and strides.

    Attributes:
        batch, packed: sizes of these dimensions, outermost first.
        rows, keys, depth, width: M, N, D and E.
        strides: for each operand, in elements: along the batch, the packed dimensions, and its own two. A dimension of
            one element has stride 0.
        offsets: for each operand, in elements from its buffer's pointer.
        gathered: for each operand, (size, stride) of each dimension that an index chooses along.
    """

    batch: tuple[int, ...]
    packed: tuple[int, ...]
    rows: int
    keys: int
    depth: int
    width: int
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def tasks(self) -> int:
        return math.prod(self.batch)

    @property
    def gathered_sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(size for size, _ in chosen) for chosen in self.gathered)

    @property
    def gathered_strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stride for _, stride in chosen) for chosen in self.gathered)

    @property
    def packed_rows(self) -> int:
        """Rows that read the same keys."""
        return math.prod(self.packed) * self.rows


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable where a movement needs a copy first."""
    (body,) = kernel.bodies
    *lead, rows, width = (symbols.evaluate(size, call.environment) for size in body.shape)
    depth, keys = (symbols.evaluate(contraction.length, call.environment) for contraction in body.contractions)
    views = views_of(body, call)
    rank = len(body.shape)
    free = [free_strides(view)[:rank] for view in views]
    gathered = tuple(tuple(zip(view.sizes[rank:], view.strides[rank:], strict=True)) for view in views)
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
    geometry = Geometry(
        tuple(sizes[dim] for dim in batch),
        tuple(sizes[dim] for dim in packed),
        rows,
        keys,
        depth,
        width,
        strides,
        tuple(view.offset for view in views),
        gathered,
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
    unit = _unit(body, geometry, kinds, call) if call.is_gpu else 1
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
    inner = (first, second)[_INNER[operand.kind if operand.kind in _INNER else "load"]]
    if operand.kind in SOURCES and inner == 0:
        return "key"
    return "contiguous" if inner == 1 else "strided"


def _unit(body: Body, geometry: Geometry, kinds: Sequence[str], call: Call) -> int:
    """See ``Layout.unit``."""
    accesses = []
    operands = zip(body.operands, kinds, geometry.strides, geometry.offsets, geometry.gathered, strict=True)
    for operand, kind, strides, offset, gathered in operands:
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            along = len(strides) - 2 + _INNER[operand.kind]
            steps = [offset, *strides[:along], *strides[along + 1 :], *(step for _, step in gathered)]
            accesses.append((size, [call.buffers[operand.buffer].alignment, *(step * size for step in steps)]))
    return unit_of((geometry.depth, geometry.width), accesses)
