"""Where a pointwise kernel's operands lie: concrete strides, collapsed to as few dimensions as they allow.

``resolve`` is what a call with new sizes costs. It turns each operand's movements into strides, orders the region's
dimensions by the strides of what it writes, merges neighbours that every operand walks without a gap (PyTorch's
TensorIterator does the same), and splits the outcome in two:

* the *layout*, which decides what source is generated: collapsed rank, and for each operand whether its innermost
  stride is 1, 0 or something else; how many elements may be moved in one access; whether indices need 64 bits;
* the *geometry*: the sizes and strides a launch passes as plain integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.ir.views import Strided, apply

ITEM_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
"""Bytes of an element; every other dtype has one."""
ACCESS_BYTES = 16
"""The widest single access, and the widest alignment worth telling apart."""
CPU_LANES = 64
"""Elements that a CPU thread takes at once, whose vectors are computed side by side: a cache line or more of each
operand; in a reduction, each into an accumulator of its own."""
MAX_UNIT = 16
INDEX_LIMIT = 2**31 - 2**20
"""From here on indices are 64-bit: below it, even the last block's idle threads count within 32 bits."""


def item_size(dtype: str) -> int:
    return ITEM_SIZES.get(dtype, 1)


@dataclass(frozen=True)
class Memory:
    """A buffer at hand: its strides, its element size in bytes, and what its address is a multiple of (in bytes)."""

    view: Strided
    alignment: int = ACCESS_BYTES


@dataclass(frozen=True)
class Layout:
    """The part of a region's strides that decides its source. Device-neutral.

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
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count


@dataclass(frozen=True)
class LaunchArguments:
    """What a launch is given, and what it costs.

    Attributes:
        pointers: (buffer, byte offset) of each pointer parameter.
        integers: values of the integer parameters.
        blocks: of the grid (GPU).
        elements: computed in all; a launch of none is skipped.
        written: bytes written.
        moved: bytes read and written, each operand once.
        maps: matrices the kernel copies by tensor maps, its first parameters (``gemm/wgmma.MappedTensor``).
        flops: operations, by the weights of ``ir/ops.py``; a multiply-add of a product is two.
    """

    pointers: tuple[tuple[int, int], ...]
    integers: tuple[int, ...]
    blocks: int
    elements: int
    written: int
    moved: int
    flops: int
    maps: tuple[Any, ...] = ()


def pointwise_flops(instructions: Iterable[Instruction], elements: int) -> int:
    """Operations of ``instructions`` for so many elements; a reduction is one for each."""
    weights = (OPS[i.op].flops if i.op in OPS else int(i.op == "reduce") for i in instructions)
    return elements * sum(weights)


def resolve(
    kernel: Kernel, environment: Mapping[str, Any], buffers: Sequence[Memory], accesses: bool = True
) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of each region of ``kernel``; NotViewable when a movement needs a copy first.

    ``accesses``: whether the source depends on how wide accesses are; where the compiler sees to that (the CPU's
    does), one source serves every alignment, and ``unit`` is 1.
    """
    resolved = [_resolve_body(body, environment, buffers, accesses) for body in kernel.bodies]
    return tuple(layout for layout, _ in resolved), tuple(geometry for _, geometry in resolved)


def locate(movements: Any, base: Strided, environment: Mapping[str, Any]) -> Strided:
    """``base`` seen through ``movements``."""
    view = base
    for attrs, shape in movements:
        concrete = tuple(symbols.evaluate(part, environment) for part in attrs)
        view = apply(view, concrete, tuple(symbols.evaluate(size, environment) for size in shape))
    return view


def base_of(operand: Operand, environment: Mapping[str, Any], buffers: Sequence[Memory]) -> Strided:
    """The whole tensor an operand sees through its movements; an iota's is its index space."""
    if operand.buffer is not None:
        return buffers[operand.buffer].view
    sizes = tuple(symbols.evaluate(size, environment) for size in operand.shape)
    return Strided(sizes, tuple(int(dim == operand.dim) for dim in range(len(sizes))))


def _resolve_body(
    body: Body, environment: Mapping[str, Any], buffers: Sequence[Memory], accesses: bool
) -> tuple[Layout, Geometry]:
    sizes = tuple(symbols.evaluate(size, environment) for size in body.shape)
    views = [
        locate(operand.movements, base_of(operand, environment, buffers), environment) for operand in body.operands
    ]
    collapsed, strides = collapse(sizes, [view.strides for view in views], body.stores[0])
    geometry = Geometry(collapsed, strides, tuple(view.offset for view in views))
    kinds = tuple(_kind(operand, stride) for operand, stride in zip(body.operands, strides, strict=True))
    reach = [sum((size - 1) * abs(step) for size, step in zip(collapsed, stride, strict=True)) for stride in strides]
    wide = geometry.elements >= INDEX_LIMIT or any(extent >= INDEX_LIMIT for extent in reach)
    unit = _unit(body, geometry, kinds, buffers) if accesses else 1
    return Layout(len(collapsed), kinds, unit, wide), geometry


def collapse(
    sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]], store: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Sizes and strides with dimensions of 1 dropped and neighbours merged, ordered by operand ``store``'s strides."""
    dims = [dim for dim, size in enumerate(sizes) if size != 1]
    dims.sort(key=lambda dim: -abs(strides[store][dim]))
    merged_sizes: list[int] = []
    merged: list[list[int]] = []
    for dim in dims:
        step = [stride[dim] for stride in strides]
        if merged and all(outer == inner * sizes[dim] for outer, inner in zip(merged[-1], step, strict=True)):
            merged_sizes[-1] *= sizes[dim]
            merged[-1] = step
        else:
            merged_sizes.append(sizes[dim])
            merged.append(step)
    if not merged:
        merged_sizes, merged = [1], [[int(position >= store) for position in range(len(strides))]]
    return tuple(merged_sizes), tuple(zip(*merged, strict=True))


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
        if kind != "contiguous" or operand.buffer is None:
            continue
        size = item_size(operand.dtype)
        steps = [offset * size, *(stride * size for stride in strides[:-1]), buffers[operand.buffer].alignment]
        while unit > 1 and any(step % min(unit * size, ACCESS_BYTES) for step in steps):
            unit //= 2
    return unit


def output_strides(sizes: Sequence[int], like: Sequence[Strided]) -> tuple[int, ...]:
    """Strides for a new output: dense, in the order of the inputs where every full-sized one agrees, else row-major.

    As eager torch does, so that ``x.t() * 2`` walks memory in order and a channels-last input gives a channels-last
    output.
    """
    order: tuple[int, ...] | None = None
    for view in like:
        if view.sizes != tuple(sizes):
            continue
        dims = [dim for dim, size in enumerate(sizes) if size != 1]
        found = tuple(sorted(dims, key=lambda dim: -view.strides[dim]))
        step = 1
        for dim in reversed(found):
            if view.strides[dim] != step:
                return _row_major(sizes)
            step *= sizes[dim]
        if order is not None and found != order:
            return _row_major(sizes)
        order = found
    if order is None:
        return _row_major(sizes)
    rest = [dim for dim in range(len(sizes)) if sizes[dim] == 1]
    strides = [1] * len(sizes)
    step = 1
    for dim in reversed([*rest, *order]):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    from jitgen.ir.views import contiguous_strides

    return contiguous_strides(sizes)
