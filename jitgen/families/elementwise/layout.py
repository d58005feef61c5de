"""The strides of a pointwise kernel's operands, over as few dimensions as they allow.

``layout`` turns each operand's movements into strides, orders the region's dimensions by the strides of what it writes,
and merges neighbouring dimensions that every operand walks without a gap (PyTorch's TensorIterator does the same). It
runs in every call with new sizes. Its outcome has two halves:

* the *layout*, on which the generated source depends: collapsed rank, and for each operand whether its innermost
  stride is 1, 0 or something else; how many elements may be moved in one access; whether indices need 64 bits;
* the *geometry*: the sizes and strides a launch passes as plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.families.family import Call
from jitgen.families.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, base_of, collapse, item_size, locate
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.views import Memory


@dataclass(frozen=True)
class Layout:
    """What the source depends on of a region's strides. It is the same for every device.

    Attributes:
        rank: collapsed dimensions, at least 1; the last is the innermost.
        operands: for each operand ``"contiguous"`` (innermost stride 1), ``"broadcast"`` (innermost stride 0),
            ``"scalar"`` (every stride 0) or ``"strided"``.
        unit: the largest power of two of elements, at most 16, that every contiguous operand can move at once:
            addresses, outer strides and (above rank 1) the innermost size are multiples of it, up to 16 bytes.
        wide: whether an index can reach 2**31.
    """

    rank: int
    operands: tuple[str, ...]
    unit: int
    wide: bool


@dataclass(frozen=True)
class Geometry:
    """A region's sizes and strides in a call.

    Attributes:
        sizes: collapsed, outermost first.
        strides: per operand, in elements, one per collapsed dimension.
        offsets: per operand, in elements from the buffer's pointer.
        gathered: per operand, (size, stride) of each dimension that an index chooses along.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of each region of ``kernel``.

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    resolved = [_resolve_body(body, call) for body in kernel.bodies]
    return tuple(layout for layout, _ in resolved), tuple(geometry for _, geometry in resolved)


def _resolve_body(body: Body, call: Call) -> tuple[Layout, Geometry]:
    environment = call.environment
    sizes = tuple(symbols.evaluate(size, environment) for size in body.shape)
    views = [
        locate(operand.movements, base_of(operand, environment, call.buffers), environment) for operand in body.operands
    ]
    rank = len(sizes)
    collapsed, strides = collapse(sizes, [view.strides[:rank] for view in views], body.stores[0])
    gathered = tuple(tuple(zip(view.sizes[rank:], view.strides[rank:], strict=True)) for view in views)
    geometry = Geometry(collapsed, strides, tuple(view.offset for view in views), gathered)
    kinds = tuple(_kind(operand, stride) for operand, stride in zip(body.operands, strides, strict=True))
    reach = [
        sum((size - 1) * abs(step) for size, step in (*zip(collapsed, stride, strict=True), *chosen))
        for stride, chosen in zip(strides, gathered, strict=True)
    ]
    wide = geometry.elements >= INDEX_LIMIT or any(extent >= INDEX_LIMIT for extent in reach)
    unit = _unit(body, geometry, kinds, call.buffers) if call.is_gpu else 1
    return Layout(len(collapsed), kinds, unit, wide), geometry


def _kind(operand: Operand, strides: tuple[int, ...]) -> str:
    if operand.kind == "iota":
        return "strided"
    if operand.kind == "load" and not any(strides):
        return "scalar"
    return {1: "contiguous", 0: "broadcast"}.get(strides[-1], "strided")


def _unit(body: Body, geometry: Geometry, kinds: tuple[str, ...], buffers: Sequence[Memory]) -> int:
    unit = MAX_UNIT
    inner = geometry.sizes[-1]
    if len(geometry.sizes) > 1:
        while inner % unit:
            unit //= 2
    for operand, kind, strides, offset in zip(body.operands, kinds, geometry.strides, geometry.offsets, strict=True):
        if kind != "contiguous" or operand.buffer is None or operand.gathered:
            continue
        size = item_size(operand.dtype)
        steps = [offset * size, *(stride * size for stride in strides[:-1]), buffers[operand.buffer].alignment]
        while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
            unit //= 2
    return unit
