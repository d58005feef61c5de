"""Keeps the functions of artifacts that this process has loaded: each is loaded once, whichever programs launch it.

Equal kernels have one artifact, and nothing that is loaded is ever unloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Loaded = TypeVar("Loaded")
Key = tuple[str, int | None, str, int]
"""Artifact key, the device's ordinal, which of its entries, and the dynamic shared memory that it is loaded for."""

_functions: dict[Key, object] = {}


def once(key: Key, load: Callable[[], Loaded]) -> Loaded:
    """Returns what ``load`` returned for ``key`` the first time."""
    if key not in _functions:
        _functions.setdefault(key, load())
    return _functions[key]  # type: ignore[return-value]
