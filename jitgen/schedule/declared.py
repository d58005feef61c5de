"""Declares a schedule once: a frozen dataclass whose metadata says what a number is called in words and in C++.

::

    @dataclass(frozen=True)
    class Stream(DeclaredSchedule):
        sentence = ("tiles of {block_m} x {block_n}", "stages", "wide")
        config = ("tokens", "rows", "depth")

        tokens: int
        stages: int = field(metadata=about("{} stages", member="depth"))
        wide: bool = field(default=False, metadata=about("64-bit indices"))

        @derived(member="rows")
        def block_n(self) -> int: ...

The key of a schedule is its class and its fields, and measured rows (``tuned.py``) name it by these. ``str`` says it in
words, for people, in the order of ``sentence``. ``members`` is what the ``struct Config`` of its mainloop has, in the
order of ``config``. A rule makes schedules, a model estimates their time, and a template reads them, all of the one
class.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

T = TypeVar("T")
_ABOUT = "about"


@dataclass(frozen=True)
class About:
    """Says what a field is called, or a number that follows from fields.

    Attributes:
        words: of the sentence, ``{}`` being the number, and ``{:row}`` or ``{:access|accesses}`` the number of such;
            empty where it is not said.
        least: the least number that is said. A boolean is said where it is true, text where there is any.
        member: its name in the ``struct Config``, where that is not its own.
    """

    words: str = ""
    least: int = 2
    member: str = ""


def about(words: str = "", *, least: int = 2, member: str = "") -> Mapping[str, About]:
    """Returns the metadata of a field; the arguments are those of ``About``."""
    return {_ABOUT: About(words, least, member)}


class Derived(Generic[T]):
    """Marks a property that has an ``About``; see ``derived``."""

    def __init__(self, compute: Callable[[Any], T], about: About):
        self.compute, self.about, self.__doc__ = compute, about, compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Derived[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Derived[T] | T:
        return self if instance is None else self.compute(instance)


def derived(words: str = "", *, least: int = 2, member: str = "") -> Callable[[Callable[[Any], T]], Derived[T]]:
    """Makes a property of a method whose number follows from fields; the arguments are those of ``About``."""
    return lambda compute: Derived(compute, About(words, least, member))


class _Count(int):
    """Formats a number with what it counts: ``row`` or, if the plural is another, ``access|accesses``."""

    def __format__(self, noun: str) -> str:
        one, _, several = noun.partition("|")
        return " ".join(filter(None, (str(int(self)), one if self == 1 else several or (one and f"{one}s"))))


class Member(NamedTuple):
    """Describes a member of a ``struct Config``: ``static constexpr <type> <name> = <value>;``."""

    type: str
    name: str
    value: str


class DeclaredSchedule:
    """Provides the base of schedules, which are frozen dataclasses.

    Attributes:
        sentence: what is said, in order: the name of a field or property with words, or words that always are, with
            names of numbers in braces. A name that a class lacks is left out there, so that classes share a sentence.
        config: the members of the ``struct Config`` of the mainloop, in order: names of fields and properties, or of
            ``facts`` of a kernel.
    """

    sentence: ClassVar[tuple[str, ...]] = ()
    config: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        """Returns the schedule in words, for people; ``repr`` tells any two schedules apart."""
        return ", ".join(filter(None, map(self._said, self.sentence)))

    @property
    def _declared(self) -> Mapping[str, About]:
        own: type = type(self)
        return declared(own)

    def _said(self, item: str) -> str:
        if not item.isidentifier():
            names = [name for _, name, _, _ in string.Formatter().parse(item) if name]
            return item.format(**{name: _counting(getattr(self, name)) for name in names})
        about = self._declared.get(item)
        value = getattr(self, item) if about is not None else 0
        if about is None or not (value if isinstance(value, (bool, str)) else value >= about.least):
            return ""
        return about.words.format(_counting(value))

    def members(self, **facts: bool | int | str) -> list[Member]:
        """Returns the members of the ``struct Config`` of this schedule's mainloop.

        Args:
            facts: members that the kernel decides rather than its schedule. Text is an enumerator, such as
                ``jitgen::Along::k``.
        """
        assert facts.keys() <= set(self.config), f"{sorted(facts)} are not all members of {self.config}"
        names = {about.member: name for name, about in self._declared.items() if about.member}
        return [
            _member(name, facts[name] if name in facts else getattr(self, names.get(name, name)))
            for name in self.config
        ]


def _counting(value: Any) -> Any:
    return _Count(value) if isinstance(value, int) else value


def _member(name: str, value: bool | int | str) -> Member:
    if isinstance(value, str):
        return Member(value.rpartition("::")[0], name, value)
    return Member("bool", name, str(value).lower()) if isinstance(value, bool) else Member("int", name, str(value))


@functools.cache
def declared(schedule: type) -> Mapping[str, About]:
    """Returns what is said of a class's fields, in their order, and then of its properties."""
    named = {field.name: field.metadata[_ABOUT] for field in dataclasses.fields(schedule) if _ABOUT in field.metadata}
    for base in reversed(schedule.__mro__):
        named |= {name: value.about for name, value in vars(base).items() if isinstance(value, Derived)}
    return named
