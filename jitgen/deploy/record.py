"""Recording which specialisations a program meets, into a manifest (``manifest``)."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitgen import scratch, settings
from jitgen.errors import CacheError
from jitgen.forks import Lock
from jitgen.store import notice

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""

INTERVAL_SECONDS = 2.0
"""Seconds after which what a process has met is written, so that little is lost where a signal ends it."""
PATIENCE_SECONDS = 30.0
"""Seconds to wait for another process that writes the same file."""


@dataclass(eq=False)
class Recorder:
    """What is recorded into one file: entries by identity.

    A thread writes them while the program goes on, which no file that cannot be written disturbs: a warning tells.
    """

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    _process: int = 0
    _timer: threading.Timer | None = None

    def write(self) -> None:
        """Merge what was recorded into the file; CacheError, which names a copy of it, if that cannot be done."""
        from jitgen.deploy import manifest

        with _lock:
            entries = dict(self.entries)
        try:
            manifest.write(Path(self.path), entries, PATIENCE_SECONDS)
        except CacheError as problem:
            kept = scratch.keep(Path(self.path).name, manifest.encoded(entries))
            copy = f"; what this process recorded is kept in {kept} for a day" if kept else ""
            raise CacheError(f"{problem}{copy}") from problem

    def write_soon(self) -> None:
        """Write in a while, and when this process ends. Called with the lock held."""
        if self._process != os.getpid():  # a child of a fork has neither the thread nor what is to be done at its end
            self._process, self._timer = os.getpid(), None
            _at_end(self._write_or_warn)
        if self._timer is None:
            timer = threading.Timer(INTERVAL_SECONDS, self._write_later)
            timer.daemon = True
            with suppress(RuntimeError):  # no more threads, or the process is ending: then it is written at the end
                timer.start()
                self._timer = timer

    def stop(self) -> None:
        """Write nothing any more by itself."""
        self._process = -1
        atexit.unregister(self._write_or_warn)
        if self._timer is not None:
            self._timer.cancel()

    def _write_later(self) -> None:
        self._timer = None
        self._write_or_warn()

    def _write_or_warn(self) -> None:
        if self._process == os.getpid():
            try:
                self.write()
            except CacheError as problem:
                notice.once(f"recording into {self.path}", str(problem))


def _at_end(write: Callable[[], None]) -> None:
    atexit.register(write)
    if multiprocessing.parent_process() is not None:  # such a process ends without what atexit has
        from multiprocessing.util import Finalize

        Finalize(None, write, exitpriority=10)


_lock = Lock()
_recorders: list[Recorder] = []


def recording() -> bool:
    """Whether a manifest is being recorded: specialisations are then told to ``note``."""
    path = settings.get("JITGEN_RECORD")
    if path and not any(recorder.path == path for recorder in _recorders):
        _start(path)
    return bool(_recorders)


def note(entry: Entry) -> None:
    """Add ``entry`` to every manifest being recorded."""
    from jitgen.deploy import manifest

    identity = manifest.identity_of(entry)
    with _lock:
        for recorder in _recorders:
            if identity not in recorder.entries:
                recorder.entries[identity] = entry
                recorder.write_soon()


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within this context every specialisation met is written to the manifest ``path`` (merged with one already there).

    Specialisations bound before the context are met again only when a new signature or layout comes; start recording
    before the first call. What is lowered (``JitFunction.lower``) is recorded as a call is, so that tensors may be
    described rather than made. Also ``JITGEN_RECORD=path`` for a whole process.

    Raises:
        CacheError: at the end of the context, where the manifest cannot be written.
    """
    recorder = _start(os.fspath(path))
    try:
        yield
    finally:
        with _lock:
            _recorders.remove(recorder)
            recorder.stop()
        recorder.write()


def _start(path: str) -> Recorder:
    recorder = Recorder(path)
    with _lock:
        _recorders.append(recorder)
    return recorder
