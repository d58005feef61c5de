"""What jitgen tells on stderr, by ``JITGEN_DEBUG``: 1 compiles and store hits, 2 plans, 3 sources, 4 graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jitgen import settings


def log(level: int, message: str | Callable[[], str]) -> None:
    """Write ``message`` (or what it returns) when the user asked for ``level``."""
    if settings.get("JITGEN_DEBUG") >= level:
        text = message if isinstance(message, str) else message()
        # Control characters would be the terminal's to obey.
        plain = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
        sys.stderr.write(f"jitgen: {plain}\n")
