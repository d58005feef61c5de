"""Defines the tables of bounded size in which calls are looked up.

Threads read and change a table without a lock: each step is one of ``dict`` or ``list``, which Python does at once. So
a reader meets an entry as it was or as it is, what it misses it makes again, and a table is over its limit by as many
entries as there are threads that add one at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

LIMIT = 4096
"""The most entries of a table that sets no limit of its own. The launch of a small kernel takes 18 kB, and 2 ms to make
(float32, on a CPU), so a full table takes 74 MB, and a decoder that meets each context length up to 4096 makes none
twice."""

ALTERNATIVES = 8
"""The most launches for equal arguments: one for each state of what a function captures, such as the layers that share
it."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Table(dict[Key, Value]):
    """Holds at most ``limit`` entries: the older half of a full table makes room for a new one.

    The older half was entered first: a warm call does not write into its table, so nothing tells which entry is used.
    One at a time would take longer the more were gone: a search for the first entry of a dict passes all their places.
    """

    __slots__ = ()

    @property
    def limit(self) -> int:
        """Returns the most entries that it holds."""
        return LIMIT

    def put(self, key: Key, value: Value) -> None:
        """Enters ``value`` at ``key``."""
        self._make_room(key)
        self[key] = value

    def kept(self, key: Key, value: Value) -> Value:
        """Enters ``value`` at ``key`` unless there is one; returns the one that is there, for all threads the same."""
        self._make_room(key)
        return self.setdefault(key, value)

    def _make_room(self, key: Key) -> None:
        if len(self) >= self.limit and key not in self:
            for oldest in list(self)[: self.limit // 2]:
                self.pop(oldest, None)


class Launch(Protocol):
    """Describes what is remembered of a call: see ``bound.Captures``."""

    def captured_tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor] | None: ...


AnyLaunch = TypeVar("AnyLaunch", bound=Launch)


class LaunchTable(Table[Any, list[AnyLaunch]]):
    """Holds the launches of calls, keyed by what was compared of their arguments; launches that differ in captured
    values are tried latest first."""

    __slots__ = ()

    def add(self, key: Any, launch: AnyLaunch) -> None:
        """Enters ``launch`` as the first at ``key``."""
        self._make_room(key)
        alike = self.setdefault(key, [])
        alike.insert(0, launch)
        del alike[ALTERNATIVES:]

    def fitting(self, key: Any, leaves: Sequence[Any]) -> tuple[AnyLaunch, list[torch.Tensor]] | None:
        """Returns the launch for these arguments whose captured values are as they are now, and the captured tensors;
        None without one."""
        for launch in self.get(key, ()):
            captured = launch.captured_tensors(leaves)
            if captured is not None:
                return launch, captured
        return None
