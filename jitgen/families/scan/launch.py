"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.scan.layout import Layout
from jitgen.families.scan.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Arguments, LaunchShape, Work, arguments_of, attributes_of
from jitgen.kernel.operands import pointwise_flops
from jitgen.kernel.rows import RowGeometry, row_integers, row_traffic


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[RowGeometry], schedule: Schedule, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    return arguments_of(body, geometry, row_integers(body, layout.outer, layout.along), schedule.wide)


def work(kernel: Kernel, geometries: Sequence[RowGeometry], schedule: Schedule) -> Work:
    """What one launch amounts to; rows without elements are none."""
    (geometry,), (body,) = geometries, kernel.bodies
    moved, written = row_traffic(body, geometry)
    flops = pointwise_flops(body.instructions, geometry.elements)
    return Work(geometry.elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[RowGeometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Blocks for as many rows as each has at once, of each chunk; on a CPU, pieces of work."""
    (geometry,), (body,) = geometries, kernel.bodies
    return LaunchShape(
        grid=(-(-geometry.rows // schedule.rows) * body.chunks, 1, 1),
        block=(schedule.threads, 1, 1),
        attributes=attributes_of(device),
    )
