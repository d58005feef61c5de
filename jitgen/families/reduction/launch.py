"""From a call's geometry to the arguments and the shape of a launch: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Sequence

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
from jitgen.families.reduction.layout import RowLayout
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import Arguments, LaunchShape, Persistence, Work, arguments_of, attributes_of
from jitgen.kernel.operands import pointwise_flops
from jitgen.kernel.rows import RowGeometry, row_integers, row_traffic


def arguments(
    kernel: Kernel,
    layouts: Sequence[RowLayout],
    geometries: Sequence[RowGeometry],
    schedule: RowSchedule,
    device: Device,
) -> Arguments:
    """The arguments of one launch."""
    (layout,), (geometry,), (body,) = layouts, geometries, kernel.bodies
    return arguments_of(body, geometry, row_integers(body, layout.outer, layout.operands), schedule.wide)


def work(kernel: Kernel, geometries: Sequence[RowGeometry], schedule: RowSchedule) -> Work:
    """What one launch amounts to. Rows of length 0 count as one element each, so that the launch is not skipped: their
    sums are 0."""
    (geometry,), (body,) = geometries, kernel.bodies
    moved, written = row_traffic(body, geometry)
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
    if isinstance(schedule, HostRows):
        return LaunchShape(grid=(-(-geometry.rows // schedule.tile_rows), 1, 1))
    iterated = schedule.rows_per_iteration if isinstance(schedule, LoopedRows | ResidentRows) else 1
    cluster = schedule.cluster if isinstance(schedule, CudaRows) else 1
    return LaunchShape(
        grid=(-(-geometry.rows // (schedule.rows_per_block * iterated)) * cluster, 1, 1),
        block=(schedule.block_threads, 1, 1),
        cluster=cluster,
        shared_bytes=0 if isinstance(schedule, TritonRows) else schedule.shared_bytes,
        attributes=attributes_of(device),
        persistence=Persistence("clusters") if isinstance(schedule, PersistentRows) else None,
    )
