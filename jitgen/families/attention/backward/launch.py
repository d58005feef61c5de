"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.layout import Geometry, Layout, is_tile, results_of
from jitgen.families.attention.rule.launch import integers_of_operands, programs
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import (
    Arguments,
    Integer,
    LaunchShape,
    Persistence,
    Work,
    arguments_of,
    attributes_of,
    traffic,
)
from jitgen.kernel.operands import MappedTensor, pointwise_flops


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[Integer]:
    """The integer parameters in order.

    ``rows`` and ``keys`` are the sizes of the whole tile, ``depth<t>`` what product ``t`` sums over, ``width<r>`` the
    columns of result ``r``; ``b0`` ... the sizes of the batch, ``g0`` ... of summed dimensions; then those of
    operands, with strides along (batch..., summed..., its own two).
    """
    (body,) = kernel.bodies
    results = len(results_of(body))
    yield "rows", "rows", -1, -1
    yield "keys", "keys", -1, -1
    for number in range(len(body.contractions) - results):
        yield f"depth{number}", "depths", -1, number
    for number in range(results):
        yield f"width{number}", "widths", -1, number
    for dim in range(layout.batch):
        yield f"b{dim}", "batch", -1, dim
    for dim in range(layout.summed):
        yield f"g{dim}", "summed", -1, dim
    yield from integers_of_operands(body, layout.batch + layout.summed + 2)


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    maps: tuple[MappedTensor, ...] = ()
    if device.dialect == "cuda" and geometry.tasks * geometry.rows * max(geometry.widths):
        from jitgen.families.attention.backward.wgmma import tensor_maps

        maps = tuple(tensor_maps(kernel, layout, geometry, schedule))
    return arguments_of(body, geometry, integer_names(kernel, layout), layout.wide, maps)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Any) -> Work:
    """What one launch amounts to. Without streamed rows there is work too: the results are zeros. Masks are not
    counted."""
    (geometry,), (body,) = geometries, kernel.bodies
    rows = geometry.tasks * geometry.rows
    scores = rows * geometry.groups * geometry.keys
    elements = rows * sum(geometry.widths)
    widest = max((*geometry.depths, *geometry.widths))
    extents = {"left": (geometry.rows, widest), "right": (geometry.keys, widest), "value": (geometry.keys, widest)}
    extents["score"] = geometry.rows, geometry.keys
    walked = []
    for operand in body.operands:
        summed = (1,) * len(geometry.summed) if operand.kind == "store" else geometry.summed
        walked.append((*geometry.batch, *summed, *extents.get(operand.kind, (geometry.rows, widest))))
    moved, written = traffic(body, geometry.strides, walked)
    flops = 2 * scores * (sum(geometry.depths) + sum(geometry.widths))
    flops += sum(pointwise_flops(c.x, scores) for n, c in enumerate(body.contractions) if not is_tile(body, n))
    flops += pointwise_flops(body.instructions, elements)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    blocks = -(-geometry.rows // schedule.block_m) if device.is_gpu else 1
    if device.dialect == "cuda":
        return LaunchShape(
            grid=(max(geometry.tasks * blocks, 1), 1, 1),
            block=(schedule.threads, 1, 1),
            shared_bytes=schedule.shared_bytes,
            attributes=attributes_of(device),
            persistence=Persistence("multiprocessors"),
        )
    return programs(geometry.tasks, blocks, schedule, device)
