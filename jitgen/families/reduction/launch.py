"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.families.layout import LaunchArguments, item_size, pointwise_flops
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel


def integer_names(kernel: Kernel, layout: RowLayout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dim).

    ``length`` of a row; ``n0`` ... the outer sizes; ``s<operand>_<dim>`` an operand's stride in an outer dimension;
    ``r<operand>`` its stride along the row where that is neither 0 nor 1; ``o<operand>`` an iota's first value.
    """
    yield "length", "length", -1, -1
    for dim in range(layout.outer):
        yield f"n{dim}", "size", -1, dim
    (body,) = kernel.bodies
    for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
        if operand.kind == "iota":
            yield f"o{index}", "offset", index, -1
        for dim in range(layout.outer):
            yield f"s{index}_{dim}", "stride", index, dim
        if kind == "strided":
            yield f"r{index}", "stride", index, layout.outer


def launch_arguments(
    kernel: Kernel,
    layouts: Sequence[RowLayout],
    geometries: Sequence[RowGeometry],
    schedule: RowSchedule,
    tiled: bool,
) -> LaunchArguments:
    """The arguments of one launch. A kernel over rows of length 0 still runs: their sums are 0."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    pointers, moved, written = [], 0, 0
    extents = (*geometry.sizes, geometry.length)
    for operand, offset, strides in zip(body.operands, geometry.offsets, geometry.strides, strict=True):
        if operand.buffer is None:
            continue
        size = touched = item_size(operand.dtype)
        pointers.append((operand.buffer, offset * size))
        for extent, stride in zip(extents, strides, strict=True):
            touched *= extent if stride else 1
        moved += touched
        written += touched if operand.kind == "store" else 0
    value = {
        "length": lambda o, d: geometry.length,
        "size": lambda o, d: geometry.sizes[d],
        "offset": lambda o, d: geometry.offsets[o],
        "stride": lambda o, d: geometry.strides[o][d],
    }
    integers = tuple(value[what](operand, dim) for _, what, operand, dim in integer_names(kernel, layout))
    blocks = -(-geometry.rows // (schedule.rows * schedule.turns)) * schedule.cluster
    elements = geometry.rows * max(geometry.length, 1)
    flops = pointwise_flops(body.instructions, elements)
    return LaunchArguments(tuple(pointers), integers, blocks, elements, written, moved, flops)
