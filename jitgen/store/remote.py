"""Reads and writes a store that hosts share, at an ``fsspec`` URL: an object store, a web server, a share (extra
``jitgen[remote]``).

::

    <url>/v1/plan/ab/<key>.json          as in a directory
    <url>/v1/artifact/ab/<key>.zip       a bundle of one entry

An entry is one object, so that it is there as a whole or not at all; on a file system it is written beside its place
and renamed. Writers need no lock: equal keys mean equal kernels. What is read is verified as everything is, and then
put into the local store, so that the next process finds it there.

**Time.** Every access has ``JITGEN_REMOTE_TIMEOUT`` seconds. Where a remote takes longer, fails, or sends what is
damaged, the user is told once, and it is left alone for ``PAUSE_SECONDS``: a call pays for it once. The access runs in
a thread of its own, which nobody waits for after that, not even at the end of the process. A remote that refuses to be
written is still read.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.store import layout, notice
from jitgen.store.entries import Contents
from jitgen.store.files import JSON_LIMIT, Damaged, Untrusted
from jitgen.store.signing import Trust
from jitgen.store.sources import verify

PAUSE_SECONDS = 300.0
"""How long a remote that failed is left alone."""
OBJECT_LIMIT = 2**28
"""Bytes of an artifact's object."""

Result = TypeVar("Result")


@dataclass(eq=False)
class Remote:
    """Represents the store at ``url``.

    Attributes:
        resting_until: when it is asked again, on the clock of ``time.monotonic``.
        read_only: whether it is not to be written; it is found out by the first write. A web server is not.
    """

    url: str
    resting_until: float = 0.0
    read_only: bool = False
    _file_system: Any = None
    _root: str = ""
    _process: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get(self, kind: str, key: str, trust: Trust | None) -> Contents | None:
        """Returns the files of an entry, verified; None if the remote has no such entry, or is left alone."""
        limit = JSON_LIMIT if kind == "plan" else OBJECT_LIMIT
        content = self._access(lambda files, root: _read(files, _path(root, kind, key), limit))
        if content is None:
            return None
        try:
            if len(content) > limit:
                raise Damaged(f"it has more than {limit} bytes")
            contents = {f"{key}.json": content} if kind == "plan" else _unpacked(key, content)
            verify(kind, key, contents, trust)
        except Untrusted as problem:
            notice.once(f"untrusted {self.url}", f"{kind} {key[:12]} of {self.url} is not used: {problem}")
            return None
        except Damaged as damage:
            self._rest(f"what it sent for {kind} {key[:12]} is damaged: {damage}")
            return None
        return contents

    def put(self, kind: str, key: str, contents: Contents) -> bool:
        """Writes an entry, if the remote can be written; returns whether it was."""
        if self.read_only:
            return False
        from jitgen.store import bundle

        content = bundle.packed(kind, key, contents) if kind == "artifact" else contents[f"{key}.json"]
        refused: list[Exception] = []

        def write(files: Any, root: str) -> bool:
            try:
                _write(files, _path(root, kind, key), content)
            except Exception as error:
                refused.append(error)
            return not refused

        if self._access(write):
            return True
        if refused:
            self.read_only = True
            notice.once(
                f"read-only {self.url}",
                f"the remote store {self.url} cannot be written, and is only read from now on: "
                f"{type(refused[0]).__name__}: {refused[0]}",
            )
        return False

    def has(self, kind: str, key: str) -> bool:
        """Returns whether the remote has the entry; False also while it is left alone."""
        return self._access(lambda files, root: files.exists(_path(root, kind, key))) is True

    def _access(self, work: Callable[[Any, str], Result]) -> Result | None:
        """Returns ``work(file system, root)``; None if there is no such object, or the remote fails or is left
        alone."""
        if time.monotonic() < self.resting_until:
            return None
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((work(*self._opened()), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="jitgen remote", daemon=True)
        thread.start()
        timeout = settings.get("JITGEN_REMOTE_TIMEOUT")
        thread.join(timeout)
        if not outcome:
            self._rest(f"it did not answer within {timeout:g} s (JITGEN_REMOTE_TIMEOUT)")
            return None
        result, error = outcome[0]
        if error is None:
            return result
        if not isinstance(error, FileNotFoundError):
            self._rest(f"{type(error).__name__}: {error}")
        return None

    def _opened(self) -> tuple[Any, str]:
        """Returns the file system of the URL, and the path in it; opened again in a child, where its threads do not
        run."""
        with self._lock:
            if self._process != os.getpid():
                from fsspec.core import url_to_fs

                self._file_system, self._root = url_to_fs(self.url)
                self._process = os.getpid()
            return self._file_system, self._root

    def _rest(self, reason: str) -> None:
        self.resting_until = time.monotonic() + PAUSE_SECONDS
        notice.once(
            f"remote {self.url}",
            f"the remote store {self.url} is left alone for {PAUSE_SECONDS:g} s: {reason}. "
            "Kernels that it may have are compiled here",
        )


def opened(url: str) -> Remote:
    """Returns the remote at ``url``, one for all stores of this process.

    Raises:
        CacheError: ``fsspec`` is not installed.
    """
    try:
        import fsspec  # noqa: F401
    except ImportError:
        raise CacheError(
            "JITGEN_CACHE_REMOTE needs the package fsspec and one for its protocol, such as s3fs; install it with: "
            "pip install 'jitgen[remote]'"
        ) from None
    return _opened(url)


@lru_cache
def _opened(url: str) -> Remote:
    return Remote(url, read_only=url.startswith(("http://", "https://")))


def _unpacked(key: str, content: bytes) -> Contents:
    """Returns the files of the artifact in a bundle of one entry."""
    from jitgen.store import bundle

    try:
        packed = bundle.of_bytes(Path(f"{key}.zip"), content)
    except CacheError as problem:
        raise Damaged(str(problem)) from problem
    if list(packed.members) != [("artifact", key)]:
        raise Damaged("it holds another entry")
    return packed.contents("artifact", key)


def _path(root: str, kind: str, key: str) -> str:
    ending = "json" if kind == "plan" else "zip"
    return f"{root.rstrip('/')}/{layout.VERSION}/{kind}/{key[:2]}/{key}.{ending}"


def _read(files: Any, path: str, limit: int) -> bytes:
    """Reads an object, or its first ``limit + 1`` bytes. What is late is not read any further: nobody waits for it."""
    seconds = settings.get("JITGEN_REMOTE_TIMEOUT")
    if "http" in _protocols(files):  # a web server may take no notice of the range that is asked for
        content, deadline = b"", time.monotonic() + seconds
        with files.open(path, block_size=0, size=1) as stream:  # as it comes, without asking for its size first
            while len(content) <= limit and (more := stream.read(limit + 1 - len(content))):
                content += more
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it did not send {path} in time")
        return content
    if getattr(files, "async_impl", False):
        from fsspec.asyn import sync

        data: bytes = sync(files.loop, files._cat_file, path, start=0, end=limit + 1, timeout=seconds)
    else:
        data = files.cat_file(path, start=0, end=limit + 1)
    return data


def _protocols(files: Any) -> tuple[str, ...]:
    return files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)


def _write(files: Any, path: str, content: bytes) -> None:
    """Writes an object at once: an object store does so itself, and in a directory it is renamed."""
    if "file" not in _protocols(files):
        files.pipe_file(path, content)
        return
    files.makedirs(files._parent(path), exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.new"
    try:
        files.pipe_file(temporary, content)
        files.mv(temporary, path)
    finally:
        if files.exists(temporary):
            files.rm_file(temporary)
