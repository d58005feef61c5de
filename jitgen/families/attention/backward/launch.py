"""What a launch of attention's backward is, and what it amounts to: needs no template, no compiler and no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.layout import BackwardGeometry, Layout, is_tile
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import LaunchShape, Persistence, Work, blocks_of, traffic
from jitgen.kernel.operands import WARP, pointwise_flops


def work(kernel: Kernel, geometries: Sequence[BackwardGeometry], schedule: Any) -> Work:
    """What one launch amounts to. Without streamed rows there is work too: the results are zeros. Masks are not
    counted."""
    (geometry,), (body,) = geometries, kernel.bodies
    rows = geometry.tasks * geometry.rows
    scores = rows * math.prod(geometry.groups) * geometry.keys
    elements = rows * sum(geometry.widths)
    widest = max((*geometry.depths, *geometry.widths))
    extents = {"left": (geometry.rows, widest), "right": (geometry.keys, widest), "value": (geometry.keys, widest)}
    extents["score"] = geometry.rows, geometry.keys
    walked = []
    for operand in body.operands:
        summed = (1,) * len(geometry.groups) if operand.kind == "store" else geometry.groups
        walked.append((*geometry.batch, *summed, *extents.get(operand.kind, (geometry.rows, widest))))
    moved, written = traffic(body, geometry.strides, walked)
    flops = 2 * scores * (sum(geometry.depths) + sum(geometry.widths))
    flops += sum(pointwise_flops(c.x, scores) for n, c in enumerate(body.contractions) if not is_tile(body, n))
    flops += pointwise_flops(body.instructions, elements)
    return Work(elements, written, moved, flops)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[BackwardGeometry], schedule: Any, device: Device
) -> LaunchShape:
    """A block of threads for each block of rows; on a CPU a piece of work for each task."""
    (geometry,) = geometries
    blocks = -(-geometry.rows // schedule.block_m) if device.is_gpu else 1
    if device.dialect == "cuda":
        persistence = Persistence("multiprocessors")
        count = max(geometry.tasks * blocks, 1)
        return blocks_of(count, schedule.threads, device, shared_bytes=schedule.shared_bytes, persistence=persistence)
    return blocks_of(max(geometry.tasks * blocks, 1), schedule.warps * WARP if device.is_gpu else 1, device)
