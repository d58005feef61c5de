"""Flattens the arguments of a call into leaves and a structure, and rebuilds them of other leaves.

Tensors, ints and floats are leaves. One tensor in several places is one leaf, so that a trace sees what ``is`` says.
All else that a call may have is part of the structure: calls of another structure have a trace of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.models import caches

_STATIC = frozenset((bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_NUMBERS = frozenset((int, float))


class Flattened:
    """Holds the arguments of one call.

    Attributes:
        leaves: its tensors and numbers.
        key: its structure.
        cache: the cache of keys and values among the arguments; None without one.
    """

    __slots__ = ("_positions", "cache", "key", "leaves")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.leaves: list[Any] = []
        self.cache: Any = None
        self._positions: dict[int, int] = {}
        self.key: Any = (self._enter(args), self._enter(kwargs))

    def with_cache(self, cache: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with ``cache`` in place of their cache."""
        return rebuilt(self.key[0], self.leaves, cache), rebuilt(self.key[1], self.leaves, cache)

    def _enter(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            position = self._positions.get(id(value))
            if position is None:
                position = self._positions[id(value)] = len(self.leaves)
                self.leaves.append(value)
            return _Leaf(position)
        if kind in _NUMBERS:
            self.leaves.append(value)
            return _Leaf(len(self.leaves) - 1)
        if kind in _STATIC:
            return kind, value
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, *map(self._enter, value)
        if kind is dict:
            return kind, tuple(value), *map(self._enter, value.values())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind, *map(self._enter, value)
        if caches.is_cache(value):
            if self.cache is not None and self.cache is not value:
                raise UnsupportedError("it gets two caches")
            self.cache = value
            return "cache", kind
        raise UnsupportedError(f"an argument is a {kind.__module__}.{kind.__qualname__}")


class _Leaf(int):
    """Represents the position of a leaf."""

    __slots__ = ()


def rebuilt(key: Any, leaves: Sequence[Any], cache: Any, made: list[Any] | None = None) -> Any:
    """Builds a value of the structure ``key``, of ``leaves``, with ``cache`` in place of the cache.

    Args:
        made: gets the lists and dicts of the value.
    """
    if type(key) is _Leaf:
        return leaves[key]
    kind = key[0]
    if kind == "cache":
        return cache
    if kind in _STATIC:
        return key[1]
    if kind is dict:
        value: Any = dict(zip(key[1], (rebuilt(item, leaves, cache, made) for item in key[2:]), strict=True))
    else:
        items = [rebuilt(item, leaves, cache, made) for item in key[1:]]
        value = kind(*items) if hasattr(kind, "_fields") else kind(items)
    if made is not None and isinstance(value, (list, dict)):
        made.append(value)
    return value
