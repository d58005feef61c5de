"""What a launch of attention is, and what it amounts to: needs no template, no compiler and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward.layout import AttentionGeometry, Layout
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import LaunchShape, Persistence, Work, blocks_of, traffic
from jitgen.kernel.operands import WARP, pointwise_flops


def work(kernel: Kernel, geometries: Sequence[AttentionGeometry], schedule: Any) -> Work:
    """What one launch amounts to. Without keys there is work too: the results are zeros. Masks are not counted."""
    (geometry,), (body,) = geometries, kernel.bodies
    rows = geometry.tasks * geometry.packed_rows
    scores, elements = rows * geometry.keys, rows * geometry.width
    extents = {"query": (geometry.rows, geometry.depth), "key": (geometry.keys, geometry.depth)}
    extents |= {"value": (geometry.width, geometry.keys), "score": (geometry.rows, geometry.keys)}
    extents |= {f"{kind}_source": extents[kind] for kind in ("key", "value")}
    outer = *geometry.batch, *geometry.groups
    walked = [
        (*outer, *extents.get(operand.kind, (geometry.rows, 1 if operand.row else geometry.width)))
        for operand in body.operands
    ]
    moved, written = traffic(body, geometry.strides, walked)
    flops = 2 * scores * (geometry.depth + geometry.width) + pointwise_flops(body.instructions, elements)
    flops += pointwise_flops(body.contractions[1].x, scores)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[AttentionGeometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows and range of keys; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    pieces = -(-geometry.packed_rows // schedule.block_m) * schedule.splits if device.is_gpu else 1
    if device.dialect == "cuda":
        from jitgen.families.attention.forward import decode, wgmma

        is_decode = isinstance(schedule, decode.DecodeSchedule)
        sharing = (decode if is_decode else wgmma).cluster(schedule, geometry, device.model)
        return blocks_of(
            sharing * max(geometry.tasks * pieces, 1),
            schedule.threads,
            device,
            cluster=sharing,
            any_cluster=schedule.cluster_splits > 1,
            shared_bytes=schedule.shared_bytes,
            persistence=None if is_decode else Persistence("clusters" if sharing > 1 else "multiprocessors"),
        )
    return blocks_of(max(geometry.tasks * pieces, 1), schedule.warps * WARP if device.is_gpu else 1, device)
