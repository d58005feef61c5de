"""Replaces functions of Python's own that user code meets in another form while some thread traces.

They are replaced for all threads, as torch.fx replaces builtins while it traces; so a replacement asks whether it is
called by code that is being traced, and does nothing else elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jitgen.forks import Lock

_MISSING: Any = object()


class Replaced:
    """Replaces attributes of a module or class while at least one thread is within ``active()``."""

    def __init__(self, owner: Any, replacements: Mapping[str, Callable[..., Any]]):
        """Takes ``replacements`` by the attribute's name. What the owner has of none is removed again."""
        self._owner = owner
        self._replacements = dict(replacements)
        self._originals = {name: owner.__dict__.get(name, _MISSING) for name in replacements}
        self._threads = 0
        self._lock = Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._lock:
            self._threads += 1
            self._set(self._replacements)
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._set(self._originals)

    def _set(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        for name, function in functions.items():
            if function is _MISSING:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, function)
