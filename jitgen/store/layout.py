"""The location of a store, the paths of entries in it, and the permissions it must have. No entry is read or written.

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
KINDS = ("artifact", "plan")
_KEY = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Entry:
    """An entry as a directory walk finds it. It has not been read, so that it may be damaged.

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


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


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


def walk(root: Path, *, prefix: str = "", layer: bool = False) -> Iterator[Entry]:
    """Every entry whose key starts with ``prefix``. Entries that another process removes meanwhile are skipped."""
    for kind in KINDS:
        top = root / VERSION / kind
        for fan_out in sorted(_names(top)):
            if not _FAN_OUT.fullmatch(fan_out) or not fan_out.startswith(prefix[:2]):
                continue
            for name in sorted(_names(top / fan_out)):
                key = name if kind == "artifact" else name.removesuffix(".json")
                if is_key(key) and key.startswith(prefix) and entry_path(root, kind, key).name == name:
                    path = top / fan_out / name
                    try:
                        yield Entry(kind, key, path, tree_size(path), path.stat().st_mtime, layer)
                    except FileNotFoundError:
                        continue


def tree_size(path: Path) -> int:
    """The size in bytes of a file, or of all files in a directory."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum((Path(top) / name).lstat().st_size for top, _, names in os.walk(path) for name in names)


def default_directory() -> Path:
    """``JITGEN_CACHE_DIR`` if set, else ``cache/store`` of the source checkout, else the user's cache directory.

    A checkout's directory is used only if the user owns it and can write it.
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
    import platformdirs

    return Path(platformdirs.user_cache_dir("jitgen"))


def absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_store(root: Path) -> None:
    """Refuse a store into which another user could put a binary, because its contents are loaded into this process."""
    status = _status(root)
    if status is None:
        return
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise CacheError(
            f"the store {root} belongs to user id {status.st_uid}, and you are {os.geteuid()}: kernels in it could be "
            "replaced under you. Set JITGEN_CACHE_DIR to a directory of your own, or name this one in "
            "JITGEN_CACHE_PATH to read from it if you trust its owner"
        )
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"the store {root} is writable by others than its owner; run: chmod 700 '{root}'")


def check_layer(root: Path) -> None:
    """Refuse a layer that everyone may write. Its owner and group are trusted, since the user named the layer."""
    status = _status(root)
    if status is not None and os.name == "posix" and status.st_mode & stat.S_IWOTH:
        raise CacheError(
            f"the layer {root} of JITGEN_CACHE_PATH is writable by everyone; run: chmod o-w '{root}', or leave it out"
        )


def is_writable(path: Path) -> bool:
    """Whether this user can write ``path`` or, if it does not exist, the directory in which it would be made."""
    return os.access(nearest_ancestor(path), os.W_OK | os.X_OK)


def nearest_ancestor(path: Path) -> Path:
    """``path`` if it exists, else the closest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _status(root: Path) -> os.stat_result | None:
    """The status of the directory ``root``; None if there is none, CacheError if it is unusable."""
    try:
        status = root.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"the store {root} cannot be reached: {error.strerror}; set JITGEN_CACHE_DIR") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the store {root} is not a directory; move it away or set JITGEN_CACHE_DIR")
    return status


def _owned(path: Path) -> bool:
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"{directory} cannot be listed: {error.strerror}; mend its permissions") from error
