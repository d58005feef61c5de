"""What a store tells its user: each thing once in a process, as a ``CacheWarning``."""

from __future__ import annotations

from jitgen import console
from jitgen.errors import CacheWarning

_told: set[str] = set()


def once(topic: str, message: str) -> None:
    """Warn with ``message``, unless this process was warned of ``topic`` already."""
    if topic not in _told:
        _told.add(topic)
        console.warn(message, CacheWarning, stacklevel=2)


def forget() -> None:
    """Warn of everything again."""
    _told.clear()
