"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.sort.chunks import order_of
from jitgen.families.sort.layout import Geometry, Layout
from jitgen.families.sort.schedule import Schedule
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import OVERLAPS, Arguments, LaunchShape, Work
from jitgen.kernel.operands import item_size, pointwise_flops


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dim).

    ``length`` of a row; ``start`` and ``count`` of the ranks that are stored; ``ranks`` of a chunk, where chunks are
    merged; ``n0`` ... the outer sizes; ``s<operand>_<dim>`` an operand's stride in an outer dimension; ``r<operand>``
    its stride along the row where that is neither 0 nor 1; ``o<operand>`` an iota's first value.
    """
    (body,) = kernel.bodies
    for name in ("length", "start", "count", *(("ranks",) if is_merge(body) else ())):
        yield name, name, -1, -1
    for dim in range(layout.outer):
        yield f"n{dim}", "size", -1, dim
    for index, (operand, kind) in enumerate(zip(body.operands, layout.along, strict=True)):
        if operand.kind == "iota":
            yield f"o{index}", "offset", index, -1
        for dim in range(layout.outer):
            yield f"s{index}_{dim}", "stride", index, dim
        if kind == "strided":
            yield f"r{index}", "stride", index, layout.outer


def is_merge(body: Body) -> bool:
    """Whether ``body`` merges sorted chunks."""
    return any(instruction.op == "merge" for instruction in body.instructions)


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    pointers = tuple(
        (operand.buffer, offset * item_size(operand.dtype))
        for operand, offset in zip(body.operands, geometry.offsets, strict=True)
        if operand.buffer is not None
    )
    value = {
        "size": lambda operand, dim: geometry.sizes[dim],
        "offset": lambda operand, dim: geometry.offsets[operand],
        "stride": lambda operand, dim: geometry.strides[operand][dim],
    }
    integers = tuple(
        value[what](operand, dim) if what in value else getattr(geometry, what)
        for _, what, operand, dim in integer_names(kernel, layout)
    )
    return Arguments(pointers, integers, schedule.wide)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    """What one launch amounts to; a launch that stores nothing is none."""
    (geometry,), (body,) = geometries, kernel.bodies
    chunk = order_of(body).chunk
    chunks = -(-geometry.length // chunk) if chunk else 1
    moved = written = 0
    for operand, strides in zip(body.operands, geometry.strides, strict=True):
        if operand.buffer is not None:
            if operand.kind == "store":
                length = geometry.count if is_merge(body) else geometry.count * chunks
            else:
                length = geometry.ranks * chunks if is_merge(body) else geometry.length
            touched = item_size(operand.dtype)
            for extent, stride in zip((*geometry.sizes, length), strides, strict=True):
                touched *= extent if stride or operand.kind == "store" else 1
            moved += touched
            written += touched if operand.kind == "store" else 0
    flops = pointwise_flops(body.instructions, geometry.elements)
    return Work(geometry.elements if geometry.count else 0, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Blocks for as many rows as each sorts at once, for each chunk, or for each tile of what is merged; on a CPU, for
    each row."""
    (geometry,), (body,) = geometries, kernel.bodies
    chunk = order_of(body).chunk
    chunks = -(-geometry.length // chunk) if chunk else 1
    if is_merge(body):
        blocks = geometry.rows * -(-chunks * geometry.ranks // schedule.tile)
    else:
        blocks = -(-geometry.rows // schedule.rows) * chunks
    return LaunchShape(
        grid=(blocks, 1, 1),
        block=(schedule.threads, 1, 1),
        attributes=frozenset({OVERLAPS} if device.overlaps_launches else ()),
    )
