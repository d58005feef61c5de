"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.families.elementwise.schedule import Schedule
from jitgen.families.layout import Geometry, LaunchArguments, Layout, item_size, pointwise_flops
from jitgen.ir.program import Kernel


def integer_names(kernel: Kernel, layouts: Sequence[Layout], tiled: bool) -> Iterator[tuple[int, str, int, int]]:
    """The integer parameters in order, as (region, what, operand, dim).

    ``what`` is ``size`` (of dim), ``stride`` (of operand in dim, only where it is not 0 or 1 by its kind), ``offset``
    (an iota's first value), or, where a grid is shared by several regions (``tiled``), ``end``: where a region's
    blocks end and the next one's begin.
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
        if tiled and region + 1 < len(layouts):
            yield region, "end", -1, -1


def launch_arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, tiled: bool
) -> LaunchArguments:
    """The arguments of one launch. ``tiled``: a GPU grid, one block per tile."""
    pointers, ends, elements, written, moved = [], [], 0, 0, 0
    blocks = 0
    for region, (body, geometry) in enumerate(zip(kernel.bodies, geometries, strict=True)):
        for operand, offset, strides in zip(body.operands, geometry.offsets, geometry.strides, strict=True):
            if operand.buffer is not None:
                size = item_size(operand.dtype)
                pointers.append((operand.buffer, offset * size))
                touched = size
                for extent, stride in zip(geometry.sizes, strides, strict=True):
                    touched *= extent if stride else 1
                moved += touched
                written += touched if operand.kind == "store" else 0
        elements += geometry.elements
        vector = schedule.vectors[region]
        rows = geometry.elements // geometry.sizes[-1] if geometry.elements else 0
        steps = rows * -(-geometry.sizes[-1] // vector)
        blocks += -(-steps // (schedule.threads * schedule.unrolls[region]))
        ends.append(blocks)
    values = {"size": lambda r, o, d: geometries[r].sizes[d], "end": lambda r, o, d: ends[r]}
    values["stride"] = lambda r, o, d: geometries[r].strides[o][d]
    values["offset"] = lambda r, o, d: geometries[r].offsets[o]
    integers = tuple(values[what](r, o, d) for r, what, o, d in integer_names(kernel, layouts, tiled))
    pairs = zip(kernel.bodies, geometries, strict=True)
    flops = sum(pointwise_flops(body.instructions, geometry.elements) for body, geometry in pairs)
    return LaunchArguments(tuple(pointers), integers, blocks, elements, written, moved, flops)
