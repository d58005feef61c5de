"""Checks JSON values against a schema, each with the path to it, such as ``entries[3].graph.nodes[7].attrs[0]``.

Every method that finds something else than it is told to raises CacheError, whose message names the way, what is wrong,
and what would be right. Text from the file is quoted shortened and in ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jitgen.errors import CacheError

SIZE_LIMIT = 2**63
"""Sizes, strides, and the product of a tensor's sizes are below this."""


@dataclass(frozen=True, slots=True)
class Field:
    """Represents one value. ``parent`` and ``key`` are where it stands: a member's name, or an item's number."""

    value: Any
    parent: Field | None = None
    key: str | int = ""

    @property
    def path(self) -> str:
        keys: list[str | int] = []
        field: Field | None = self
        while field is not None and field.parent is not None:
            keys.append(field.key)
            field = field.parent
        text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(keys))
        return text.removeprefix(".") or "the file"

    def refuse(self, problem: str) -> NoReturn:
        raise CacheError(f"{self.path}: {problem}")

    def members(self, *names: str) -> tuple[Field, ...]:
        """Returns the members of an object that has exactly these, in this order."""
        if not isinstance(self.value, dict):
            self.refuse(f"{shown(self.value)} is not an object with {_listed(names)}")
        missing = [name for name in names if name not in self.value]
        if missing:
            self.refuse(f"lacks {_listed(missing)}; it has exactly {_listed(names)}")
        if len(self.value) != len(names):
            other = next(name for name in self.value if name not in names)
            self.refuse(f"has {shown(other)}; it has exactly {_listed(names)}")
        return tuple(Field(self.value[name], self, name) for name in names)

    def items(self, most: int, least: int = 0) -> list[Field]:
        """Returns the items of an array of ``least`` to ``most`` of them."""
        if not isinstance(self.value, list):
            self.refuse(f"{shown(self.value)} is not an array")
        if not least <= len(self.value) <= most:
            bound = f"exactly {least}" if least == most else f"{least} to {most}"
            self.refuse(f"has {len(self.value)} items; it may have {bound}")
        return [Field(item, self, number) for number, item in enumerate(self.value)]

    def integer(self, least: int, below: int) -> int:
        """Returns an integer from ``least`` up to but not including ``below``."""
        value = self.value
        if type(value) is not int or not least <= value < below:
            self.refuse(f"{shown(value)} is not an integer of at least {least} and below {below}")
        return value

    def size(self) -> int:
        return self.integer(0, SIZE_LIMIT)

    def one_of(self, names: Collection[Any]) -> Any:
        """Returns one of ``names``, which are of the types that they are to have."""
        if not any(type(self.value) is type(name) and self.value == name for name in names):
            self.refuse(f"{shown(self.value)} is none of {_listed(names)}")
        return self.value

    def text(self, pattern: re.Pattern[str], meaning: str) -> str:
        """Returns text that ``pattern`` matches as a whole."""
        if not isinstance(self.value, str) or pattern.fullmatch(self.value) is None:
            self.refuse(f"{shown(self.value)} is not {meaning}")
        return self.value


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object of a JSON file, for ``json.loads``; ValueError if it has a member twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a member twice")
    return members


def shown(value: Any) -> str:
    """Quotes ``value`` for a message: in ASCII, without control characters, and short."""
    if isinstance(value, (list, dict)):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value if not isinstance(value, str) else value[:60])
    return text if len(text) <= 80 else text[:80] + "..."


def _listed(names: Collection[Any] | Sequence[Any]) -> str:
    texts = ["null" if name is None else str(name) for name in names]
    return ", ".join(texts if len(texts) <= 16 else [*texts[:14], "...", texts[-1]])
