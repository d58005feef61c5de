"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.families.gemm import wgmma
from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.layout import LaunchArguments, item_size, pointwise_flops
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel

_FREE_STRIDES = {"full": (0,), "row": (0,), "strided": (0, 1), "k": (0,), "outer": (1,)}
"""Which of an operand's two strides are run-time integers, by its kind in the layout."""


def integer_names(kernel: Kernel, layouts: Sequence[GemmLayout]) -> Iterator[tuple[str, str, int, int, int]]:
    """The integer parameters in order, as (name, what, region, operand, dim).

    ``m`` and ``k`` of the whole kernel; for each region ``n<region>``; ``o<region>_<operand>`` an iota's first value;
    ``s<region>_<operand>_<dim>`` those strides that the operand's kind leaves open (dim 0 is the row, or a dense
    weight's column; dim 1 the column, or K).
    """
    yield "m", "rows", 0, -1, -1
    yield "k", "length", 0, -1, -1
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        yield f"n{region}", "columns", region, -1, -1
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
            if operand.kind == "iota":
                yield f"o{region}_{index}", "offset", region, index, -1
            for dim in _FREE_STRIDES.get(kind, ()):
                yield f"s{region}_{index}_{dim}", "stride", region, index, dim


def launch_arguments(
    kernel: Kernel,
    layouts: Sequence[GemmLayout],
    geometries: Sequence[GemmGeometry],
    schedule: GemmSchedule,
    tiled: bool,
) -> LaunchArguments:
    """The arguments of one launch. A product over K = 0 still runs: its accumulator is 0."""
    pointers, written, moved = [], 0, 0
    seen: set[tuple[int, int]] = set()
    for body, geometry in zip(kernel.bodies, geometries, strict=True):
        for operand, offset, extent in zip(body.operands, geometry.offsets, geometry.extents, strict=True):
            if operand.buffer is None:
                continue
            size = item_size(operand.dtype)
            pointers.append((operand.buffer, offset * size))
            if operand.kind == "store":
                written += schedule.parts * extent * size
            elif (operand.buffer, offset) not in seen:
                moved += extent * size
            seen.add((operand.buffer, offset))
    value = {
        "rows": lambda r, o, d: geometries[r].rows,
        "length": lambda r, o, d: geometries[r].length,
        "columns": lambda r, o, d: geometries[r].columns,
        "offset": lambda r, o, d: geometries[r].offsets[o],
        "stride": lambda r, o, d: geometries[r].strides[o][d],
    }
    integers = tuple(value[what](r, o, d) for _, what, r, o, d in integer_names(kernel, layouts))
    elements = sum(geometry.elements for geometry in geometries)
    blocks = schedule.blocks([(geometry.rows, geometry.columns) for geometry in geometries])
    pairs = zip(kernel.bodies, geometries, strict=True)
    flops = sum(_flops(body, geometry) for body, geometry in pairs)
    maps = tuple(wgmma.tensor_maps(kernel.bodies, layouts, geometries, schedule)) if elements and schedule.maps else ()
    return LaunchArguments(tuple(pointers), integers, blocks, elements, written, moved + written, flops, maps)


def _flops(body: Body, geometry: GemmGeometry) -> int:
    total = pointwise_flops(body.instructions, geometry.elements)
    for contraction in body.contractions:
        total += 2 * geometry.elements * geometry.length
        total += pointwise_flops(contraction.x, geometry.rows * geometry.length)
    return total
