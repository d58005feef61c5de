"""Lists the entries that ``prune`` spares for each protected bundle: ``<store>/v1/protected/<name>``, one key a
line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jitgen.errors import CacheError
from jitgen.store import atomic, files, layout
from jitgen.store.files import Damaged

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def protect(root: Path, name: str, keys: Iterable[str]) -> None:
    """Protects the entries of ``keys`` under ``name``, in place of what that name protected before.

    Raises:
        CacheError: ``name`` cannot be the name of a file.
    """
    check_name(name)
    directory = layout.protected_path(root)
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    atomic.install_file(root, directory / name, "".join(f"{key}\n" for key in sorted(keys)).encode())


def unprotect(root: Path, name: str) -> bool:
    """Lets ``prune`` remove those entries again; returns whether there was such a name."""
    check_name(name)
    try:
        (layout.protected_path(root) / name).unlink()
    except FileNotFoundError:
        return False
    return True


def bundles(root: Path) -> dict[str, frozenset[str]]:
    """Returns the keys that each name protects."""
    keys_by_name = {}
    for path in atomic.listed(layout.protected_path(root)):
        with suppress(FileNotFoundError, Damaged, UnicodeDecodeError):
            content = files.read(path, files.FILE_LIMIT, files.Access(None, 0))
            keys_by_name[path.name] = frozenset(filter(layout.is_key, content.decode().split()))
    return keys_by_name


def protected(root: Path) -> frozenset[str]:
    """Returns the keys that any name protects."""
    return frozenset().union(*bundles(root).values())


def clear(root: Path) -> None:
    """Protects nothing."""
    for name in bundles(root):
        unprotect(root, name)


def check_name(name: str) -> None:
    """Raises CacheError if ``name`` cannot be that of a protected bundle."""
    if not _NAME.fullmatch(name):
        raise CacheError(f"{name!r} cannot name a protected bundle: use letters, digits, '-', '_' and '.'")
