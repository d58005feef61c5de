"""Tests that hang: each fails at the line where it does, and the others run on.

Tests of a GPU are watched by ``tools/gpu_test.py``, which can kill a worker that a kernel keeps.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

import pytest

QUICK_LIMIT, SLOW_LIMIT = 300.0, 1800.0
"""Seconds by the wall clock that a test may take, and one that is marked slow. A quick one takes 20 s of processor time
at most; a machine that is shared stretches that. What takes longer is taken for a hang."""
GRACE = 60.0
"""Further seconds until the process ends with a traceback, where a test hangs in compiled code, out of a signal's
reach."""

_stderr = pytest.StashKey[int]()


class Hang(BaseException):
    """A test takes longer than its limit. No code on the way takes this for an error of its own."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--hang-seconds", type=float, help="seconds until a test is taken for one that hangs")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # before pytest captures what tests write


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    if item.get_closest_marker("gpu") is not None:
        return (yield)
    asked = item.config.getoption("--hang-seconds")
    limit = asked or (QUICK_LIMIT if item.get_closest_marker("slow") is None else SLOW_LIMIT)

    def expire(*_: object) -> None:
        raise Hang(f"{item.nodeid} hangs: it has not ended within {limit:g} s")

    # A timer of its own, since tests set alarms.
    before = signal.signal(signal.SIGUSR2, expire)
    timer = threading.Timer(limit, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        signal.signal(signal.SIGUSR2, before)
