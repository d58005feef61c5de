"""Recording which specialisations a program meets, into a manifest (``manifest``)."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitgen import settings

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""


@dataclass(eq=False)
class Recorder:
    """What is recorded into one file: entries by identity."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    _written: int = 0
    _when: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        """Merge what was recorded into the file."""
        from jitgen.deploy import manifest

        with _lock:
            entries = dict(self.entries)
        manifest.write(Path(self.path), entries)
        self._written, self._when = len(entries), time.monotonic()

    def write_sometimes(self) -> None:
        """``write``, if there is something new and the last time was long ago: a process may end by a signal."""
        if len(self.entries) > self._written and time.monotonic() - self._when >= INTERVAL_SECONDS:
            self.write()


INTERVAL_SECONDS = 5.0
"""Seconds after which a recorder writes again what it met meanwhile. The rest is written at the end."""

_lock = threading.Lock()
_recorders: list[Recorder] = []


def recording() -> bool:
    """Whether a manifest is being recorded: specialisations are then told to ``note``."""
    path = settings.get("JITGEN_RECORD")
    if path and not any(recorder.path == path for recorder in _recorders):
        atexit.register(_start(path).write)
    return bool(_recorders)


def note(entry: Entry) -> None:
    """Add ``entry`` to every manifest being recorded."""
    from jitgen.deploy import manifest

    identity = manifest.identity_of(entry)
    with _lock:
        recorders = tuple(_recorders)
        for recorder in recorders:
            recorder.entries.setdefault(identity, entry)
    for recorder in recorders:
        recorder.write_sometimes()


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within this context every specialisation met is written to the manifest ``path`` (merged with one already there).

    Specialisations bound before the context are met again only when a new signature or layout comes; start recording
    before the first call. What is lowered (``JitFunction.lower``) is recorded as a call is, so that tensors may be
    described rather than made. Also ``JITGEN_RECORD=path`` for a whole process.
    """
    recorder = _start(os.fspath(path))
    try:
        yield
    finally:
        with _lock:
            _recorders.remove(recorder)
        recorder.write()


def _start(path: str) -> Recorder:
    recorder = Recorder(path)
    with _lock:
        _recorders.append(recorder)
    return recorder
