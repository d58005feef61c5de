"""From a call's geometry to kernel arguments: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward.layout import Geometry, Layout
from jitgen.families.family import OVERLAPS, Arguments, LaunchShape, Persistence, Work
from jitgen.families.operands import WARP, MappedTensor, item_size, pointwise_flops
from jitgen.ir.program import Kernel


def integer_names(kernel: Kernel, layout: Layout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dim).

    ``rows``, ``keys``, ``depth`` and ``width`` are M, N, D and E; ``b0`` ... the sizes of the batch, ``g0`` ... of
    packed dimensions; ``o<operand>`` the first value of an index; ``s<operand>_<dim>`` an operand's stride along
    dimension ``dim`` of (batch..., packed..., its own two); ``n<operand>_<dim>`` and ``c<operand>_<dim>`` size and
    stride of a dimension that an index chooses along.
    """
    for name in ("rows", "keys", "depth", "width"):
        yield name, name, -1, -1
    for dim in range(layout.batch):
        yield f"b{dim}", "batch", -1, dim
    for dim in range(layout.packed):
        yield f"g{dim}", "packed", -1, dim
    (body,) = kernel.bodies
    for index, operand in enumerate(body.operands):
        if operand.buffer is None:
            yield f"o{index}", "offset", index, -1
        for dim in range(layout.batch + layout.packed + 2):
            yield f"s{index}_{dim}", "stride", index, dim
        for dim in range(operand.gathered):
            yield f"n{index}_{dim}", "gathered size", index, dim
            yield f"c{index}_{dim}", "gathered stride", index, dim


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
    value = {
        "batch": lambda operand, dim: geometry.batch[dim],
        "packed": lambda operand, dim: geometry.packed[dim],
        "offset": lambda operand, dim: geometry.offsets[operand],
        "stride": lambda operand, dim: geometry.strides[operand][dim],
        "gathered size": lambda operand, dim: geometry.gathered[operand][dim][0],
        "gathered stride": lambda operand, dim: geometry.gathered[operand][dim][1],
    }
    integers = tuple(
        getattr(geometry, what) if operand < 0 and dim < 0 else value[what](operand, dim)
        for _, what, operand, dim in integer_names(kernel, layout)
    )
    maps: tuple[MappedTensor, ...] = ()
    if device.dialect == "cuda" and geometry.tasks * geometry.packed_rows * geometry.width:
        from jitgen.families.attention.forward.wgmma import tensor_maps

        maps = tuple(tensor_maps(kernel, layout, geometry, schedule))
    return Arguments(pointers, integers, layout.wide, maps)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Any) -> Work:
    """What one launch amounts to. Without keys there is work too: the results are zeros. Masks are not counted."""
    (geometry,), (body,) = geometries, kernel.bodies
    rows = geometry.tasks * geometry.packed_rows
    scores, elements = rows * geometry.keys, rows * geometry.width
    extents = {"query": (geometry.rows, geometry.depth), "key": (geometry.keys, geometry.depth)}
    extents |= {"value": (geometry.width, geometry.keys), "score": (geometry.rows, geometry.keys)}
    extents |= {f"{kind}_source": extents[kind] for kind in ("key", "value")}
    moved = written = 0
    for operand, strides in zip(body.operands, geometry.strides, strict=True):
        if operand.buffer is None:
            continue
        own = extents.get(operand.kind, (geometry.rows, 1 if operand.row else geometry.width))
        touched = item_size(operand.dtype)
        for size, stride in zip((*geometry.batch, *geometry.packed, *own), strides, strict=True):
            touched *= size if stride or operand.kind == "store" or operand.gathered else 1
        moved += touched
        written += touched if operand.kind == "store" else 0
    flops = 2 * scores * (geometry.depth + geometry.width) + pointwise_flops(body.instructions, elements)
    flops += pointwise_flops(body.contractions[1].x, scores)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows and range of keys; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    if not device.is_gpu:
        return LaunchShape(grid=(max(geometry.tasks, 1), 1, 1))
    blocks = -(-geometry.packed_rows // schedule.block_m)
    attributes = frozenset({OVERLAPS} if device.overlaps_launches else ())
    if device.dialect == "cuda":
        from jitgen.families.attention.forward import decode, wgmma

        is_decode = isinstance(schedule, decode.DecodeSchedule)
        sharing = (decode if is_decode else wgmma).cluster(schedule, geometry, device.model)
        return LaunchShape(
            grid=(sharing * max(geometry.tasks * blocks * schedule.splits, 1), 1, 1),
            block=(schedule.threads, 1, 1),
            cluster=sharing,
            any_cluster=schedule.cluster_splits > 1,
            shared_bytes=schedule.shared_bytes,
            attributes=attributes,
            persistence=None if is_decode else Persistence("clusters" if sharing > 1 else "multiprocessors"),
        )
    return LaunchShape(
        grid=(max(geometry.tasks * blocks * schedule.splits, 1), 1, 1),
        block=(schedule.warps * WARP, 1, 1),
        attributes=attributes,
    )
