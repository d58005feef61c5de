"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.scatter.layout import Geometry, Layout
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Arguments, Integer, LaunchShape, Work, arguments_of, attributes_of, traffic
from jitgen.kernel.operands import pointwise_flops


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[Integer]:
    """The integer parameters in order.

    ``n0`` ... the sizes; ``s<operand>_<dim>`` an operand's stride, where ``Layout.last`` does not say it;
    ``o<operand>`` an iota's first value; ``b<dim>`` and ``g<dim>`` size and stride of a dimension of the result that an
    index chooses along.
    """
    (body,) = kernel.bodies
    for dim in range(layout.rank):
        yield f"n{dim}", "sizes", -1, dim
    for index, operand in enumerate(body.operands):
        if operand.kind == "iota":
            yield f"o{index}", "offsets", index, -1
        for dim in range(layout.rank - (layout.last[index] < 2)):
            yield f"s{index}_{dim}", "strides", index, dim
    (stored,) = body.stores
    for dim in range(body.operands[stored].gathered):
        yield f"b{dim}", "gathered_sizes", -1, dim
        yield f"g{dim}", "gathered_strides", -1, dim


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    return arguments_of(body, geometry, integer_names(kernel, layout), wide=True)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    """What one launch amounts to: an element of the result is read and written for each value."""
    (geometry,), (body,) = geometries, kernel.bodies
    elements = geometry.elements()
    moved, written = traffic(body, geometry.strides, [geometry.sizes] * len(body.operands))
    return Work(elements, written, moved + written, pointwise_flops(body.instructions, elements) + elements)


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
        attributes=attributes_of(device),
    )
