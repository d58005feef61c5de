"""Lets one of all processes that miss a key compile; the others wait and then repeat their look-up (single flight).

The lock only saves work. Where it is not available (a read-only store, a file system without locks, a process that
hangs while it has the lock), two processes compile the same kernel, and the store keeps the first result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jitgen.store.atomic import make_root
from jitgen.store.layout import locks_path


class Flight(enum.Enum):
    """Says what became of the attempt to be the process that compiles. Only ``OWNER`` is true."""

    OWNER = "this process has the lock"
    WITHOUT_LOCK = "there is no lock to be had; this process compiles, and writes what it compiled"
    OVERTAKING = "the owner did not finish in time; this process compiles, for itself alone"

    @property
    def may_publish(self) -> bool:
        """Returns whether what this process compiles goes into the store."""
        return self is not Flight.OVERTAKING

    def __bool__(self) -> bool:
        return self is Flight.OWNER


@contextmanager
def single_flight(root: Path, key: str, patience: float) -> Iterator[Flight]:
    """Holds the lock of ``key`` within this context, if it was free within ``patience`` seconds.

    Not reentrant.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        yield Flight.WITHOUT_LOCK
        return
    lock = FileLock(locks_path(root) / f"{key}.lock", timeout=patience, poll_interval=0.02)
    try:
        make_root(root)
        locks_path(root).mkdir(exist_ok=True, mode=0o755)
        lock.acquire()
    except Timeout:
        yield Flight.OVERTAKING
        return
    except (OSError, NotImplementedError):
        yield Flight.WITHOUT_LOCK
        return
    try:
        yield Flight.OWNER
    finally:
        lock.release()
