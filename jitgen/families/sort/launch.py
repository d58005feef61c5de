"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.sort.chunks import order_of
from jitgen.families.sort.layout import Geometry, Layout
from jitgen.families.sort.schedule import Schedule
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Arguments, Integer, LaunchShape, Work, arguments_of, attributes_of, traffic
from jitgen.kernel.operands import pointwise_flops
from jitgen.kernel.rows import row_integers


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[Integer]:
    """The integer parameters in order: those of rows, whose lengths are ``length`` of a row, ``start`` and ``count`` of
    the ranks that are stored, and ``ranks`` of a chunk where chunks are merged."""
    (body,) = kernel.bodies
    lengths = ("length", "start", "count", *(("ranks",) if is_merge(body) else ()))
    return row_integers(body, layout.outer, layout.along, lengths)


def is_merge(body: Body) -> bool:
    """Whether ``body`` merges sorted chunks."""
    return any(instruction.op == "merge" for instruction in body.instructions)


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    return arguments_of(body, geometry, integer_names(kernel, layout), schedule.wide)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    """What one launch amounts to; a launch that stores nothing is none."""
    (geometry,), (body,) = geometries, kernel.bodies
    chunk = order_of(body).chunk
    chunks = -(-geometry.length // chunk) if chunk else 1
    if is_merge(body):
        read, stored = geometry.ranks * chunks, geometry.count
    else:
        read, stored = geometry.length, geometry.count * chunks
    extents = ((*geometry.sizes, stored if operand.kind == "store" else read) for operand in body.operands)
    moved, written = traffic(body, geometry.strides, extents)
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
        attributes=attributes_of(device),
    )
