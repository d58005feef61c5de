"""Records what a traced function may change outside of it: objects, containers and variables, as they were before the
trace.

``Captures`` notes every object that it visits before the function runs. After the run the journal compares each with
what it was. What differs is in ``Changes``. Of a call they stay (``changes_stay``): they happened as in eager Python,
under the locks that the function holds. They are taken back where the call raises, and where nothing is called, as by
``lower`` and ``bind``.

Other threads may change the same objects meanwhile. So only what is still as the function left it is taken back, key by
key, and no container is empty for a moment.

Neighbours: ``kept.py`` describes tensors of the trace in changes, and ``escapes.py`` refuses what it cannot describe;
``call/resolver.py`` keeps a trace with changes for one call alone, so that each call makes its own.
"""

from __future__ import annotations

import array
import contextvars
import functools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgen.trace import contents
from jitgen.trace.captured import GUARDED, MISSING, same_value
from jitgen.trace.kept import Exchange
from jitgen.trace.mentions import is_library

LRU_CACHE = type(functools.cache(len))
"""The type of functions that ``functools.lru_cache`` makes."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module has its members."""


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


@dataclass(frozen=True, eq=False)
class Change:
    """Describes one place that the function changed.

    Attributes:
        old, new: its contents before and after the function ran.
        keys: of what is new or gone.
    """

    place: Place
    old: dict[Any, Any]
    new: dict[Any, Any]
    keys: tuple[Any, ...]

    def exchanged(self, exchange: Exchange) -> Change:
        """Exchanges the leaves of what is new. What stays is not touched, nor copied."""
        changed = frozenset(self.keys)  # in a tuple, a tensor that is a key would be compared
        new = {key: exchange(value) if key in changed else value for key, value in self.new.items()}
        return replace(self, new=new)

    def make(self) -> None:
        """Makes the change, after it was taken back."""
        self._replace(self.old, self.new)

    def undo(self) -> None:
        """Takes the change back."""
        self._replace(self.new, self.old)

    def _replace(self, left: dict[Any, Any], wanted: dict[Any, Any]) -> None:
        """Writes ``wanted`` over ``left``. Where other threads have written since, theirs stays."""
        now = self.place.read()
        if [*now] != [*left] or not all(same_value(now[key], left[key]) for key in now):
            merged = dict(now)
            for key in self.keys:
                if same_value(now.get(key, MISSING), left.get(key, MISSING)):
                    merged.pop(key, None)
                    merged |= {key: wanted[key]} if key in wanted else {}
            wanted = merged
        self.place.write(wanted)

    @property
    def path(self) -> str:
        """Returns what was changed, as a user would write it."""
        if self.place.kind == "item":
            return self.place.path
        return f"{self.place.path}.{self.keys[0]}".lstrip(".")

    @property
    def name(self) -> str:
        """Returns the name that the user's code has for it."""
        return self.path.partition("[")[0].rpartition(".")[2]

    def where(self, key: Any) -> str:
        """Describes the place of the value at ``key``."""
        owner = type(self.place.owner).__name__
        owner = f"{'an' if owner[0] in 'aeiouAEIOU' else 'a'} {owner}"
        if self.place.kind == "item":
            return f"{self.place.path}, {owner}"
        return f"variable {key!r}" if self.place.kind == "variable" else f"attribute {key!r} of {owner}"


class Changes:
    """Holds what one run of a function changed.

    Attributes:
        path: one of the places, as a user would write it.
        kept: what stands in the changes for each tensor and size that the call computes.
    """

    def __init__(self, changes: list[Change], are_made: bool, kept: Sequence[Any] = ()):
        self._changes = changes
        self._are_made = are_made
        self.path = changes[0].path
        self.kept = tuple(kept)

    def make(self, values: Sequence[Any] = ()) -> None:
        """Makes the changes, with ``values`` in place of ``kept``, if they are not made. A second time does nothing."""
        if not self._are_made:
            self._are_made = True
            known = {id(stand_in): value for stand_in, value in zip(self.kept, values, strict=True)}
            exchange = Exchange(lambda leaf: known.get(id(leaf), leaf))
            for change in self._changes:
                change.exchanged(exchange).make()
        self._changes = []

    def undo(self) -> None:
        """Takes the changes back, if their call has not ended."""
        if self._are_made:
            self._are_made = False
            undo(self._changes)


def undo(changes: Iterable[Change]) -> None:
    """Takes ``changes`` back."""
    for change in changes:
        change.undo()


_of_call: contextvars.ContextVar[list[Changes] | None] = contextvars.ContextVar("changes of a call", default=None)


@contextmanager
def changes_stay(stay: bool = True) -> Iterator[None]:
    """Lets what a traced function changes stay after the call of this context, unless the call raises.

    Args:
        stay: whether it is one; False within it for traces that no call follows.
    """
    made: list[Changes] = []
    token = _of_call.set(made if stay else None)
    try:
        yield
    except BaseException:
        for changes in made:
            changes.undo()
        raise
    finally:
        _of_call.reset(token)


def may_stay() -> bool:
    """Returns whether a call is in progress for which what is traced changes things."""
    return _of_call.get() is not None


def changes_of(listed: list[Change], are_made: bool, kept: Sequence[Any] = ()) -> Changes:
    """Groups ``listed`` changes, to be taken back if the call in progress raises.

    Args:
        kept: what stands in them for tensors and sizes.
    """
    changes, calls = Changes(listed, are_made, kept), _of_call.get()
    if are_made and calls is not None:
        calls.append(changes)
    return changes


class Journal:
    """Holds the objects that a function reaches, with their contents before it ran.

    Attributes:
        caches: the functions with a cache (``functools.lru_cache``) among them.
    """

    def __init__(self) -> None:
        self.caches: list[Any] = []
        self._noted: list[tuple[Place, dict[Any, Any]]] = []
        self._whole: dict[int, Any] = {}
        self._known: dict[tuple[Any, ...], Any] = {}

    def note(self, path: str, value: Any) -> None:
        """Notes ``value``, which the function reaches by ``path``, and what it consists of."""
        if (isinstance(value, GUARDED) and not isinstance(value, type)) or id(value) in self._whole:
            return
        self._whole[id(value)] = value  # whose id no other object then has
        if isinstance(value, LRU_CACHE):
            self.caches.append(value)
        for place in _places(path, value):
            self._add(place)
        members = vars(value).get("_modules") if isinstance(value, torch.nn.Module) and _is_users(value) else None
        for name, module in (members or {}).items():
            self.note(f"{path}.{name}", module)

    def note_variables(self, function: types.FunctionType, names: Iterable[str]) -> None:
        """Notes the variables around ``function``: its closure's, and the global ones called ``names``."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._add(_cell(name, cell))
        variables = function.__globals__
        for name in names:
            wanted = frozenset((name,))
            self._add(_names("", "variable", variables, variables, wanted.__contains__, name))

    def _add(self, place: Place) -> None:
        if place.identity not in self._known:
            self._known[place.identity] = place.owner  # whose id no other object then has
            self._noted.append((place, place.read()))

    def changed(self) -> list[Change]:
        """Lists what differs from what was noted."""
        changes = []
        for place, before in self._noted:
            now = place.read()
            keys = _changed(place, before, now)
            if keys is not None:
                changes.append(Change(place, before, now, keys))
        return changes


def _changed(place: Place, before: dict[Any, Any], now: dict[Any, Any]) -> tuple[Any, ...] | None:
    """Returns the keys at which contents differ; None if none do."""
    keys = [key for key in now if not (key in before and same_value(now[key], before[key]))]
    keys = [key for key in keys if not _is_computed_once(place.owner, key, before, now)]
    keys += [key for key in before if key not in now]
    if keys or not place.is_ordered or [*now] == [*before]:
        return tuple(keys) if keys else None
    return tuple(now)


def _is_computed_once(owner: Any, key: Any, before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Returns whether a new attribute is the value of a ``functools.cached_property``, which any reader would have
    made."""
    descriptor = (
        isinstance(getattr(type(owner), key, None), functools.cached_property) if isinstance(key, str) else False
    )
    return descriptor and key not in before and not isinstance(now[key], torch.fx.Proxy)


def _is_users(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] != "jitgen"


# ------------------------------------------------------------------------------------------------------ what can change


def _places(path: str, value: Any) -> Iterator[Place]:
    """Yields the places of ``value`` that a function can change."""
    if not _is_users(value) or (isinstance(value, torch.Tensor) and type(value) not in _TENSORS):
        return
    if isinstance(value, types.ModuleType):
        if not is_library(value.__name__):
            yield _names(path, "attribute", value, vars(value), _is_plain)
    elif isinstance(value, type):
        if not is_library(value.__module__):
            yield _names(path, "attribute", value, None, _is_plain)
    else:
        container = _container(path, value)
        if container is not None:
            yield container
        try:  # without code of the user's; a thread's local attributes are a dict of the thread's own
            own = vars(value) if isinstance(value, threading.local) else object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = None
        if isinstance(own, dict):
            yield _names(path, "attribute", value, own, lambda name: True)
        for name in _TABLES if isinstance(value, torch.nn.Module) else ():
            table = vars(value).get(name)
            if isinstance(table, dict):
                yield _names(path, "attribute", value, table, lambda name: True)
        slots = frozenset(_slots(type(value)))
        if slots:
            yield _names(path, "attribute", value, None, lambda name: name in slots)


def _is_plain(name: str) -> bool:
    """Returns whether a name of a module or class is the user's, rather than one by which Python describes it."""
    return not name.startswith(("__", "_abc_"))


def _slots(owner: type) -> list[str]:
    users = [base for base in owner.__mro__ if not is_library(base.__module__)]
    return [n for base in users for n, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)]


def _names(
    path: str,
    kind: str,
    owner: Any,
    variables: dict[str, Any] | None,
    is_wanted: Callable[[str], bool],
    name: str = "",
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


def _cell(name: str, cell: types.CellType) -> Place:
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
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    if isinstance(value, (list, deque)):
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

    elif isinstance(value, dict):
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

    elif isinstance(value, set):

        def read() -> dict[Any, Any]:
            return dict.fromkeys(set.__iter__(value), True)

        def write(new: dict[Any, Any]) -> None:
            set.intersection_update(value, new)
            set.update(value, new)

    elif isinstance(value, contextvars.ContextVar):

        def read() -> dict[Any, Any]:
            return {"value": value.get(MISSING)}

        def write(new: dict[Any, Any]) -> None:
            if new["value"] is not MISSING:
                value.set(new["value"])

    elif _is_writable(value):

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

    else:
        return None
    return Place(path, "item", value, (id(value), "contents"), read, write, isinstance(value, dict))
