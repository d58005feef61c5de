"""Tells the user what a store has to say: each thing once in a process, as a ``CacheWarning``."""

from __future__ import annotations

from jitgen import console
from jitgen.errors import CacheWarning

_told: set[str] = set()


def once(topic: str, message: str) -> None:
    """Warns with ``message``, unless this process has warned of ``topic``."""
    if topic not in _told:
        _told.add(topic)
        console.warn(message, CacheWarning, stacklevel=2)


def forget() -> None:
    """Lets every warning appear again."""
    _told.clear()
