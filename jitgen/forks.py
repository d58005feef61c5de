"""Handles what ``fork`` does to OpenMP in a process that has jitgen.

GNU's OpenMP, which torch brings, keeps the threads of a parallel region for the next one. A child of ``fork`` has none
of these threads and does not know: its first parallel region, of torch or of a kernel, waits for them forever. So the
threads of a process end before it forks, and parent and child each start new ones when they need some. Where the
runtime cannot end them, the child computes with one thread, which needs no parallel region.

A child that imports jitgen only after the fork is as torch alone would have it.

``Lock`` is a lock that no child waits for.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0: settings stay as they are."""

_ended = False


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Locks like ``RLock``, but is open in a child of ``fork``. A child of ``fork`` has it open where another thread
    held it, which is not there to release it."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def open_in_child(self) -> None:
        """Opens it, unless this thread has it."""
        if not self._lock._is_owned():
            self._lock = threading.RLock()


def _end_threads() -> None:
    """Ends the threads that OpenMP keeps for this one."""
    global _ended
    _ended = "torch" not in sys.modules or _pause()


def _pause() -> bool:
    """Ends the threads of the OpenMP runtime that kernels use; returns whether it could."""
    import ctypes

    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_SOFT) == 0


def _in_child() -> None:
    for lock in [*_locks]:
        lock.open_in_child()
    if not _ended and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_threads, after_in_child=_in_child)
