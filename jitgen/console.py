"""What jitgen writes for people to read, in processes that may have no standard error, or a strange one.

``sys.stderr`` is None in a service or a windowed program, may be closed, and may be an object that has ``write`` alone.
A call of a kernel never fails because of that: what cannot be written is left out.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import Any


def printable(text: str) -> str:
    """``text`` as a terminal may be given it: control characters, which it would obey, are question marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def is_terminal(stream: Any) -> bool:
    """Whether ``stream`` is a terminal; false for None, for a closed stream and for an object that cannot say so."""
    try:
        return bool(stream.isatty())
    except Exception:
        return False


def write(text: str, stream: Any = None) -> None:
    """Write ``text`` to ``stream``, or to standard error, if that takes it."""
    stream = sys.stderr if stream is None else stream
    with suppress(Exception):
        stream.write(text)
        stream.flush()


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as ``warnings.warn`` does, which raises ValueError where standard error is closed; this does not.

    Raises:
        Warning: the user's filters make errors of warnings.
    """
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except Warning:
        raise
    except Exception:
        write(f"{category.__name__}: {message}\n")
