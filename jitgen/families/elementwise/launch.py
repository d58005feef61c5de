"""From a call's geometry to a launch: grid, arguments and the amount of work.

Neither a template nor a compiler nor a device is needed for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.elementwise.layout import Geometry, Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Arguments, LaunchShape, Work, attributes_of, pointers_of, traffic
from jitgen.kernel.operands import pointwise_flops


def integer_names(kernel: Kernel, layouts: Sequence[Layout], tiled: bool) -> Iterator[tuple[int, str, int, int]]:
    """The integer parameters in order, as (region, what, operand, dim).

    ``what`` is one of:

    * ``size``: of dimension ``dim``.
    * ``stride``: of the operand along ``dim``, where the operand's kind does not fix it to 0 or 1.
    * ``offset``: the first value of an iota.
    * ``gathered size``, ``gathered stride``: of dimension ``dim`` of those that an index chooses along.
    * ``end``: the number of the block after the region's last one, where regions share a grid (``tiled``).
    """
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        for dim in range(layout.rank):
            yield region, "size", -1, dim
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
            if operand.kind == "iota":
                yield region, "offset", index, -1
            if kind == "scalar":
                continue
            for dim in range(layout.rank - (kind != "strided")):
                yield region, "stride", index, dim
            for dim in range(operand.gathered):
                yield region, "gathered size", index, dim
                if not layout.neighbours[index][dim]:
                    yield region, "gathered stride", index, dim
        if tiled and region + 1 < len(layouts):
            yield region, "end", -1, -1


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> Arguments:
    """The arguments of one launch."""
    ends = list(itertools.accumulate(_blocks(geometries, schedule)))
    values = {"size": lambda r, o, d: geometries[r].sizes[d], "end": lambda r, o, d: ends[r]}
    values["stride"] = lambda r, o, d: geometries[r].strides[o][d]
    values["gathered size"] = lambda r, o, d: geometries[r].gathered[o][d][0]
    values["gathered stride"] = lambda r, o, d: geometries[r].gathered[o][d][1]
    values["offset"] = lambda r, o, d: geometries[r].offsets[o]
    integers = tuple(values[what](r, o, d) for r, what, o, d in integer_names(kernel, layouts, device.is_gpu))
    return Arguments(pointers_of(kernel.bodies, geometries), integers, schedule.wide)


def _blocks(geometries: Sequence[Geometry], schedule: Schedule) -> Iterator[int]:
    """The blocks of each region."""
    for region, geometry in enumerate(geometries):
        rows = geometry.elements // geometry.sizes[-1] if geometry.elements else 0
        steps = rows * -(-geometry.sizes[-1] // schedule.vectors[region])
        yield -(-steps // (schedule.threads * schedule.unrolls[region]))


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    """The amount of work of one launch."""
    elements = written = moved = flops = 0
    for body, geometry in zip(kernel.bodies, geometries, strict=True):
        read_and_written, stored = traffic(body, geometry.strides, [geometry.sizes] * len(body.operands))
        moved += read_and_written
        written += stored
        elements += geometry.elements
        flops += pointwise_flops(body.instructions, geometry.elements)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Blocks for the tiles of each region, one region after the other."""
    return LaunchShape(
        grid=(sum(_blocks(geometries, schedule)), 1, 1),
        block=(schedule.threads, 1, 1),
        attributes=attributes_of(device),
    )
