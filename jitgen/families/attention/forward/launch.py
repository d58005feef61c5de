"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward.layout import Geometry, Layout
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

    ``rows``, ``keys``, ``depth`` and ``width`` are M, N, D and E; ``b0`` ... the sizes of the batch, ``g0`` ... of
    packed dimensions; then those of operands, with strides along (batch..., packed..., its own two).
    """
    for name in ("rows", "keys", "depth", "width"):
        yield name, name, -1, -1
    for dim in range(layout.batch):
        yield f"b{dim}", "batch", -1, dim
    for dim in range(layout.packed):
        yield f"g{dim}", "packed", -1, dim
    (body,) = kernel.bodies
    yield from integers_of_operands(body, layout.batch + layout.packed + 2)


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    maps: tuple[MappedTensor, ...] = ()
    if device.dialect == "cuda" and geometry.tasks * geometry.packed_rows * geometry.width:
        from jitgen.families.attention.forward.wgmma import tensor_maps

        maps = tuple(tensor_maps(kernel, layout, geometry, schedule))
    return arguments_of(body, geometry, integer_names(kernel, layout), layout.wide, maps)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Any) -> Work:
    """What one launch amounts to. Without keys there is work too: the results are zeros. Masks are not counted."""
    (geometry,), (body,) = geometries, kernel.bodies
    rows = geometry.tasks * geometry.packed_rows
    scores, elements = rows * geometry.keys, rows * geometry.width
    extents = {"query": (geometry.rows, geometry.depth), "key": (geometry.keys, geometry.depth)}
    extents |= {"value": (geometry.width, geometry.keys), "score": (geometry.rows, geometry.keys)}
    extents |= {f"{kind}_source": extents[kind] for kind in ("key", "value")}
    outer = *geometry.batch, *geometry.packed
    walked = [
        (*outer, *extents.get(operand.kind, (geometry.rows, 1 if operand.row else geometry.width)))
        for operand in body.operands
    ]
    moved, written = traffic(body, geometry.strides, walked)
    flops = 2 * scores * (geometry.depth + geometry.width) + pointwise_flops(body.instructions, elements)
    flops += pointwise_flops(body.contractions[1].x, scores)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows and range of keys; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    pieces = -(-geometry.packed_rows // schedule.block_m) * schedule.splits if device.is_gpu else 1
    if device.dialect == "cuda":
        from jitgen.families.attention.forward import decode, wgmma

        is_decode = isinstance(schedule, decode.DecodeSchedule)
        sharing = (decode if is_decode else wgmma).cluster(schedule, geometry, device.model)
        return LaunchShape(
            grid=(sharing * max(geometry.tasks * pieces, 1), 1, 1),
            block=(schedule.threads, 1, 1),
            cluster=sharing,
            any_cluster=schedule.cluster_splits > 1,
            shared_bytes=schedule.shared_bytes,
            attributes=attributes_of(device),
            persistence=None if is_decode else Persistence("clusters" if sharing > 1 else "multiprocessors"),
        )
    return programs(geometry.tasks, pieces, schedule, device)
