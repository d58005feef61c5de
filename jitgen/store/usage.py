"""Tracks which entries running processes use, and about how many bytes a store has, without walking it.

**In use.** Every process that uses entries of a store keeps one descriptor of ``<store>/v1/in-use``, an empty file, and
on it a shared lock of one byte for each entry, at an offset made of the entry's key. The system drops the locks when
the process ends, however it ends, and nothing is written. ``prune`` removes only what it can lock exclusively. These
are open-file-description locks, which Linux has: a process cannot lose them by closing another descriptor of the file.

**Size.** ``<store>/v1/size`` has one line with the bytes that the last walk counted, and then one line for each write,
appended. Lines of several processes do not mix, because each is one write of a few bytes. Below the limit many lines
become one, because every write reads them all; a line that another process appends meanwhile is lost.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jitgen.store import layout

try:
    import fcntl

    _SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None)
except ImportError:
    _SET_LOCK = None

_KEY_DIGITS = 15
"""Hex digits of a key that make its offset, which must be less than 2^63."""

_MOST_LINES = 200
"""Writes, in number, that are added up to one line."""

_descriptors: dict[Path, int] = {}
"""Store -> this process's descriptor of its ``in-use``."""


def hold(root: Path, keys: Iterable[str]) -> None:
    """Marks entries as used until this process ends, where the system and the store have such locks."""
    if _SET_LOCK is None:
        return
    with suppress(OSError):
        descriptor = _descriptors.get(root)
        if descriptor is None:
            descriptor = _descriptors[root] = _open(root)
        for key in keys:
            _lock(descriptor, fcntl.F_RDLCK, key)


@contextmanager
def unused(root: Path) -> Iterator[Unused]:
    """Provides ``prune`` with a test of whether an entry is used."""
    descriptor = None
    if _SET_LOCK is not None:
        with suppress(OSError):
            descriptor = _open(root)
    try:
        yield Unused(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


class Unused:
    """Tells whether entries are used by no process."""

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    def __call__(self, key: str) -> bool:
        """Returns whether nobody uses ``key``; from then on, and until the context ends, nobody can mark it as used."""
        if self._descriptor is None:
            return True
        try:
            _lock(self._descriptor, fcntl.F_WRLCK, key)
        except BlockingIOError:
            return False
        except OSError:  # the file system has no locks
            self._descriptor = None
        return True


def _open(root: Path) -> int:
    path = root / layout.VERSION / "in-use"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # a read-only store: others may be able to prune it
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(descriptor: int, kind: int, key: str) -> None:
    # struct flock of 64-bit Linux: type, whence, start, length, process id (0 for this kind of lock).
    assert _SET_LOCK is not None
    fcntl.fcntl(descriptor, _SET_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, int(key[:_KEY_DIGITS], 16), 1, 0))


# ------------------------------------------------------------------------------------------------------------- size


def note_written(root: Path, size: int, limit: int) -> bool:
    """Notes that ``size`` bytes were written; returns whether the store is to be walked and, if need be, trimmed.

    It is where nothing was counted yet, where the limit is another than at the last walk, and where the count exceeds
    the limit; but if the last walk could not get below the limit, only after two percent more.
    """
    path = _size_path(root)
    # Without O_NONBLOCK a FIFO in its place would be waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    with os.fdopen(descriptor, "rb+") as file:
        first, *lines = file.read().splitlines() or [b""]  # of a damaged file, any bytes
        file.write(f"{size}\n".encode())
    try:
        counted, limit_then = map(int, first.split())
        added = size + sum(map(int, lines))
    except ValueError:  # a new file, or one that was damaged
        return True
    if limit_then != limit:
        return True
    if counted + added > limit:
        return counted <= limit or added > limit // 50
    if len(lines) >= _MOST_LINES:
        note_counted(root, counted + added, limit)
    return False


def note_counted(root: Path, size: int, limit: int) -> None:
    """Notes what a walk counted, or what the lines amount to."""
    path = _size_path(root)
    with suppress(OSError):
        temporary = path.with_name(f"size-{os.getpid()}")
        temporary.write_text(f"{size} {limit}\n")
        os.replace(temporary, path)


def _size_path(root: Path) -> Path:
    return root / layout.VERSION / "size"
