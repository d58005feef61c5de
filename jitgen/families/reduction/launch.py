"""From a call's geometry to the arguments and the shape of a launch: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitgen.device import Device
from jitgen.families.reduction.forms import (
    CudaRows,
    HostRows,
    LoopedRows,
    PersistentRows,
    ResidentRows,
    RowSchedule,
    TritonRows,
)
from jitgen.families.reduction.layout import RowGeometry, RowLayout
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import OVERLAPS, Arguments, LaunchShape, Persistence, Work
from jitgen.kernel.operands import item_size, pointwise_flops


def integer_names(kernel: Kernel, layout: RowLayout) -> Iterator[tuple[str, str, int, int]]:
    """The integer parameters in order, as (name, what, operand, dimension).

    ``length`` is the length of a row; ``n0``, ... are the sizes of the outer dimensions; ``s<operand>_<dimension>`` is
    an operand's stride in an outer dimension, ``r<operand>`` its stride along the row where that is neither 0 nor 1,
    and ``o<operand>`` the first value of an iota.
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


def arguments(
    kernel: Kernel,
    layouts: Sequence[RowLayout],
    geometries: Sequence[RowGeometry],
    schedule: RowSchedule,
    device: Device,
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    pointers = tuple(
        (operand.buffer, offset * item_size(operand.dtype))
        for operand, offset in zip(body.operands, geometry.offsets, strict=True)
        if operand.buffer is not None
    )
    value = {
        "length": lambda o, d: geometry.length,
        "size": lambda o, d: geometry.sizes[d],
        "offset": lambda o, d: geometry.offsets[o],
        "stride": lambda o, d: geometry.strides[o][d],
    }
    integers = tuple(value[what](operand, dim) for _, what, operand, dim in integer_names(kernel, layout))
    return Arguments(pointers, integers, schedule.wide)


def work(kernel: Kernel, geometries: Sequence[RowGeometry], schedule: RowSchedule) -> Work:
    """What one launch amounts to. Rows of length 0 count as one element each, so that the launch is not skipped: their
    sums are 0."""
    (geometry,), (body,) = geometries, kernel.bodies
    extents = (*geometry.sizes, geometry.length)
    moved = written = 0
    for operand, strides in zip(body.operands, geometry.strides, strict=True):
        if operand.buffer is None:
            continue
        touched = item_size(operand.dtype)
        for extent, stride in zip(extents, strides, strict=True):
            touched *= extent if stride else 1
        moved += touched
        written += touched if operand.kind == "store" else 0
    elements = geometry.rows * max(geometry.length, 1)
    return Work(elements, written, moved, pointwise_flops(body.instructions, elements))


def launch(
    kernel: Kernel,
    layouts: Sequence[RowLayout],
    geometries: Sequence[RowGeometry],
    schedule: RowSchedule,
    device: Device,
) -> LaunchShape:
    """One cluster (mostly of one block) for the rows that its threads take; persistent clusters loop over them."""
    (geometry,) = geometries
    attributes = frozenset({OVERLAPS} if device.overlaps_launches else ())
    if isinstance(schedule, HostRows):
        return LaunchShape(grid=(-(-geometry.rows // schedule.tile_rows), 1, 1))
    iterated = schedule.rows_per_iteration if isinstance(schedule, LoopedRows | ResidentRows) else 1
    cluster = schedule.cluster if isinstance(schedule, CudaRows) else 1
    return LaunchShape(
        grid=(-(-geometry.rows // (schedule.rows_per_block * iterated)) * cluster, 1, 1),
        block=(schedule.block_threads, 1, 1),
        cluster=cluster,
        shared_bytes=0 if isinstance(schedule, TritonRows) else schedule.shared_bytes,
        attributes=attributes,
        persistence=Persistence("clusters") if isinstance(schedule, PersistentRows) else None,
    )
