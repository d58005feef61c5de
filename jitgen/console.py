"""Writes for people to read, in processes that may have no standard error, or a strange one.

``sys.stderr`` is None in a service or a windowed program, may be closed, and may be an object that has ``write`` alone.
A call of a kernel never fails because of that: what cannot be written is left out.

A message of ``log`` has a level: 1 compiles and store hits, 2 plans, 3 sources, 4 graphs. ``JITGEN_DEBUG`` of at least
that level writes it to standard error, whatever logging is configured to do. The logger ``jitgen`` gets it at the level
that ``LOGGED_AT`` names, and writes nothing until a program gives it, or the root logger, a handler and such a level.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jitgen import settings

LOGGED_AT = {1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG - 1, 4: logging.DEBUG - 2}
"""The level of ``logging`` for each level of ``JITGEN_DEBUG``: 20, 10, 9 and 8."""

logger = logging.getLogger("jitgen")
logger.addHandler(logging.NullHandler())


def printable(text: str) -> str:
    """Returns ``text`` as a terminal may be given it: control characters, which it would obey, are question marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def is_terminal(stream: Any) -> bool:
    """Returns whether ``stream`` is a terminal; false for None, for a closed stream and for an object that cannot say
    so."""
    try:
        return bool(stream.isatty())
    except Exception:
        return False


def write(text: str, stream: Any = None) -> None:
    """Writes ``text`` to ``stream``, or to standard error, if that takes it."""
    stream = sys.stderr if stream is None else stream
    with suppress(Exception):
        stream.write(text)
        stream.flush()


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warns as ``warnings.warn`` does, which raises ValueError where standard error is closed; this does not.

    Raises:
        Warning: the user's filters make errors of warnings.
    """
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except Warning:
        raise
    except Exception:
        write(f"{category.__name__}: {message}\n")


def log(level: int, message: str | Callable[[], str]) -> None:
    """Tells ``message`` (or what it returns) where the user asked for ``level``."""
    shown, logged = settings.get("JITGEN_DEBUG") >= level, logger.isEnabledFor(LOGGED_AT[level])
    if shown or logged:
        text = printable(message if isinstance(message, str) else message())
        if shown:
            write(f"jitgen: {text}\n")
        if logged:
            logger.log(LOGGED_AT[level], "%s", text)
