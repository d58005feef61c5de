"""Reads files of a store that something else may have put there: a FIFO, a device, a link, a file of any size.

``Access`` says who may have written what is read; ``read`` and ``read_in`` open without waiting, look at what they have
opened, and read no more of it than they were told to. They raise ``FileNotFoundError`` and ``Damaged`` only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FILE_LIMIT = 2**26
"""Bytes of one file of an entry: 64 MiB. A cubin has kilobytes, a torch operator's library a few megabytes."""
JSON_LIMIT = 2**22
"""Bytes of ``meta.json`` and of a plan."""
FILES_LIMIT = 64
"""Files of one artifact."""

_OPEN = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class Damaged(Exception):
    """Reports that an entry exists and is damaged; the message says how. This exception never leaves the package."""


class Unreadable(Damaged):
    """Reports that this user lacks the right to read an entry, which may be whole."""


class TooLarge(Damaged):
    """Reports that a file has more bytes than are read of it."""

    def __init__(self, name: str, size: int, limit: int):
        super().__init__(f"{name} has {size} bytes, expected no more than {limit}")
        self.size = size


class Untrusted(Damaged):
    """Reports that an entry is whole, and that no trusted key has signed it."""


@dataclass(frozen=True)
class Access:
    """Says who may own the directories and files below a root, and which of their mode bits are refused.

    A root that only its owner can enter needs no more: nobody else reaches what is in it. Below any other, what belongs
    to a stranger or can be written by one is as good as damaged.
    """

    owners: frozenset[int] | None
    forbidden: int
    root: Path | None = None

    @staticmethod
    def below(root: Path, *, layer: bool) -> Access:
        """Returns what is asked of everything below ``root``; FileNotFoundError if there is no such directory."""
        try:
            status = os.stat(root)
        except NotADirectoryError as error:
            raise FileNotFoundError(root) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unread(f"{root} cannot be reached", error) from error
        if os.name != "posix" or not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Access(None, 0)
        owners = frozenset((0, os.geteuid(), status.st_uid))
        return Access(owners, stat.S_IWOTH if layer else stat.S_IWOTH | stat.S_IWGRP, root)

    def check(self, status: os.stat_result, name: str) -> None:
        """Raises Damaged if somebody else may have written ``name``."""
        if self.owners is not None and status.st_uid not in self.owners:
            raise Damaged(f"{name} belongs to user id {status.st_uid}")
        if status.st_mode & self.forbidden:
            raise Damaged(f"{name} is writable by others: its mode is {stat.S_IMODE(status.st_mode):o}")

    def check_parents(self, path: Path) -> None:
        """Raises Damaged if somebody else may have put ``path`` where it is; raises OSError as well."""
        if self.owners is None:
            return
        for parent in path.parents:
            if parent == self.root:
                break
            self.check(os.stat(parent), parent.name)


def _unread(problem: str, error: OSError) -> Damaged:
    kind = Unreadable if isinstance(error, PermissionError) else Damaged
    return kind(f"{problem}: {error.strerror}")


@contextmanager
def folder(path: Path, access: Access) -> Iterator[int]:
    """Opens the directory ``path``; whatever is opened relative to the descriptor is in that very directory."""
    try:
        access.check_parents(path)
        descriptor = os.open(path, _OPEN | getattr(os, "O_DIRECTORY", 0))
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        if os.path.lexists(path):
            raise Damaged("it is not a directory") from error
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise _unread("it cannot be opened", error) from error
    try:
        access.check(os.fstat(descriptor), "its directory")
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: Path, limit: int, access: Access) -> bytes:
    """Returns the bytes of the regular file ``path``."""
    try:
        access.check_parents(path)
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unread("it cannot be read", error) from error
    return read_in(None, str(path), limit, access)


def read_in(directory: int | None, name: str, limit: int, access: Access) -> bytes:
    """Returns the bytes of the regular file ``name`` in an open directory."""
    shown = os.path.basename(name)
    try:
        descriptor = os.open(name, _OPEN | _NO_LINK, dir_fd=directory)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(name) from error
    except OSError as error:
        raise _unread(f"{shown} cannot be read", error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{shown} is not a regular file")
        access.check(status, shown)
        if status.st_size > limit:
            raise TooLarge(shown, status.st_size, limit)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    except OSError as error:
        raise Damaged(f"{shown} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
