"""What jitgen tells of its work: to ``logging``, under the name ``jitgen``, and on stderr by ``JITGEN_DEBUG``.

A message has a level: 1 compiles and store hits, 2 plans, 3 sources, 4 graphs. ``JITGEN_DEBUG`` of at least that level
writes it to standard error, whatever logging is configured to do. The logger ``jitgen`` gets it at the level that
``LOGGED_AT`` names, and writes nothing until a program gives it, or the root logger, a handler and such a level.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jitgen import console, settings

LOGGED_AT = {1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG - 1, 4: logging.DEBUG - 2}
"""Level of ``JITGEN_DEBUG`` -> level of ``logging``: 20, 10, 9 and 8."""

logger = logging.getLogger("jitgen")
logger.addHandler(logging.NullHandler())


def log(level: int, message: str | Callable[[], str]) -> None:
    """Tell ``message`` (or what it returns) where the user asked for ``level``."""
    shown, logged = settings.get("JITGEN_DEBUG") >= level, logger.isEnabledFor(LOGGED_AT[level])
    if shown or logged:
        text = console.printable(message if isinstance(message, str) else message())
        if shown:
            console.write(f"jitgen: {text}\n")
        if logged:
            logger.log(LOGGED_AT[level], "%s", text)
