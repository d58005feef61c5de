"""What the calls of a function are looked up in: tables that hold no more than so many entries.

Threads read and change a table without a lock: each step is one of ``dict`` or ``list``, which Python does at once. So
a reader meets an entry as it was or as it is, what it misses it makes again, and a table is over its limit by as many
entries as there are threads that add one at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

LIMIT = 4096
"""Entries of a table that has no limit of its own. A launch of a small kernel takes 18 kB and 2 ms to make (float32, on
a CPU), so a full table of them takes 74 MB; and a decoder that meets each length of its context up to 4096 makes none
of them twice."""

ALTERNATIVES = 8
"""Launches of equal arguments: for so many states of what a function captures, such as the layers that share it."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Table(dict[Key, Value]):
    """A dict of at most ``limit`` entries: where it is full, the older half of them makes room for a new one.

    The older half was entered first: a warm call does not write into its table, so nothing tells which entry is
    used. One at a time would take longer the more were gone: a search for the first entry of a dict passes all their
    places.
    """

    __slots__ = ()

    @property
    def limit(self) -> int:
        """The most entries that it holds."""
        return LIMIT

    def put(self, key: Key, value: Value) -> None:
        """Enter ``value`` at ``key``."""
        self._make_room(key)
        self[key] = value

    def _make_room(self, key: Key) -> None:
        if len(self) >= self.limit and key not in self:
            for oldest in list(self)[: self.limit // 2]:
                self.pop(oldest, None)


class Launch(Protocol):
    """What is remembered of a call: see ``resolver.Captures``."""

    def captured_tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor] | None: ...


AnyLaunch = TypeVar("AnyLaunch", bound=Launch)


class LaunchTable(Table[Any, list[AnyLaunch]]):
    """The launches of calls, by what was compared of their arguments; the last ones first where what the function
    captures differs."""

    __slots__ = ()

    def add(self, key: Any, launch: AnyLaunch) -> None:
        """Enter ``launch`` as the first at ``key``."""
        self._make_room(key)
        alike = self.setdefault(key, [])
        alike.insert(0, launch)
        del alike[ALTERNATIVES:]

    def fitting(self, key: Any, leaves: Sequence[Any]) -> tuple[AnyLaunch, list[torch.Tensor]] | None:
        """The launch of a call with these arguments where what is captured is as it is now, and the captured tensors;
        None without one."""
        for launch in self.get(key, ()):
            captured = launch.captured_tensors(leaves)
            if captured is not None:
                return launch, captured
        return None
