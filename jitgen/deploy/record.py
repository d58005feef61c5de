"""Records which specialisations a program meets, into a manifest (``manifest``).

Calls are events (``events.py``), to which ``listen`` subscribes: what is new is noted where a manifest is being
recorded, and what may not be compiled in a manifest of the store, which the error of such a call names.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jitgen import console, events, scratch, settings
from jitgen.errors import CacheError, CacheWarning, UnsupportedError
from jitgen.events import CallEvent, MissEvent
from jitgen.forks import Lock
from jitgen.store import layout, notice
from jitgen.store.default import default_store

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""

INTERVAL_SECONDS = 2.0
"""Seconds after which what a process has met is written, so that little is lost where a signal ends it."""
PATIENCE_SECONDS = 30.0
"""Seconds to wait for another process that writes the same file."""
MISSED_SECONDS = 86400.0
"""The age, in seconds, from which a manifest of misses is not added to: what is missed no more need not be built."""


@dataclass(eq=False)
class Recorder:
    """Holds what is recorded into one file: entries by identity.

    A thread writes them while the program goes on, which no file that cannot be written disturbs: a warning tells.
    """

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    _process: int = 0
    _timer: threading.Timer | None = None

    def write(self) -> None:
        """Merges what was recorded into the file; CacheError, which names a copy of it, if that cannot be done."""
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
        """Writes in a while, and when this process ends. Called with the lock held."""
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
        """Stops writing by itself."""
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


@cache
def listen() -> None:
    """Hears of every call from now on. A second time does nothing."""
    events.subscribe(CallEvent, note_call)
    events.subscribe(MissEvent, remedy)


def note_call(call: CallEvent) -> None:
    """Adds a call to every manifest being recorded; a call with one row also with two, since a trace of a size of 1
    serves no other size."""
    if not _is_recording():
        return
    _note(call)
    if call.with_leaves is None:
        return
    from jitgen.deploy import row_variants  # only a program that records needs it

    for enlarged in row_variants.enlarged(call.leaves, call.tree):
        larger = call.with_leaves(enlarged)
        if larger is not None:
            _note(larger, {"enlarged": True})


def remedy(miss: MissEvent) -> str:
    """Returns the command that builds what a call misses. Its manifest has everything that was missed of late."""
    path, first = settings.get("JITGEN_RECORD"), ""
    if not path:
        try:
            entry = _entry_of(miss.call)
        except UnsupportedError as error:
            return f"it, which cannot be prewarmed: {error}"
        path = _missed(entry)
        if path is None:
            path, first = "specs.json", "run this program with JITGEN_RECORD=specs.json, and then "
    return f"{first}jitgen prewarm {shlex.quote(path)} --target {miss.call.lowered.route.target}"


def _missed(entry: Entry) -> str | None:
    """Adds ``entry`` to the store's manifest of misses, and returns its path; None where the store cannot be written.
    A manifest that was last written ``MISSED_SECONDS`` ago is begun anew."""
    from jitgen.deploy import manifest

    store = default_store()
    path = layout.missed_path(store.root)
    if not store.writable:
        return None
    try:
        with store.writing():
            if path.exists() and path.stat().st_mtime < time.time() - MISSED_SECONDS:
                path.unlink(missing_ok=True)
            manifest.write(path, {manifest.identity_of(entry): entry}, patience=1.0)
    except CacheError:
        return None
    return str(path)


def _is_recording() -> bool:
    path = settings.get("JITGEN_RECORD")
    if path and not any(recorder.path == path for recorder in _recorders):
        _start(path)
    return bool(_recorders)


def _entry_of(call: CallEvent) -> Entry:
    from jitgen.deploy import manifest

    return manifest.entry_of(call.graph, call.lowered, call.environment, call.memory, call.requested, call.tensors)


def _note(call: CallEvent, further: Entry | None = None) -> None:
    """Adds a call to every manifest being recorded; with these ``further`` members where a user's kernel runs in it."""
    from jitgen.deploy import manifest, own_integers

    try:
        entry = _entry_of(call)
        if further and own_integers.has_own_kernels(entry):
            entry = {**entry, **further}
    except UnsupportedError as error:
        console.warn(f"a call is not recorded: {error}", CacheWarning, stacklevel=2)
        return
    identity = manifest.identity_of(entry)
    with _lock:
        for recorder in _recorders:
            if identity not in recorder.entries:
                recorder.entries[identity] = entry
                recorder.write_soon()


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes every specialisation met within this context to the manifest ``path`` (merged with one already there).

    Specialisations bound before the context are met again only when a new signature or layout comes; start recording
    before the first call. What is lowered (``JitFunction.lower``) is recorded as a call is, so that tensors may be
    described rather than made. Also ``JITGEN_RECORD=path`` for a whole process.

    Raises:
        CacheError: at the end of the context, where the manifest cannot be written.
    """
    listen()
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
