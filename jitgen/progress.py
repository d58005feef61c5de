"""Shows one line on a terminal that says what long work is at; nothing if standard error is no terminal.

``with progress.line("quantising") as say: say("3 of 36: layers.0.query")`` shows the last thing said once the work has
lasted for ``PATIENCE`` seconds, with the seconds it has taken, and wipes the line at the end. Of lines within one
another the innermost is shown. Whatever takes long may import this module.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jitgen import console
from jitgen.forks import Lock

PATIENCE = 2.0
"""Seconds of work before a line is shown."""
EVERY = 0.5
"""Seconds between two states of a line."""

_lines: list[_Line] = []
_lock = Lock()


@contextmanager
def line(work: str) -> Iterator[Callable[[str], None]]:
    """Shows a line about ``work`` while the body runs, which gets a function that says how far the work has come."""
    stream = sys.stderr
    if not console.is_terminal(stream):
        yield lambda text: None
        return
    shown = _Line(work, stream)
    with _lock:
        _lines.append(shown)
    try:
        yield shown.say
    finally:
        shown.end()


class _Line:
    """Writes a line of a terminal from a thread of its own."""

    def __init__(self, work: str, stream: Any):
        self._work, self._text, self._stream = work, "", stream
        self._started, self._ended = time.monotonic(), threading.Event()
        self._written = False
        self._thread = threading.Thread(target=self._run, name="jitgen progress", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        self._text = text

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        with _lock:
            _lines.remove(self)
            if self._written:
                console.write("\r\x1b[K", self._stream)

    def _run(self) -> None:
        wait = PATIENCE
        while not self._ended.wait(wait):
            wait = EVERY
            with _lock:
                if _lines[-1] is self:
                    seconds = time.monotonic() - self._started
                    said = f"jitgen: {self._work}{f', {self._text}' if self._text else ''} ({seconds:.0f} s)"
                    plain = "".join(c if c.isprintable() else "?" for c in said)
                    console.write("\r\x1b[K" + plain[: shutil.get_terminal_size().columns - 1], self._stream)
                    self._written = True
