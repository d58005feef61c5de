"""Knows manifests by name: those of known models, which jitgen ships in ``cache/manifests``."""

from __future__ import annotations

import os
from pathlib import Path

from jitgen import _data
from jitgen.errors import CacheError


def names() -> list[str]:
    """Returns the names of the manifests that jitgen ships, such as ``"llama-3-8b"``."""
    return sorted(path.stem for path in _data.data_directory("cache/manifests").glob("*.json"))


def find(manifest: str | os.PathLike[str]) -> Path:
    """Returns the file of a manifest: the path ``manifest`` or, if there is no such file, the shipped one of that name.

    Raises:
        CacheError: there is neither, or ``manifest`` is no path.
    """
    if not isinstance(manifest, (str, os.PathLike)):
        raise CacheError(f"{manifest!r:.80} is no manifest: pass the path of one, or the name of a shipped one")
    path = Path(manifest)
    if path.exists():
        return path
    if os.fspath(manifest) in names():
        return _data.data_directory("cache/manifests") / f"{manifest}.json"
    raise CacheError(
        f"{manifest} is neither a file nor the name of a manifest that jitgen ships; those are: {', '.join(names())}"
    )
