"""Runs commands in processes that are killed where they write nothing for too long, several at a time, on all cards."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tools import cards

ENDING = 20.0
"""Seconds within which a process ends that was killed, or that has closed its output."""


@dataclass(frozen=True)
class Job:
    """A command and how it is run.

    Attributes:
        name: for whoever reads the result.
        command: its words.
        silence: seconds without a line of output after which it is killed.
        environment: what is added to this process's environment.
    """

    name: str
    command: Sequence[str]
    silence: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """What a job has written, and how it has ended.

    Attributes:
        status: its exit status; None where it was killed.
        lines: of its standard output and error together.
        seconds: how long it ran.
    """

    job: Job
    status: int | None
    lines: tuple[str, ...]
    seconds: float


def run(jobs: queue.Queue[Job], workers: int, deadline: float) -> Iterator[Finished]:
    """The jobs as they finish. Whoever iterates may put further ones into the queue. At ``deadline``, on the monotonic
    clock, those that run are killed, and none is started any more."""
    results: queue.Queue[tuple[int, Finished]] = queue.Queue()
    idle = list(range(workers))
    while len(idle) < workers or not jobs.empty():
        while idle and not jobs.empty() and time.monotonic() < deadline:
            worker, job = idle.pop(0), jobs.get()
            run_job = functools.partial(run_one, job, deadline, cards.variables(worker, cards.visible()))
            threading.Thread(target=lambda at, run: results.put((at, run())), args=(worker, run_job)).start()
        if len(idle) == workers:
            return
        worker, finished = results.get()
        yield finished
        idle.append(worker)


def run_one(job: Job, deadline: float, variables: Mapping[str, str] = MappingProxyType({})) -> Finished:
    """Run one job to its end, or to the end of its silence or of ``deadline``, with added ``variables``."""
    began = time.monotonic()
    process = subprocess.Popen(
        job.command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables, **job.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    output, ended = _read(process, job.silence, deadline)
    if not ended:
        kill_group(process)
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver keeps cannot be ended
        status = process.wait(ENDING)
    lines = tuple(output.decode(errors="replace").splitlines())
    return Finished(job, status if ended else None, lines, time.monotonic() - began)


def _read(process: subprocess.Popen[Any], silence: float, deadline: float) -> tuple[bytes, bool]:
    """What ``process`` writes, and whether it ended by itself."""
    assert process.stdout is not None
    output, descriptor = bytearray(), process.stdout.fileno()
    while True:
        limit = min(silence, deadline - time.monotonic())
        if limit <= 0 or not select.select([descriptor], [], [], limit)[0]:
            return bytes(output), False
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return bytes(output), True
        output += chunk


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a group, and all of the group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
