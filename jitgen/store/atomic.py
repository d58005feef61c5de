"""Writes atomically: no reader ever sees an incomplete entry, at whatever instant a writer is killed.

An entry is first written to the store's own ``tmp``, which is on the same file system, so that a rename is atomic. Each
file and then the directory are fsynced, the directory is renamed to its final path, and the parent is fsynced; this is
the order that LWN's and SQLite's notes on crash safety give. A killed writer leaves a directory in ``tmp``, which a
later writer deletes once it is an hour old. A damaged entry is not deleted but moved to ``quarantine``.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jitgen.store.layout import locks_path, quarantine_path, staging_path

STALE_SECONDS = 3600.0
"""The age, in seconds, from which leftovers are deleted. Writing an entry takes milliseconds."""
QUARANTINE_SECONDS = 7 * 86400.0
"""The age, in seconds, from which damaged entries that were set aside are deleted: people can look at them."""

IsWhole = Callable[[Path], bool]
"""Returns whether the entry at a path is undamaged."""

_SWEEP_STAMP = ".swept"
"""The file in ``tmp`` whose modification time is that of the last sweep."""
_ATTEMPTS = 8
"""The number of times a writer tries to replace a damaged entry before it gives up."""


def make_root(root: Path) -> None:
    """Makes the store's directory, private to its owner, and ``tmp`` in it."""
    if not os.path.isdir(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
    staging_path(root).mkdir(parents=True, exist_ok=True, mode=0o755)


_DELETERS = 8
"""Threads that delete."""


def install_directory(root: Path, target: Path, files: Mapping[str, bytes], is_whole: IsWhole) -> None:
    """Makes ``target`` a directory of ``files``. An existing entry remains if ``is_whole`` returns true, and is
    replaced otherwise.

    Two writers that replace the same damaged entry may each remove the other's replacement once. A reader then sees a
    miss, never an incomplete entry.
    """
    staged = stage_name(root, target.name)
    try:
        staged.mkdir(mode=0o755)
        for name, content in files.items():
            _write_file(staged / name, content)
        _fsync_directory(staged)
        _make_parents(target)
        for _ in range(_ATTEMPTS):
            try:
                os.rename(staged, target)
            except OSError:
                if not os.path.lexists(target):
                    raise
                if is_whole(target):
                    return
                set_aside(root, target, is_whole)
            else:
                _fsync_directory(target.parent)
                return
        raise OSError(f"{target} is replaced by others faster than it can be written")
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def install_file(root: Path, target: Path, content: bytes) -> None:
    """Makes ``target`` a file of ``content``, replacing whatever exists there."""
    staged = stage_name(root, target.name)
    try:
        _write_file(staged, content)
        _make_parents(target)
        if target.is_dir():
            set_aside(root, target, lambda path: False)
        os.replace(staged, target)
        _fsync_directory(target.parent)
    finally:
        with suppress(FileNotFoundError):
            staged.unlink()


def remove(root: Path, *targets: Path) -> None:
    """Removes entries, each at once and whole. A missing entry is no error."""
    removal = Removal(root)
    for target in targets:
        removal.take(target)
    removal.delete()


class Removal:
    """Removes entries: ``take`` renames one into a directory of ``tmp``, which is atomic; ``delete`` deletes what was
    taken. A killed process leaves that directory, which a later writer deletes."""

    def __init__(self, root: Path):
        self._directory = os.fspath(stage_name(root, "removed"))
        self._taken: list[str] = []

    def take(self, target: Path) -> None:
        if not self._taken:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
        taken = os.path.join(self._directory, str(len(self._taken)))
        with suppress(FileNotFoundError):
            os.rename(target, taken)
            self._taken.append(taken)

    def delete(self) -> None:
        """Deletes what was taken, with several threads if it is much: ext4 took 4 ms to remove a directory, and 0.4
        with 8."""
        if len(self._taken) < 2 * _DELETERS:
            _delete_entries(self._taken)
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_DELETERS) as pool:
                list(pool.map(_delete_entries, (self._taken[start::_DELETERS] for start in range(_DELETERS))))
        with suppress(OSError):
            os.rmdir(self._directory)


def _delete_entries(paths: Sequence[str]) -> None:
    """Deletes entries. Directories that hold files alone, as artifacts do, take half the time of ``shutil.rmtree``."""
    for path in paths:
        try:
            for name in () if os.path.islink(path) else os.listdir(path):
                os.unlink(os.path.join(path, name))
            os.rmdir(path)
        except OSError:  # a file or a link; or a directory with others in it, or without rights
            delete(Path(path))


def set_aside(root: Path, target: Path, is_whole: IsWhole) -> None:
    """Moves a damaged entry into quarantine, unless another process has replaced it by one that is whole."""
    aside = quarantine_path(root)
    aside.mkdir(exist_ok=True, mode=0o755)
    moved = aside / f"{target.parent.parent.name}-{target.name.partition('.')[0]}-{uuid.uuid4().hex[:12]}"
    try:
        if stat.S_ISDIR(target.lstat().st_mode):
            os.chmod(target, 0o700)  # a directory that its owner may not write cannot be moved
        os.rename(target, moved)
    except FileNotFoundError:
        return
    if is_whole(moved):  # it was replaced just now
        with suppress(OSError):
            os.rename(moved, target)
        delete(moved)
        return
    with suppress(OSError):
        os.utime(moved)  # it is deleted a week from now, however old it is


def quarantined(root: Path) -> list[Path]:
    """Lists what was set aside: ``artifact-<key>-<unique>``, ``plan-<key>-<unique>``."""
    return listed(quarantine_path(root))


def leftovers(root: Path, *, older_than: float = STALE_SECONDS) -> list[Path]:
    """Lists what killed writers left in ``tmp`` at least ``older_than`` seconds ago."""
    horizon = time.time() - older_than
    return [path for path in listed(staging_path(root)) if path.name != _SWEEP_STAMP and _mtime(path) <= horizon]


def sweep(root: Path, *, older_than: float = STALE_SECONDS) -> list[Path]:
    """Deletes leftovers, and lock files of that age that are not locked; returns the leftovers."""
    swept = leftovers(root, older_than=older_than)
    forgotten = time.time() - QUARANTINE_SECONDS
    for path in (*swept, *(path for path in quarantined(root) if _mtime(path) <= forgotten)):
        delete(path)
    horizon = time.time() - older_than
    idle = [path for path in listed(locks_path(root)) if _mtime(path) <= horizon]
    if idle:
        try:
            from filelock import FileLock, Timeout
        except ImportError:  # a process that only serves need not have it
            return swept
        for path in idle:
            # A lock file is unlinked only while this process has it locked. A waiting filelock notices that its file
            # was unlinked and starts again.
            with suppress(Timeout, OSError), FileLock(path, timeout=0):
                path.unlink()
    return swept


def sweep_sometimes(root: Path) -> None:
    """Calls ``sweep`` if no writer did so within the last hour: a store may have many locks to walk."""
    stamp = staging_path(root) / _SWEEP_STAMP
    if _mtime(stamp) <= time.time() - STALE_SECONDS:
        stamp.touch()
        sweep(root)


def stage_name(root: Path, name: str) -> Path:
    """Returns a path in ``tmp`` that no other writer uses."""
    return staging_path(root) / f"{name[:12]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _make_parents(target: Path) -> None:
    parent = target.parent
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        _fsync_directory(parent.parent)


def _fsync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Deletes a file or a directory, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
