"""Describes tensors and sizes that a function keeps beyond its call: what stands for them in the values that it stores.

While a function is traced there are no tensors yet. So what it stores is described with an object in the place of each
tensor, and when the call has its results, each is exchanged for the tensor.

Neighbours: ``run.py`` describes what was stored; ``journal.py`` stores it when the call has succeeded.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from jitgen.trace.sequences import rebuilt

_SEQUENCES = (list, tuple, deque)
_TABLES = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_SEQUENCES, set, frozenset)


class Exchange:
    """Exchanges leaves of lists, tuples, dicts and deques for what ``leaf`` makes of them.

    A container of which nothing changes is returned itself. One that several values refer to has one copy.
    """

    def __init__(self, leaf: Callable[[Any], Any]):
        self._leaf = leaf
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Exchanges the leaves of ``value``."""
        exchanged = self._leaf(value)
        if exchanged is not value or not _is_container(value):
            return exchanged
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # for a container that holds itself
            self._done[id(value)] = value, self._copy(value)
        return self._done[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, dict):
            new = {key: self(item) for key, item in value.items()}
            if all(new[key] is value[key] for key in new):
                return value
            copied: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
            copied.update(new)
            return copied
        items = list(map(self, value))
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return rebuilt(value, items)


def _is_container(value: Any) -> bool:
    return type(value) in (*_SEQUENCES, *_TABLES) or (isinstance(value, tuple) and hasattr(type(value), "_make"))


def contained(value: Any) -> list[Any]:
    """Lists ``value`` and all that it contains, keys and members of sets included, down to what is none of Python's
    containers."""
    values, seen = [value], {id(value)}
    for one in values:
        inner = [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, _CONTAINERS) else ()
        new = [other for other in inner if id(other) not in seen]
        seen.update(map(id, new))
        values += new
    return values
