"""Copies a module for traces: ``Template`` holds a copy without tensors, of which each trace runs one with its own.

A trace never runs the module itself. What it runs is compared with what it was afterwards, so that code that sets an
attribute, or changes a list of the module, is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.models.state import State


class _Slot:
    """Stands in a template for tensor ``index``."""

    def __init__(self, index: int):
        self.index = index


class _Number:
    """Stands in a template for numeric argument ``index``."""

    def __init__(self, index: int):
        self.index = index


class Template:
    """Holds a copy of a module without tensors, of which each trace makes one with its own.

    Attributes:
        numbers: how many numbers are arguments.
        inputs: how many numbers and tensors are.
    """

    def __init__(self, module: torch.nn.Module, state: State):
        self.numbers = len(state.numbers())
        self.inputs = self.numbers + len(state.tensors())

        def leaf(value: Any) -> Any:
            index = state.tensor_index(value)
            return None if index is None else _Slot(index)

        def number(container: Any, name: Any) -> Any:
            index = state.number_index(container, name)
            return None if index is None else _Number(index)

        self._blank = _Copier(leaf, number).copy(module)

    def with_inputs(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Copied:
        """Makes a module that has ``tensors`` and ``numbers`` in the order of ``State``'s."""

        def leaf(value: Any) -> Any:
            return tensors[value.index] if type(value) is _Slot else None

        def number(container: Any, name: Any) -> Any:
            value = container[name]
            return numbers[value.index] if type(value) is _Number else None

        copier = _Copier(leaf, number)
        module = copier.copy(self._blank)
        return Copied(module, [(container, contents(container)) for container in copier.containers])


class Copied:
    """Holds the module that a trace runs.

    Attributes:
        module: the copy.
    """

    def __init__(self, module: Any, contents: Sequence[tuple[Any, list[Any]]]):
        self.module = module
        self._contents = contents

    def check(self) -> None:
        """Raises UnsupportedError if the forward has set an attribute, or has changed a list or dict."""
        for container, before in self._contents:
            now = contents(container)
            if not same_contents(now, before):
                names = [name for name, *_ in now if name not in [name for name, *_ in before]]
                names += [new[0] for new, old in zip(now, before, strict=False) if not _is_same_entry(new, old)]
                raise UnsupportedError(f"its forward changes {names[0] if names else 'a list'} of the module")


def contents(container: Any) -> list[Any]:
    """Lists the items of a list or dict, each with its name."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def same_contents(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Returns whether two results of ``contents`` are the same objects by the same names."""
    return len(now) == len(before) and all(map(_is_same_entry, now, before))


def _is_same_entry(now: Any, before: Any) -> bool:
    return now[0] == before[0] and now[1] is before[1]


class _Copier:
    """Copies modules and the plain containers among their attributes; all else is shared.

    Args:
        leaf: what replaces a value; None for what is copied as it is.
        number: the same of a number at a place, given as container and name.
    """

    def __init__(self, leaf: Callable[[Any], Any], number: Callable[[Any, Any], Any]):
        self._leaf = leaf
        self._number = number
        self._copies: dict[int, Any] = {}
        self.containers: list[Any] = []

    def copy(self, value: Any) -> Any:
        replaced = self._leaf(value)
        if replaced is not None:
            return replaced
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            copy = self._copies[id(value)] = object.__new__(kind)
            vars(copy).update(self._entries(vars(value)))
            vars(copy).pop("forward", None)
            self.containers.append(vars(copy))
            return copy
        if kind in (dict, OrderedDict):
            made = self._copies[id(value)] = kind()
            made.update(self._entries(value))
            self.containers.append(made)
            return made
        if kind is list:
            items = self._copies[id(value)] = [*map(self.copy, value)]
            self.containers.append(items)
            return items
        if kind is tuple:
            return tuple(map(self.copy, value))
        if kind is MethodType and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        return value

    def _entries(self, container: dict[Any, Any]) -> dict[Any, Any]:
        entries = {}
        for name, value in container.items():
            number = self._number(container, name)
            entries[name] = self.copy(value) if number is None else number
        return entries
