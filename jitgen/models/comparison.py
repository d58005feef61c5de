"""Compares what a module's forward reads by name with what it was: ``Comparison``, which ``State`` fills.

It runs before every call of a unit, so what is compared lies in flat lists, and C code goes through the longest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import CellType
from typing import Any

import torch


@dataclass
class Comparison:
    """Holds containers and values, and what they were.

    Attributes:
        dicts: whose entries must be the same objects in the same order.
        keyed: parameters and buffers of modules, whose names must be the same, and which of them are None.
        lists: whose items must be the same objects.
        sets: with what equals them.
        empty: containers without an item, such as those of hooks.
        modules: with their classes.
        same: pairs of places, each a container and a name, that have one tensor.
        forwards: by class, what the class has as its forward.
        variables: global variables: a namespace, a name, and the value.
        settings: functions that read a setting of torch, with what they returned.
        cells: variables of enclosing functions, with their values.
    """

    dicts: list[Mapping[Any, Any]] = field(default_factory=list)
    keyed: list[Mapping[Any, Any]] = field(default_factory=list)
    lists: list[Any] = field(default_factory=list)
    sets: list[tuple[set[Any], set[Any]]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
    modules: list[tuple[torch.nn.Module, type]] = field(default_factory=list)
    same: list[tuple[tuple[Mapping[Any, Any], Any], tuple[Mapping[Any, Any], Any]]] = field(default_factory=list)
    forwards: dict[type, Any] = field(default_factory=dict)
    variables: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    settings: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Notes what the containers have now."""
        self._names = [*chain.from_iterable(self.dicts)]
        self._values = [*chain.from_iterable(map(_values, self.dicts))]
        self._counts = [*map(len, self.dicts)]
        self._tensor_names = [*chain.from_iterable(self.keyed)]
        self._absent = self._absences()
        self._items = [*map(tuple, self.lists)]

    def is_same(self) -> bool:
        """Returns whether nothing was replaced since ``begin``."""
        if any(self.empty) or [*chain.from_iterable(self.dicts)] != self._names:
            return False
        if not all(map(operator.is_, chain.from_iterable(map(_values, self.dicts)), self._values)):
            return False
        return (
            [*chain.from_iterable(self.keyed)] == self._tensor_names
            and self._absences() == self._absent
            and all(type(module) is kind for module, kind in self.modules)
            and all(place[name] is other[its_name] for (place, name), (other, its_name) in self.same)
            and all(getattr(kind, "forward", None) is forward for kind, forward in self.forwards.items())
            and all(map(_same_items, self.lists, self._items))
            and all(now == then for now, then in self.sets)
            and all(variables.get(name, self) is value for variables, name, value in self.variables)
            and all(read() == value for read, value in self.settings)
            and all(cell.cell_contents is value for cell, value in self.cells)
        )

    def restore(self) -> None:
        """Gives lists and dicts the items again that they had."""
        for container, items in zip(self.lists, self._items, strict=True):
            if not _same_items(container, items):
                container[:] = items
        names, values = iter(self._names), iter(self._values)
        for mapping, count in zip(self.dicts, self._counts, strict=True):
            entries = dict(zip(islice(names, count), islice(values, count), strict=True))
            if isinstance(mapping, dict) and not (
                mapping.keys() == entries.keys() and _same_items([*mapping.values()], (*entries.values(),))
            ):
                mapping.clear()
                mapping.update(entries)

    def _absences(self) -> list[bool]:
        """Returns for each registered tensor whether it is None."""
        return [tensor is None for registered in self.keyed for tensor in registered.values()]


def _values(mapping: Mapping[Any, Any]) -> Any:
    return mapping.values()


def _same_items(now: Sequence[Any], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
