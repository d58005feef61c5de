"""Single flight: of all processes that miss a key, one compiles; the others wait and then repeat their look-up.

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
    """What became of the wish to be the one who compiles. Only ``OWNER`` is true."""

    OWNER = "this process has the lock"
    WITHOUT_LOCK = "there is no lock to be had; this process compiles, and writes what it compiled"
    OVERTAKING = "the owner did not finish in time; this process compiles, for itself alone"

    @property
    def may_publish(self) -> bool:
        """Whether what this process compiles goes into the store."""
        return self is not Flight.OVERTAKING

    def __bool__(self) -> bool:
        return self is Flight.OWNER


@contextmanager
def single_flight(root: Path, key: str, patience: float) -> Iterator[Flight]:
    """A context in which this process has the lock of ``key``, if it got it within ``patience`` seconds.

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
