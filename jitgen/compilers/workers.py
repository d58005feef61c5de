"""Runs worker processes as an ``Executor``: they survive one another, and need nothing of the program that starts them.

``ProcessPoolExecutor`` is not used for two reasons. It imports the program's ``__main__`` again in every worker, where
a script that calls ``prewarm`` without ``if __name__ == "__main__"`` would call it again. And when one worker dies,
every task of the pool is lost. Here a worker is ``python -c "... serve()"``, which reads pickled calls from its input
and writes pickled results, and a worker that dies (a compiler that crashes, or runs out of memory) fails its own task.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
_START = "import sys; sys.path[:] = {path!r}; from jitgen.compilers.workers import serve; serve()"


class WorkerDied(RuntimeError):
    """Reports that a worker process ended before it answered."""


class WorkerProcesses(Executor):
    """Runs ``count`` worker processes, which are started when there is something for them to do."""

    def __init__(self, count: int, bytes_each: int):
        """Replaces a worker by a new one when it takes more than ``bytes_each`` of memory."""
        self._bytes_each = bytes_each
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jitgen worker")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls ``function``, which is looked up by its module and name; what it takes and returns can be pickled."""
        return self._threads.submit(self._run, function, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        while not self._idle.empty():
            self._idle.get().end()

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker()
        try:
            succeeded, result, used = worker.call((function, args, kwargs))
        except BaseException:
            worker.end()
            raise
        if used > self._bytes_each:
            worker.end()
        else:
            self._idle.put(worker)
        if not succeeded:
            raise result
        return result


class _Worker:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in ``end``
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def call(self, what: Any) -> tuple[bool, Any, int]:
        """Returns whether the call returned, what it returned or raised, and the bytes of memory that the worker
        has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, what)
            answer: tuple[bool, Any, int] = _receive(self._process.stdout)
            return answer
        except (OSError, EOFError):
            raise WorkerDied(self._how_it_ended()) from None

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _how_it_ended(self) -> str:
        status = self._process.wait(30)
        how = f"with status {status}"
        if status < 0:
            how = f"by {signal.Signals(-status).name}"
            how += " (the system kills processes when memory runs out)" if status == -signal.SIGKILL else ""
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        return f"the worker process ended {how}" + (f"; it said: {said}" if said else "")


def serve() -> None:
    """Answers calls from standard input until it ends. What else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while True:
        try:
            function, args, kwargs = _receive(calls)
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except Exception as error:
            answer = False, error
        _send(answers, (*answer, _resident_bytes()))


def _resident_bytes() -> int:
    """Returns the memory of this process, in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _send(stream: IO[bytes], value: Any) -> None:
    content = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    content = stream.read(_LENGTH.unpack(length)[0])
    return pickle.loads(content)
