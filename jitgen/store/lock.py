"""Single flight: of all the processes that miss one key, one compiles while the others wait and then look again.

The lock only saves work. Without it (a read-only store, a file system without locks, a holder that hangs) two
processes compile the same kernel, and the store keeps the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jitgen.store.atomic import make_root
from jitgen.store.layout import locks_path

PATIENCE_SECONDS = 600.0
"""How long to wait for another process's compile before doing it again; the slowest route takes a minute."""


@contextmanager
def single_flight(root: Path, key: str, patience: float = PATIENCE_SECONDS) -> Iterator[bool]:
    """Hold the lock of ``key``; yields whether it is held. Not reentrant."""
    from filelock import FileLock, Timeout

    lock = FileLock(locks_path(root) / f"{key}.lock", timeout=patience, poll_interval=0.02)
    try:
        make_root(root)
        locks_path(root).mkdir(exist_ok=True, mode=0o755)
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
