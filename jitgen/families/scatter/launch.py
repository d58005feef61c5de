"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.scatter.layout import Geometry, Layout
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import OVERLAPS, Arguments, LaunchShape, Work
from jitgen.kernel.operands import item_size, pointwise_flops


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dim).

    ``n0`` ... the sizes; ``s<operand>_<dim>`` an operand's stride, where ``Layout.last`` does not say it;
    ``o<operand>`` an iota's first value; ``b<dim>`` and ``g<dim>`` size and stride of a dimension of the result that an
    index chooses along.
    """
    (body,) = kernel.bodies
    for dim in range(layout.rank):
        yield f"n{dim}", "size", -1, dim
    for index, operand in enumerate(body.operands):
        if operand.kind == "iota":
            yield f"o{index}", "offset", index, -1
        for dim in range(layout.rank - (layout.last[index] < 2)):
            yield f"s{index}_{dim}", "stride", index, dim
    (stored,) = body.stores
    for dim in range(body.operands[stored].gathered):
        yield f"b{dim}", "gathered size", -1, dim
        yield f"g{dim}", "gathered stride", -1, dim


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
        "gathered size": lambda operand, dim: geometry.gathered[dim][0],
        "gathered stride": lambda operand, dim: geometry.gathered[dim][1],
    }
    integers = tuple(value[what](operand, dim) for _, what, operand, dim in integer_names(kernel, layout))
    return Arguments(pointers, integers, True)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    """What one launch amounts to: an element of the result is read and written for each value."""
    (geometry,), (body,) = geometries, kernel.bodies
    elements, moved, written = geometry.elements(), 0, 0
    for operand, strides in zip(body.operands, geometry.strides, strict=True):
        if operand.kind == "store":
            written = elements * item_size(operand.dtype)
            moved += 2 * written
        elif operand.buffer is not None:
            touched = item_size(operand.dtype)
            for extent, stride in zip(geometry.sizes, strides, strict=True):
                touched *= extent if stride else 1
            moved += touched
    return Work(elements, written, moved, pointwise_flops(body.instructions, elements) + elements)


def threads_at_work(layout: Layout, geometry: Geometry) -> int:
    """Indices of the grid dimensions, each of which a thread of a GPU has."""
    walked = range(layout.outer, layout.outer + layout.walked)
    return geometry.elements([dim for dim in range(layout.rank) if dim not in walked])


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """A thread for each index of the grid dimensions."""
    (layout,), (geometry,) = layouts, geometries
    return LaunchShape(
        grid=(max(1, -(-threads_at_work(layout, geometry) // schedule.threads)), 1, 1),
        block=(schedule.threads, 1, 1),
        attributes=frozenset({OVERLAPS} if device.overlaps_launches else ()),
    )
