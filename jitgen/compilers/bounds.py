"""Counts the worker processes that this machine has processors and memory for, containers' limits included."""

from __future__ import annotations

import os
from pathlib import Path

WORKER_BYTES = 1200 * 2**20
"""Memory of a worker: torch takes 0.3 GB, NVRTC with CuTe's headers or g++ up to 0.8 GB more. A worker that has grown
beyond it is replaced."""

_CGROUP = Path("/sys/fs/cgroup")


def workers(asked: int | None = None) -> int:
    """Returns how many worker processes fit; at most ``asked`` for, and at least 1."""
    fit = min(processors(), available_bytes() // WORKER_BYTES)
    return max(1, fit if asked is None else min(asked, fit))


def processors() -> int:
    """Returns how many processors this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, int(quota) // int(period))
    return max(1, count)


def available_bytes() -> int:
    """Returns the bytes of memory that new processes can have; a great deal if the system does not say."""
    limits = [2**50]
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            limits.append(int(rest.split()[0]) * 1024)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        limits.append(int(limit) - int(used))
    return max(0, min(limits))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
