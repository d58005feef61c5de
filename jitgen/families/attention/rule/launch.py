"""Describes a launch of attention or of its gradients, and counts its work; needs no template, compiler or device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.rule.layout import TileGeometry, TileLayout, results_of
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import LaunchShape, Work, blocks_of
from jitgen.kernel.launch import work as pointwise_work
from jitgen.kernel.operands import pointwise_flops


def work(kernel: Kernel, geometries: Sequence[TileGeometry], schedule: Any) -> Work:
    """Counts the bytes and operations of one launch; scores that masks hide are counted too. A launch without keys has
    work: its results are zeros."""
    (geometry,), (body,) = geometries, kernel.bodies
    scores = geometry.tasks * math.prod(geometry.groups) * geometry.rows * geometry.keys
    flops = 2 * scores * (sum(geometry.depths) + sum(geometry.widths))
    flops += sum(pointwise_flops(body.contractions[number].x, scores) for number in results_of(body))
    return pointwise_work(kernel, geometries, schedule, flops=flops)


def launch(
    kernel: Kernel, layouts: Sequence[TileLayout], geometries: Sequence[TileGeometry], schedule: Any, device: Device
) -> LaunchShape:
    """Returns a block of threads, or a cluster, for each block of rows and range of keys; on a CPU a piece of work for
    each task."""
    (geometry,) = geometries
    if not device.is_gpu:
        return blocks_of(max(geometry.tasks, 1), 1, device)
    count = max(geometry.tasks * -(-geometry.task_rows // schedule.block_m) * schedule.splits, 1)
    if device.dialect != "cuda":
        return blocks_of(count, schedule.threads, device)
    sharing = 1 if device.batch_invariant else schedule.cluster(geometry, device.model)
    return blocks_of(
        sharing * count,
        schedule.threads,
        device,
        cluster=sharing,
        any_cluster=schedule.cluster_splits > 1,
        shared_bytes=schedule.shared_bytes,
        persistence=schedule.persistence(sharing),
    )
