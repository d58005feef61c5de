"""Single flight: of all processes that miss a key, one compiles; the others wait and then repeat their look-up.

The lock only saves work. Where it is not available (a read-only store, a file system without locks, a process that
hangs while it has the lock), two processes compile the same kernel, and the store keeps the first result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jitgen.store.atomic import make_root
from jitgen.store.layout import locks_path

PATIENCE_SECONDS = 600.0
"""How long a process waits for another one's compilation before it compiles as well, in seconds.
The slowest compiler, ``load_inline``, takes about a minute."""


@contextmanager
def single_flight(root: Path, key: str, patience: float = PATIENCE_SECONDS) -> Iterator[bool]:
    """A context in which this process has the lock of ``key``; yields whether it got it. Not reentrant."""
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
