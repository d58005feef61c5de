"""Defines the places that a traced function can change: names of modules, classes and objects, variables of closures,
and contents of containers.

A place reads and writes its contents key by key, without code of the user's, so that ``journal.py`` can compare them
and take changes back while other threads use the same objects.
"""

from __future__ import annotations

import array
import contextvars
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.trace import contents
from jitgen.trace.captured import MISSING
from jitgen.trace.mentions import is_library

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module has its members."""

Access = tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None]]
"""The functions ``read`` and ``write`` of a place."""


@dataclass(frozen=True, eq=False)
class Place:
    """Refers to one thing that a function can change.

    Attributes:
        path: how the function reaches the owner, as a user would write it; empty for variables.
        kind: ``"attribute"``, ``"variable"`` or ``"item"``: what its contents are.
        owner: the object.
        identity: what two places of one memory have in common.
        read: returns its contents by name, key or index.
        write: makes contents that ``read`` returned the contents again.
        is_ordered: whether the order of keys matters.
    """

    path: str
    kind: str
    owner: Any
    identity: tuple[Any, ...]
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    is_ordered: bool = False


def is_users(value: Any) -> bool:
    """Returns whether ``value`` is none of jitgen's own objects."""
    return type(value).__module__.partition(".")[0] != "jitgen"


def places(path: str, value: Any) -> Iterator[Place]:
    """Yields the places of ``value`` that a function can change."""
    if not is_users(value) or (isinstance(value, torch.Tensor) and type(value) not in _TENSORS):
        return
    if isinstance(value, types.ModuleType):
        if not is_library(value.__name__):
            yield names_of(path, "attribute", value, vars(value), _is_plain)
    elif isinstance(value, type):
        if not is_library(value.__module__):
            yield names_of(path, "attribute", value, None, _is_plain)
    else:
        container = _container(path, value)
        if container is not None:
            yield container
        try:  # without code of the user's; a thread's local attributes are a dict of the thread's own
            own = vars(value) if isinstance(value, threading.local) else object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = None
        if isinstance(own, dict):
            yield names_of(path, "attribute", value, own, lambda name: True)
        for name in _TABLES if isinstance(value, torch.nn.Module) else ():
            table = vars(value).get(name)
            if isinstance(table, dict):
                yield names_of(path, "attribute", value, table, lambda name: True)
        slots = frozenset(_slots(type(value)))
        if slots:
            yield names_of(path, "attribute", value, None, lambda name: name in slots)


def _is_plain(name: str) -> bool:
    """Returns whether a name of a module or class is the user's, rather than one by which Python describes it."""
    return not name.startswith(("__", "_abc_"))


def _slots(owner: type) -> list[str]:
    users = [base for base in owner.__mro__ if not is_library(base.__module__)]
    return [n for base in users for n, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)]


def names_of(
    path: str, kind: str, owner: Any, variables: dict[str, Any] | None, is_wanted: Callable[[str], bool], name: str = ""
) -> Place:
    """Makes a place of names and their values, which are written one by one.

    Args:
        variables: what has them; None for attributes of ``owner`` that ``setattr`` writes.
        is_wanted: which of them.
        name: of the only one, if it is one.
    """
    is_class = isinstance(owner, type)

    def read() -> dict[str, Any]:
        if variables is not None or is_class:
            values: Mapping[str, Any] = variables if variables is not None else vars(owner)
            return {name: value for name, value in [*values.items()] if is_wanted(name)}
        return {name: value for name in _slots(type(owner)) if (value := getattr(owner, name, MISSING)) is not MISSING}

    def write(new: dict[str, Any]) -> None:
        now = read()
        gone = [name for name in now if name not in new]
        changed = {name: value for name, value in new.items() if now.get(name, MISSING) is not value}
        if variables is not None:
            for name in gone:
                variables.pop(name, None)
            variables.update(changed)
            if [*read()] != [*new]:
                variables.update({name: variables.pop(name) for name in new})  # in that order
            return
        remove, replace = (type.__delattr__, type.__setattr__) if is_class else (object.__delattr__, object.__setattr__)
        for name in gone:
            remove(owner, name)
        for name, value in changed.items():
            replace(owner, name, value)

    memory = variables if variables is not None else owner
    return Place(path, kind, owner, (id(memory), variables is None, name), read, write)


def cell_of(name: str, cell: types.CellType) -> Place:
    """Makes a place of a variable of a closure."""

    def read() -> dict[str, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:  # it has no value yet
            return {}

    def write(new: dict[str, Any]) -> None:
        if new:
            cell.cell_contents = new[name]
        elif read():
            del cell.cell_contents

    return Place("", "variable", cell, (id(cell),), read, write)


def _is_writable(value: Any) -> bool:
    """Returns whether ``value`` is an array whose elements can be compared and written."""
    if contents.is_numpy(value):
        is_array = not contents.is_numpy_number(value) and value.flags.writeable
        return is_array and contents.snapshot(value) is not None
    return isinstance(value, (bytearray, array.array)) and contents.snapshot(value) is not None


def _container(path: str, value: Any) -> Place | None:
    """Makes a place of the contents of a container of Python's, an array or a context variable; None for other
    objects."""
    if isinstance(value, (list, deque)):
        access = _items_of_sequence(value)
    elif isinstance(value, dict):
        access = _items_of_dict(value)
    elif isinstance(value, set):
        access = _elements_of_set(value)
    elif isinstance(value, contextvars.ContextVar):
        access = _value_of_variable(value)
    elif _is_writable(value):
        access = _elements_of_array(value)
    else:
        return None
    return Place(path, "item", value, (id(value), "contents"), *access, isinstance(value, dict))


def _items_of_sequence(value: Any) -> Access:
    """Accesses the items of a list or deque by their indices."""
    kind: Any = list if isinstance(value, list) else deque

    def read() -> dict[Any, Any]:
        return dict(enumerate(kind.__iter__(value)))

    def write(new: dict[Any, Any]) -> None:
        items = [*new.values()]
        if isinstance(value, list):
            list.__setitem__(value, slice(None), items)
            return
        now = [*deque.__iter__(value)]
        pairs = enumerate(zip(now, items, strict=False))
        same = next((number for number, (a, b) in pairs if a is not b), min(len(now), len(items)))
        for _ in now[same:]:
            deque.pop(value)
        deque.extend(value, items[same:])

    return read, write


def _items_of_dict(value: dict[Any, Any]) -> Access:
    """Accesses the items of a dict in their order."""
    ordered: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def read() -> dict[Any, Any]:
        return {key: dict.__getitem__(value, key) for key in ordered.__iter__(value)}

    def write(new: dict[Any, Any]) -> None:
        now = read()
        for key in now.keys() - new.keys():
            ordered.__delitem__(value, key)
        for key, item in new.items():
            if now.get(key, MISSING) is not item:
                ordered.__setitem__(value, key, item)
        if [*read()] != [*new]:
            for key, item in new.items():
                ordered.__delitem__(value, key)
                ordered.__setitem__(value, key, item)

    return read, write


def _elements_of_set(value: set[Any]) -> Access:
    """Accesses the elements of a set."""

    def read() -> dict[Any, Any]:
        return dict.fromkeys(set.__iter__(value), True)

    def write(new: dict[Any, Any]) -> None:
        set.intersection_update(value, new)
        set.update(value, new)

    return read, write


def _value_of_variable(value: contextvars.ContextVar[Any]) -> Access:
    """Accesses the value of a context variable, which may have none."""

    def read() -> dict[Any, Any]:
        return {"value": value.get(MISSING)}

    def write(new: dict[Any, Any]) -> None:
        if new["value"] is not MISSING:
            value.set(new["value"])

    return read, write


def _elements_of_array(value: Any) -> Access:
    """Accesses the elements of an array as one value."""

    def read() -> dict[Any, Any]:
        return {"elements": contents.snapshot(value)}

    def write(new: dict[Any, Any]) -> None:
        elements = new["elements"][-1]
        if contents.is_numpy(value):
            shaped = type(value)(value.shape, value.dtype, elements)
            value[...] = shaped
        elif isinstance(value, bytearray):
            value[:] = elements
        else:
            del value[:]
            value.frombytes(elements)

    return read, write
