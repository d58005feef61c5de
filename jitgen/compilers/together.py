"""Compiles several sources at once, on as many processors as there are.

The calling thread compiles, and others take what is left meanwhile. A compiler that is a program runs in their threads.
NVRTC compiles one source at a time in a process, and Triton is Python: for these there are worker processes
(``workers.py``). They take as long to start as a few kernels to compile, so they are started for ``MANY`` sources or
more, or for one where others will follow (``many_follow``); they serve the sources of further calls, and end when they
have been idle for ``IDLE`` seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from jitgen import settings
from jitgen.compilers import bounds, routes
from jitgen.errors import CompileError
from jitgen.forks import Lock
from jitgen.spec import Artifact, KernelSource

MANY = 4
"""Sources of one call from which on worker processes are started."""
MOST = 8
"""Worker processes of one program. A decoder layer has as many kernels."""
IDLE = 20.0
"""Seconds after which worker processes end that have nothing to do."""

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def alone() -> AbstractContextManager[None]:
    """Compiles one source at a time within this context, as worker processes do that are as many as processors."""
    return settings.within(_alone, True)


_many_follow: ContextVar[bool] = ContextVar("many_follow", default=False)


def many_follow() -> AbstractContextManager[None]:
    """Says that more sources are to be compiled soon, as of a model of many programs: worker processes start
    within this context as soon as anything is compiled, and are there for what follows."""
    return settings.within(_many_follow, True)


@dataclass(frozen=True)
class Compiled:
    """Describes what became of one source.

    Attributes:
        result: the artifact, or the error.
        seconds: that the compiler took.
    """

    result: Artifact | CompileError
    seconds: float


def compile_one(source: KernelSource) -> Compiled:
    """Compiles one source here; a worker process runs this."""
    started = time.perf_counter()
    try:
        result = routes.module(source.language, source.compiler).compile(source)
    except CompileError as error:
        result = error
    return Compiled(result, time.perf_counter() - started)


def compile_all(sources: Sequence[KernelSource]) -> Iterator[tuple[int, Compiled]]:
    """Yields what became of each source with its index, in the order in which they are done."""
    queue = _Queue(sources)
    for helper in _helpers(sources):
        threading.Thread(target=helper, args=(queue,), name="jitgen compiler", daemon=True).start()
    try:
        for _ in sources:
            while (index := queue.next_or_done()) is not None:
                queue.done(index, compile_one(sources[index]))
            yield queue.finished.popleft()
    finally:
        queue.close()


class _Queue:
    """Shares sources among the threads that compile them.

    Attributes:
        sources: all of them.
        finished: what is done and not yielded, with indices.
    """

    def __init__(self, sources: Sequence[KernelSource]):
        self.sources = sources
        self.finished: deque[tuple[int, Compiled]] = deque()
        self._left = deque(range(len(sources)))
        self._changed = threading.Condition()

    def next(self) -> int | None:
        """Returns the index of a source that nobody compiles; None without one."""
        with self._changed:
            return self._left.popleft() if self._left else None

    def next_or_done(self) -> int | None:
        """Returns the index of a source to compile; None as soon as one is done."""
        with self._changed:
            self._changed.wait_for(lambda: self.finished or self._left)
            return None if self.finished else self._left.popleft()

    def done(self, index: int, compiled: Compiled) -> None:
        with self._changed:
            self.finished.append((index, compiled))
            self._changed.notify_all()

    def give_back(self, index: int) -> None:
        """Returns a source to the others: what should have compiled it is not there any more."""
        with self._changed:
            self._left.append(index)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the work: nothing is left to compile."""
        with self._changed:
            self._left.clear()


def _helpers(sources: Sequence[KernelSource]) -> list[Callable[[_Queue], None]]:
    """Returns what takes sources besides the calling thread, each to run in a thread of its own."""
    if not sources or _alone.get() or sources[0].target.kind == "interpreter":
        return []
    asked, fit = settings.get("JITGEN_COMPILE_JOBS"), bounds.processors()
    besides = min(fit, asked or fit) - 1  # the calling thread
    compiler, wanted = sources[0].compiler, min(len(sources) - 1, besides)
    if compiler == "host":
        return [_help_in_thread] * wanted
    if compiler not in ("nvrtc", "triton") or not besides:
        return []
    with _lock:
        running = _processes[-1] if _processes and _processes[-1].keep() else None
        if running is None and (len(sources) >= MANY or _many_follow.get()):
            running = _Processes(bounds.workers(min(MOST, besides)))
            _processes.append(running)
    return [running.help] * min(wanted, running.count) if running is not None else []


def _help_in_thread(queue: _Queue) -> None:
    while (index := queue.next()) is not None:
        try:
            compiled = compile_one(queue.sources[index])
        except BaseException:  # the calling thread meets it again, and raises it
            queue.give_back(index)
            return
        queue.done(index, compiled)


class _Processes:
    """Runs worker processes until nothing has used them for a while.

    Attributes:
        count: how many there may be.
    """

    def __init__(self, count: int):
        from jitgen.compilers.workers import WorkerProcesses

        self.count = count
        self._pool = WorkerProcesses(count, bounds.WORKER_BYTES)
        self._until = time.monotonic() + IDLE
        self._ended = False
        for _ in range(count):
            self._pool.submit(os.getpid)  # starts one
        threading.Thread(target=self._end_when_idle, name="jitgen idle workers", daemon=True).start()

    def keep(self) -> bool:
        """Has the processes stay for a while longer; False if they have ended."""
        self._until = time.monotonic() + IDLE
        return not self._ended

    def help(self, queue: _Queue) -> None:
        """Compiles in a worker process, once that has started: until then others may take everything."""
        try:
            self._pool.submit(os.getpid).result()
        except Exception:  # it cannot be started, or has ended: others compile everything
            return
        while (index := queue.next()) is not None:
            try:
                compiled = self._pool.submit(compile_one, queue.sources[index]).result()
            except Exception:
                queue.give_back(index)
                return
            finally:
                self._until = time.monotonic() + IDLE
            queue.done(index, compiled)

    def _end_when_idle(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(left)
        with _lock:
            self._ended = True
            if self in _processes:
                _processes.remove(self)
        self._pool.shutdown(wait=True, cancel_futures=True)


_lock = Lock()
_processes: list[_Processes] = []
"""The worker processes of this process: one, or none."""


def _in_child() -> None:
    """Forgets the worker processes, which are the parent's: a child of ``fork`` must not use their pipes."""
    _abandoned.extend(_processes)
    _processes.clear()


_abandoned: list[_Processes] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
