"""What jitgen tells on stderr, by ``JITGEN_DEBUG``: 1 compiles and store hits, 2 plans, 3 sources, 4 graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jitgen import settings


def printable(text: str) -> str:
    """``text`` as a terminal may be given it: control characters, which it would obey, are question marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def log(level: int, message: str | Callable[[], str]) -> None:
    """Write ``message`` (or what it returns) when the user asked for ``level``."""
    if settings.get("JITGEN_DEBUG") >= level:
        text = message if isinstance(message, str) else message()
        sys.stderr.write(f"jitgen: {printable(text)}\n")
