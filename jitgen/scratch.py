"""Makes temporary files, in private directories that go when the work is done, or when a later process meets them.

A process that is killed cannot delete anything. So it keeps a lock on each of its directories, which the system drops
however the process ends, and another process deletes those that nobody has locked. Nothing else is written below the
system's temporary directory, except what people are to read (``keep``): sources that did not compile, and recordings
that could not be written where they should be. Those are deleted a day later.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SCRATCH = "jitgen-scratch-"
_KEPT = "jitgen-kept-"
_KEPT_SECONDS = 86400.0
_YOUNG_SECONDS = 5.0
"""The age, in seconds, below which an unlocked directory may be one that its maker is about to lock."""

_swept: set[tuple[int, str]] = set()
"""(process id, system's temporary directory): where this process has swept."""


@contextmanager
def directory() -> Iterator[Path]:
    """Makes a new private directory for as long as the context lasts."""
    _sweep_once()
    made = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    descriptor = os.open(made, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(descriptor)


def keep(name: str, text: str) -> str | None:
    """Writes ``text`` to a file called ``name`` that outlives this process, for a person to read; returns its path.

    One text has one file, however often it is kept, as by a service that calls what does not compile again and again.
    None where it cannot be written: whoever keeps a source has a worse error to report.
    """
    try:
        _sweep_once()
        path = _directory_of(f"{name} {text}") / name
        path.write_text(text)
    except OSError:
        return None
    return str(path)


def _directory_of(content: str) -> Path:
    """Returns the private directory of ``content``, made if this user has none; another one where somebody else has
    taken its name."""
    digest = hashlib.sha256(content.encode(errors="replace")).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"{_KEPT}{digest}")
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not (stat.S_ISDIR(status.st_mode) and _is_mine(status) and stat.S_IMODE(status.st_mode) == 0o700):
            return Path(tempfile.mkdtemp(prefix=_KEPT))
        os.utime(path)
    return path


def _sweep_once() -> None:
    swept_by = os.getpid(), tempfile.gettempdir()
    if swept_by not in _swept:
        _swept.add(swept_by)
        sweep()


def sweep() -> None:
    """Deletes what killed processes of this user left, and files that are old enough."""
    now = time.time()
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                age = now - status.st_mtime
                if not stat.S_ISDIR(status.st_mode) or not _is_mine(status):
                    continue
                if entry.name.startswith(_KEPT) and age > _KEPT_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name.startswith(_SCRATCH) and age > _YOUNG_SECONDS:
                    _delete_if_unlocked(entry.path)


def _delete_if_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        if _lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Returns whether this process now has the lock of an open directory; False where the system has no such locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _is_mine(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
