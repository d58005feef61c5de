"""Writes files that several processes add to: under a lock beside the file, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jitgen.errors import CacheError

PATIENCE = 60.0
"""Seconds to wait for another process that writes the file."""


@contextmanager
def locked(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Holds the lock of ``path``, a file ``.<name>.lock`` beside it, from reading what is there until it is written.

    A process that is killed leaves the file as it was.

    Raises:
        CacheError: the lock cannot be had, or the block raises an ``OSError``.
    """
    try:
        from filelock import FileLock
    except ImportError:
        raise CacheError(
            f"{path} cannot be written: the package filelock is not installed; pip install filelock"
        ) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with FileLock(lock, timeout=patience):
            yield
            lock.unlink(missing_ok=True)  # a process that waits for it notices, and takes a new one
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error


def replace(path: Path, text: str) -> None:
    """Replaces the content of ``path``, whose lock is held, or leaves it as it is: a reader never meets half of it."""
    for stale in path.parent.glob(f".{path.name}.*.new"):  # of processes that were killed
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "x") as file:  # which follows no link that somebody put there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
