"""Recording never fails a call, and loses little wherever a process ends."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import manifest_samples
import pytest
import torch

import jitgen
from jitgen import events
from jitgen.deploy import manifest_schema, record
from jitgen.errors import CacheError, CacheWarning
from jitgen.events import CallEvent, MissEvent
from jitgen.store import notice

forked = multiprocessing.get_context("fork")
X = torch.randn(3, 5)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    notice.forget()
    yield
    for recorder in record._recorders:
        recorder.stop()
    record._recorders.clear()


def look_up() -> None:
    """Resolves a call of a function of its own, and compiles nothing."""
    with jitgen.strict(), pytest.raises(jitgen.CacheMissError):
        jitgen.jit(lambda x: torch.relu(x) * 2.5)(X)


def recorded(path: Path) -> int:
    return len(manifest_schema.read(path)) if path.exists() else 0


def wait_for(holds: Callable[[], Any]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["file/specs.json", "other.json", "fifo", "directory"])
def test_a_file_that_cannot_be_written_is_told_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded is kept elsewhere, and the calls go on."""
    (tmp_path / "file").write_text("")
    (tmp_path / "other.json").write_text('{"schema": 1}')
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(record, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setenv("JITGEN_RECORD", str(tmp_path / name))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        look_up()
        wait_for(lambda: told)
        look_up()
        [recorder] = record._recorders
        recorder._write_or_warn()
    messages = {str(one.message) for one in told if issubclass(one.category, CacheWarning)}
    [message] = (message for message in messages if str(tmp_path / name) in message)
    kept = re.search(r"is kept in (\S+) for a day", message)
    assert kept is not None
    assert recorded(Path(kept[1])) == 1
    with pytest.raises(CacheError, match="is kept in"), jitgen.record(tmp_path / name):
        look_up()


def test_what_is_new_is_written_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a signal ends has written what it met, though it met nothing since."""
    path = tmp_path / "specs.json"
    monkeypatch.setattr(record, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setenv("JITGEN_RECORD", str(path))

    def serve() -> None:
        look_up()
        time.sleep(60)

    server = forked.Process(target=serve)
    server.start()
    wait_for(path.exists)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.join()
    assert recorded(path) == 1


def test_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "specs.json"
    monkeypatch.setenv("JITGEN_RECORD", str(path))
    monkeypatch.setattr(threading.Timer, "start", refuse)
    look_up()
    [recorder] = record._recorders
    recorder._write_or_warn()  # as at the end
    assert recorded(path) == 1


def test_child_processes_record_what_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of ``multiprocessing`` ends without what ``atexit`` has."""
    path = tmp_path / "specs.json"
    monkeypatch.setattr(record, "INTERVAL_SECONDS", 600.0)
    monkeypatch.setenv("JITGEN_RECORD", str(path))
    look_up()  # this process has a thread that is to write; a child has not

    def serve(number: int) -> None:
        with jitgen.strict(), pytest.raises(jitgen.CacheMissError):
            jitgen.jit(lambda x: x * number)(X)

    children = [forked.Process(target=serve, args=(number,)) for number in range(2, 5)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert recorded(path) == 4, "what it had from its parent too"


def test_a_context_leaves_nothing_behind(tmp_path: Path) -> None:
    name, make = next(iter(manifest_samples.CALLS.items()))
    assert manifest_samples.recorded(tmp_path / f"{name}.json", make())["entries"]
    assert record._recorders == []
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


def test_calls_are_events() -> None:
    """A call that is new is one event, whoever listens; one that is known is none."""
    heard: list[CallEvent] = []
    unsubscribe = events.subscribe(CallEvent, heard.append)
    function = jitgen.jit(lambda x, scale: torch.relu(x) * scale)
    try:
        row = torch.randn(1, 5)
        assert torch.equal(function(row, 2.5), torch.relu(row) * 2.5)
        function(torch.randn(1, 5), 1.5)
        assert len(heard) == 1
        assert heard[0].environment["a0"] == 2.5
        function.lower(X, 2.5)
        assert len(heard) == 2
    finally:
        unsubscribe()
    function(torch.randn(7, 5), 2.5)
    assert len(heard) == 2
    call, lowered = heard
    assert (call.leaves[0] is row, call.requested[1], lowered.with_leaves) == (True, None, None)
    assert call.with_leaves is not None
    larger = call.with_leaves([X, 2.5])
    assert larger is not None
    assert larger.environment["s0_0"] == 3
    assert larger.graph.inputs[0].shape != call.graph.inputs[0].shape
    assert call.with_leaves([torch.randn(2, 2), "no number"]) is None


def test_a_miss_asks_for_what_would_have_built_it() -> None:
    missed: list[str] = []
    unsubscribe = events.subscribe(MissEvent, lambda miss: missed.append(miss.call.graph.name))
    try:
        with jitgen.strict(), pytest.raises(jitgen.CacheMissError, match="to build it: jitgen prewarm"):
            jitgen.jit(lambda x: torch.relu(x) * 3.25)(X)
    finally:
        unsubscribe()
    assert missed == ["<lambda>"]
