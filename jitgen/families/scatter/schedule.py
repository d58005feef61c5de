"""Chooses how a scatter's threads share its grid dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.scatter.layout import Layout
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import count_operations
from jitgen.kernel.geometry import PointGeometry
from jitgen.kernel.launch import LaunchShape, blocks_of
from jitgen.schedule.declared import DeclaredSchedule

GPU_THREADS = 128
"""Threads of a block, each of which has one index of the grid dimensions."""


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Says how many ``threads`` a block has; 1 on a CPU, where threads share outer dimensions and cache lines of the
    inner one."""

    sentence = ("{threads} threads a block, each in order",)
    threads: int


@dataclass(frozen=True)
class CpuSchedule(Schedule):
    """Says how CPU threads share a scatter."""

    sentence = ("each thread in order",)


def candidates(problem: Any, device: Device) -> tuple[Schedule, ...]:
    return (Schedule(GPU_THREADS) if device.is_gpu else CpuSchedule(1),)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[PointGeometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Launches a thread for each index of the grid dimensions."""
    (layout,), (geometry,) = layouts, geometries
    threads = math.prod((*geometry.sizes[: layout.outer], *geometry.sizes[layout.outer + layout.walked :]))
    return blocks_of(max(1, -(-threads // schedule.threads)), schedule.threads, device)


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and who goes through the values."""
    (layout,), (body,) = layouts, kernel.bodies
    kinds = [instruction.attr[1] for instruction in body.instructions if instruction.op == "scatter"]
    return [
        f"scatter by {', '.join(kinds)}, into memory that holds the base",
        f"values that may choose one element are taken in their order by one thread; {layout.walked} dimension"
        f"{'s' * (layout.walked > 1)} of them, within {layout.outer + layout.inner} that threads share",
        f"{count_operations(body)} operations",
    ]
