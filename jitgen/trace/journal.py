"""Records what a traced function may change outside of it: objects, containers and variables, as they were before the
trace.

``Captures`` notes every object that it visits before the function runs. After the run the journal compares each with
what it was. What differs is in ``Changes``. Of a call they stay (``changes_stay``): they happened as in eager Python,
under the locks that the function holds. They are taken back where the call raises, and where nothing is called, as by
``lower`` and ``bind``.

Other threads may change the same objects meanwhile. So only what is still as the function left it is taken back, key by
key, and no container is empty for a moment. What they wrote between the two comparisons, while the function ran, counts
as the function's: who wrote it cannot be seen afterwards.

Neighbours: ``places.py`` says what can change; ``kept.py`` describes tensors of the trace in changes, and
``escapes.py`` refuses what it cannot describe; ``call/resolver.py`` keeps a trace with changes for one call alone, so
that each call makes its own.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgen.trace.captured import GUARDED, MISSING, same_value
from jitgen.trace.kept import Exchange
from jitgen.trace.places import Place, cell_of, is_users, names_of, places

LRU_CACHE = type(functools.cache(len))
"""The type of functions that ``functools.lru_cache`` makes."""


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
        for place in places(path, value):
            self._add(place)
        members = vars(value).get("_modules") if isinstance(value, torch.nn.Module) and is_users(value) else None
        for name, module in (members or {}).items():
            self.note(f"{path}.{name}", module)

    def note_variables(self, function: types.FunctionType, names: Iterable[str]) -> None:
        """Notes the variables around ``function``: its closure's, and the global ones called ``names``."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._add(cell_of(name, cell))
        variables = function.__globals__
        for name in names:
            wanted = frozenset((name,))
            self._add(names_of("", "variable", variables, variables, wanted.__contains__, name))

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
