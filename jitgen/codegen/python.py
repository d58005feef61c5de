"""Writes Python functions whose text jitgen generates: dispatchers, plans, launchers and the like.

Where a loop over arguments would ask at every call what each of them is, a generated function has the answers in its
text. What writes one makes lines, and ``PythonFunction`` makes a function of them, whose lines tracebacks show.
(dataclasses and attrs make their methods the same way.) Text is written nowhere else.
"""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PythonFunction:
    """Holds the text of one function.

    Attributes:
        name: the function's.
        parameters: as they stand between its parentheses.
        body: its lines, not indented.
    """

    name: str
    parameters: Sequence[str]
    body: Sequence[str]

    @property
    def text(self) -> str:
        return "\n".join([*block(f"def {self.name}({', '.join(self.parameters)}):", self.body), ""])

    def define(self, title: str, names: Mapping[str, Any]) -> Any:
        """Compiles the text and returns the function, over the global ``names``.

        Args:
            title: what it is, such as ``"launch of add"``. With a checksum of the text it is the file name that
                tracebacks show; functions of the same text share it, so that ``linecache`` does not grow with every
                plan bound.
        """
        text = self.text
        path = f"<jitgen {title} {zlib.crc32(text.encode()):08x}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        variables = dict(names)
        exec(compile(text, path, "exec"), variables)
        # The function does not refer to itself: without that cycle it is freed as soon as nothing refers to it.
        return variables.pop(self.name)


def block(header: str, body: Iterable[str]) -> list[str]:
    """Returns the lines of a statement such as ``"if x:"`` and of what is within it."""
    return [header, *(f"    {line}" for line in body)]


def tuple_text(items: Iterable[str]) -> str:
    """Writes a tuple of these expressions."""
    return f"({''.join(f'{item}, ' for item in items)})"
