"""Where a store lies and what lies where in it: paths, permissions, fan-out. Reads no entry and writes none.

Neighbours: ``entries`` reads what these paths name, ``atomic`` writes there, ``maintenance`` walks them.
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
    """One entry as the walk finds it, unread: its content may be damaged.

    Attributes:
        kind: ``"artifact"`` or ``"plan"``.
        key: 64 hex digits.
        path: the artifact's directory, or the plan's file.
        size: bytes of its files.
        used: when it was last written or hit, in seconds since the epoch, to about an hour.
        layer: whether it lies in a read-only layer.
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
    """Every entry whose key starts with ``prefix``; entries that vanish on the way are skipped."""
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
    """Bytes of a file, or of the files in a directory."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum((Path(top) / name).lstat().st_size for top, _, names in os.walk(path) for name in names)


def default_directory() -> Path:
    """``JITGEN_CACHE_DIR``; else the source checkout's ``cache/store``; else the user's cache directory."""
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
    """Refuse a store that someone else could put a binary into: what it holds is loaded into this process."""
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
    """Refuse a layer that anyone at all may write. Its owner and group are trusted: the user named it."""
    status = _status(root)
    if status is not None and os.name == "posix" and status.st_mode & stat.S_IWOTH:
        raise CacheError(
            f"the layer {root} of JITGEN_CACHE_PATH is writable by everyone; run: chmod o-w '{root}', or leave it out"
        )


def is_writable(path: Path) -> bool:
    """Whether ``path``, or where it would be made, can be written by this user."""
    return os.access(nearest_ancestor(path), os.W_OK | os.X_OK)


def nearest_ancestor(path: Path) -> Path:
    """``path`` itself if it exists, else the closest directory above it that does."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _status(root: Path) -> os.stat_result | None:
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
