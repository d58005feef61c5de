"""Locates a store and the entries in it, and checks the permissions it must have. No entry is read or written.

Neighbours: ``entries`` reads the files at these paths, ``atomic`` writes them, and ``maintenance`` walks them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.spec import SCHEMA

VERSION = f"v{SCHEMA}"
NOWHERE = Path(os.devnull, "jitgen")
"""The root of a store that can have no directory: nothing can exist below a device."""
KINDS = ("artifact", "plan")
_KEY = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Entry:
    """Refers to an entry as a directory walk meets it. It has not been read, so that it may be damaged.

    Attributes:
        kind: ``"artifact"`` or ``"plan"``.
        key: 64 hex digits.
        path: the artifact's directory, or the plan's file.
        size: the total size of its files, in bytes.
        used: when it was last written or hit, in seconds since the epoch, to within about an hour.
        layer: whether it is in a read-only layer rather than in the store itself.
    """

    kind: str
    key: str
    path: Path
    size: int
    used: float
    layer: bool = False


def is_key(text: object) -> bool:
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def artifact_path(root: Path, key: str) -> Path:
    return root / VERSION / "artifact" / key[:2] / key


def plan_path(root: Path, key: str) -> Path:
    return root / VERSION / "plan" / key[:2] / f"{key}.json"


def entry_path(root: Path, kind: str, key: str) -> Path:
    return artifact_path(root, key) if kind == "artifact" else plan_path(root, key)


def staging_path(root: Path) -> Path:
    return root / VERSION / "tmp"


def locks_path(root: Path) -> Path:
    return root / VERSION / "locks"


def quarantine_path(root: Path) -> Path:
    return root / VERSION / "quarantine"


def protected_path(root: Path) -> Path:
    return root / VERSION / "protected"


def missed_path(root: Path) -> Path:
    """Returns the manifest of what strict processes did not find."""
    return root / VERSION / "missed.json"


def walk(root: Path, *, prefix: str = "", layer: bool = False) -> Iterator[Entry]:
    """Yields every entry whose key starts with ``prefix``. Entries that another process removes meanwhile are
    skipped."""
    for kind in KINDS:
        top = root / VERSION / kind
        for fan_out in _listed(top):
            if not _FAN_OUT.fullmatch(fan_out.name) or not fan_out.name.startswith(prefix[:2]):
                continue
            for listed in _listed(Path(fan_out.path)):
                key = listed.name if kind == "artifact" else listed.name.removesuffix(".json")
                if is_key(key) and key.startswith(prefix) and (kind == "artifact") == (listed.name == key):
                    try:
                        status = listed.stat(follow_symlinks=False)
                        size = _size(listed.path) if stat.S_ISDIR(status.st_mode) else status.st_size
                    except FileNotFoundError:
                        continue
                    yield Entry(kind, key, Path(listed.path), size, status.st_mtime, layer)


def _size(directory: str) -> int:
    """Returns the total size in bytes of the files in a directory; what cannot be read counts as nothing."""
    try:
        with os.scandir(directory) as files:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in files)
    except PermissionError:
        return 0


def default_directory() -> Path:
    """Returns ``JITGEN_CACHE_DIR`` if set, else ``cache/store`` of the source checkout, else the user's cache
    directory.

    A checkout's directory is used only if the user owns it and can write it.

    Raises:
        CacheError: there is no home in which the user's cache directory would be.
    """
    chosen = settings.get("JITGEN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "templates").is_dir():
        directory = checkout / "cache" / "store"
        if _owned(nearest_ancestor(directory)) and is_writable(directory):
            return directory
    try:
        import platformdirs
    except ImportError:
        raise CacheError(
            "the package platformdirs, which finds the user's cache directory, is not installed; set JITGEN_CACHE_DIR "
            "to a directory of yours, or pip install platformdirs"
        ) from None
    try:
        directory = Path(platformdirs.user_cache_dir("jitgen"))
    except RuntimeError:  # no HOME, and a user id without an entry in the password database
        directory = Path()
    if not directory.is_absolute():  # older versions do not raise
        raise CacheError("this user has no home directory for the store; set JITGEN_CACHE_DIR to a directory of yours")
    return directory


def absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_store(root: Path) -> None:
    """Refuses a store into which another user could put a binary, because its contents are loaded into this process."""
    status = _status(root)
    if status is None:
        return
    _check_parents(root)
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise CacheError(
            f"the store {root} belongs to user id {status.st_uid}, and you are {os.geteuid()}: kernels in it could be "
            "replaced under you. Set JITGEN_CACHE_DIR to a directory of your own, or name this one in "
            "JITGEN_CACHE_PATH to read from it if you trust its owner"
        )
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"the store {root} is writable by others than its owner; run: chmod 700 '{root}'")


def check_layer(root: Path) -> None:
    """Refuses a layer that everyone may write. Its owner and group are trusted, since the user named the layer.

    A layer is a directory, or a file: a bundle.
    """
    status = _status(root, or_file=True)
    if status is None:
        return
    _check_parents(root)
    if os.name == "posix" and status.st_mode & stat.S_IWOTH:
        raise CacheError(
            f"the layer {root} of JITGEN_CACHE_PATH is writable by everyone; run: chmod o-w '{root}', or leave it out"
        )


def _check_parents(root: Path) -> None:
    """Refuses a directory above ``root`` in which everyone may rename ``root`` and put another in its place."""
    if os.name != "posix":
        return
    for parent in Path(os.path.realpath(root)).parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"{parent}, in which {root} is, lets everyone replace what is in it; run: chmod +t '{parent}', or keep "
                "kernels elsewhere"
            )


def is_writable(path: Path) -> bool:
    """Returns whether this user can write ``path`` or, if it does not exist, the directory in which it would be
    made."""
    return os.access(nearest_ancestor(path), os.W_OK | os.X_OK)


def nearest_ancestor(path: Path) -> Path:
    """Returns ``path`` if it exists, else the closest directory above it that exists."""
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises where a parent cannot be entered
        path = path.parent
    return path


def _status(root: Path, *, or_file: bool = False) -> os.stat_result | None:
    """Returns the status of the directory ``root``; None if there is none, CacheError if it is unusable."""
    try:
        status = root.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"the store {root} cannot be reached: {error.strerror}; set JITGEN_CACHE_DIR") from error
    if not stat.S_ISDIR(status.st_mode) and not (or_file and stat.S_ISREG(status.st_mode)):
        raise CacheError(f"the store {root} is not a directory; move it away or set JITGEN_CACHE_DIR")
    return status


def _owned(path: Path) -> bool:
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def _listed(directory: Path) -> list[os.DirEntry[str]]:
    """Lists what is in ``directory``, by name; empty if there is no such directory."""
    try:
        with os.scandir(directory) as files:
            return sorted(files, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"{directory} cannot be listed: {error.strerror}; mend its permissions") from error
