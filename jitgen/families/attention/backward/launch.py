"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.layout import Geometry, Layout, is_tile, results_of
from jitgen.families.family import OVERLAPS, Arguments, LaunchShape, Persistence, Work
from jitgen.families.operands import WARP, MappedTensor, item_size, pointwise_flops
from jitgen.ir.program import Kernel


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dim).

    ``rows`` and ``keys`` are the sizes of the whole tile, ``depth<t>`` what product ``t`` sums over, ``width<r>`` the
    columns of result ``r``; ``b0`` ... the sizes of the batch, ``g0`` ... of summed dimensions; ``o<operand>`` the
    first value of an index; ``s<operand>_<dim>`` an operand's stride along (batch..., summed..., its own two).
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
    for index, operand in enumerate(body.operands):
        if operand.buffer is None:
            yield f"o{index}", "offsets", index, -1
        for dim in range(layout.batch + layout.summed + 2):
            yield f"s{index}_{dim}", "strides", index, dim


def arguments(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    pointers = tuple(
        (operand.buffer, offset * item_size(operand.dtype))
        for operand, offset in zip(body.operands, geometry.offsets, strict=True)
        if operand.buffer is not None
    )

    def value(what: str, operand: int, dim: int) -> int:
        found = getattr(geometry, what)
        found = found[operand] if operand >= 0 else found
        return int(found[dim] if dim >= 0 else found)

    integers = tuple(value(what, operand, dim) for _, what, operand, dim in integer_names(kernel, layout))
    maps: tuple[MappedTensor, ...] = ()
    if device.dialect == "cuda" and geometry.tasks * geometry.rows * max(geometry.widths):
        from jitgen.families.attention.backward.wgmma import tensor_maps

        maps = tuple(tensor_maps(kernel, layout, geometry, schedule))
    return Arguments(pointers, integers, layout.wide, maps)


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
    moved = written = 0
    for operand, strides in zip(body.operands, geometry.strides, strict=True):
        if operand.buffer is None:
            continue
        touched = item_size(operand.dtype)
        own = extents.get(operand.kind, (geometry.rows, widest))
        summed = (1,) * len(geometry.summed) if operand.kind == "store" else geometry.summed
        for size, stride in zip((*geometry.batch, *summed, *own), strides, strict=True):
            touched *= size if stride or operand.kind == "store" else 1
        moved += touched
        written += touched if operand.kind == "store" else 0
    flops = 2 * scores * (sum(geometry.depths) + sum(geometry.widths))
    flops += sum(pointwise_flops(c.x, scores) for n, c in enumerate(body.contractions) if not is_tile(body, n))
    flops += pointwise_flops(body.instructions, elements)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    if not device.is_gpu:
        return LaunchShape(grid=(max(geometry.tasks, 1), 1, 1))
    blocks = -(-geometry.rows // schedule.block_m)
    if device.dialect == "cuda":
        return LaunchShape(
            grid=(max(geometry.tasks * blocks, 1), 1, 1),
            block=(schedule.threads, 1, 1),
            shared_bytes=schedule.shared_bytes,
            attributes=frozenset({OVERLAPS} if device.overlaps_launches else ()),
            persistence=Persistence("multiprocessors"),
        )
    return LaunchShape(
        grid=(max(geometry.tasks * blocks, 1), 1, 1),
        block=(schedule.warps * WARP, 1, 1),
        attributes=frozenset({OVERLAPS} if device.overlaps_launches else ()),
    )
