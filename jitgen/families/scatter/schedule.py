"""How a scatter's threads share its grid dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitgen.device import Device

GPU_THREADS = 128
"""Threads of a block, each of which has one index of the grid dimensions."""


@dataclass(frozen=True)
class Schedule:
    """``threads`` of a block; 1 on a CPU, where threads share outer dimensions and cache lines of the inner one."""

    threads: int

    def __str__(self) -> str:
        return "each thread in order" if self.threads == 1 else f"{self.threads} threads a block, each in order"


def candidates(problem: Any, device: Device) -> tuple[Schedule, ...]:
    return (Schedule(GPU_THREADS if device.is_gpu else 1),)
