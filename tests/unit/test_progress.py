"""The line that long work shows on a terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitgen
from bench.command import bench
from jitgen import pipeline, progress
from jitgen.spec import host_target


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error, without patience."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest exchanges the real one
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    return stream


def until(stream: Terminal, text: str) -> None:
    ends = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < ends, stream.getvalue()
        time.sleep(0.005)


def test_long_work_shows_a_line_and_wipes_it(terminal: Terminal) -> None:
    with progress.line("counting") as say:
        say("3 of 7")
        until(terminal, "jitgen: counting, 3 of 7 (")
        say("a name with\x1b[2J in it")
        until(terminal, "a name with?[2J in it")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "\n" not in terminal.getvalue()


def test_the_innermost_line_is_shown(terminal: Terminal) -> None:
    with progress.line("outer"):
        with progress.line("inner"):
            until(terminal, "inner")
            before = terminal.getvalue().count("outer")
            time.sleep(0.1)
            assert terminal.getvalue().count("outer") == before
        until(terminal, "outer")


def test_short_work_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.line("counting"):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest exchanges the real one
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.line("counting") as say:
        say("3 of 7")
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_an_error_wipes_the_line_too(terminal: Terminal) -> None:
    def divide() -> float:
        with progress.line("dividing"):
            until(terminal, "dividing")
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert progress._lines == []


def test_compiling_quantising_and_measuring_show_theirs(
    terminal: Terminal, own_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler, a quantiser and a benchmark that wait for their line."""

    class Waited(Exception):
        pass

    def waits(text: str) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            until(terminal, text)
            raise Waited

        return run

    monkeypatch.setattr(pipeline, "_from_store", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "build", waits(f"compiling double for {host_target()}"))

    @jitgen.jit
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(Waited):
        double(torch.randn(3))
    monkeypatch.setattr("jitgen.quant.modules.quantize", waits("quantising to int8, 1 of 1 weights: 0"))
    with pytest.raises(Waited):
        jitgen.quantize_(torch.nn.Sequential(torch.nn.Linear(32, 32)), "int8")
    monkeypatch.setattr("bench.suite.run", waits("measuring"))
    with pytest.raises(Waited):
        bench.main(["streaming", "--quick", "--device", "cpu"], standalone_mode=False)
