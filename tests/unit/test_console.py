"""What jitgen writes for people: to a terminal, to a log, and in processes without a standard error."""

from __future__ import annotations

import io
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from jitgen import console
from jitgen.errors import CacheWarning
from tests import fresh

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
class Log:
    def write(self, text): return len(text)
    def flush(self): pass
class Broken(Log):
    def isatty(self): return True
    def write(self, text): raise OSError("the other end is gone")
closed = open(os.devnull, "w"); closed.close()
sys.stderr, sys.stdout = {streams}
import torch, jitgen
from jitgen import console, progress
progress.PATIENCE = progress.EVERY = 0.001
@jitgen.jit
def f(x): return torch.relu(x) + 1.5
assert torch.equal(f(torch.ones(5)), torch.full((5,), 2.5))
model = torch.nn.Sequential(torch.nn.Linear(64, 32))
jitgen.quantize_(model, "int4", 32)
jitgen.load_quantized(model.state_dict())
console.warn("a warning", jitgen.errors.CacheWarning)
from jitgen.cli.show import print_table
if not isinstance(sys.stdout, Broken): print_table(("a", "b"), [("1", "2")])
with open({done!r}, "w") as file: file.write("done")
"""
"""A program that does whatever shows progress, warns or prints; ``JITGEN_DEBUG`` is set."""


@pytest.mark.parametrize("streams", ["None, None", "Log(), sys.stdout", "Broken(), Broken()", "closed, None"])
def test_no_call_needs_standard_streams(streams: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = PROGRAM.format(streams=streams, done=str(done))
    environment = {**os.environ, "JITGEN_DEBUG": "4", "JITGEN_CACHE_DIR": str(tmp_path / "store")}
    ended = fresh.run(program, cwd=ROOT, env=environment)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert done.read_text() == "done"


class Raises(io.StringIO):
    def isatty(self) -> bool:
        raise OSError


def test_a_terminal_is_a_stream_that_says_so() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, object(), closed, Raises(), io.StringIO()):
        assert not console.is_terminal(stream)


def test_filters_still_make_errors_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheWarning, match="a warning"):
            console.warn("a warning", CacheWarning)


def test_a_warning_names_the_line_that_warns() -> None:
    with pytest.warns(CacheWarning) as caught:
        console.warn("a warning", CacheWarning)
    assert caught[0].filename == __file__


def test_messages_are_logged_by_level(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    with caplog.at_level(logging.DEBUG, logger="jitgen"):
        for level in console.LOGGED_AT:
            console.log(level, lambda level=level: f"of level {level}\x1b[2J")  # type: ignore[misc]
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("jitgen", logging.INFO, "of level 1?[2J"),
        ("jitgen", logging.DEBUG, "of level 2?[2J"),
    ]
    assert capsys.readouterr().err == ""  # JITGEN_DEBUG asks for that


def test_a_message_that_nobody_asked_for_is_not_made() -> None:
    console.log(1, lambda: pytest.fail("made"))
