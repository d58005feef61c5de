"""Checks under Triton's interpreter, in a process of their own: it is chosen when Triton is imported.

A module of checks has ``CHECKS``, functions by name, each of which yields a sentence for whatever is wrong and None for
what is not; and it may have ``within``, a function that makes the context in which they run. ``Interpreter`` asks one
process for a check of such a module after another, so that each test pays for its own check alone, and a run of pytest
imports torch and Triton once for all of them; by hand, ``TRITON_INTERPRET=1 python -m tests.triton_scans NAME ...``.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

Check = Callable[[], Iterable[str | None]]

seconds = 0.0
"""Processor time that all checks of this run took so far."""
_process: subprocess.Popen[str] | None = None


class Interpreter:
    """The checks of ``module``, run by name in the process that all such modules share."""

    def __init__(self, module: str):
        self._module = module

    def __getitem__(self, check: str) -> list[str]:
        """Run a check; what went wrong, a sentence each.

        Raises:
            RuntimeError: the process has ended; its standard error says why. The next check starts another one.
        """
        global _process, seconds
        if _process is None:
            _process = _started()
            atexit.register(_process.communicate)
        assert _process.stdin is not None
        assert _process.stdout is not None
        with suppress(BrokenPipeError):  # the answer is missing too
            print(json.dumps([self._module, check]), file=_process.stdin, flush=True)
        answer = _process.stdout.readline()
        if not answer:
            ended, _process = _process, None
            atexit.unregister(ended.communicate)
            raise RuntimeError(f"the interpreter ended at {check!r} of {self._module}, with status {ended.wait()}")
        found: list[str]
        found, took = json.loads(answer)
        seconds += took
        return found

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        """The process goes on: other modules have checks too."""


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interpreter"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve(checks: Mapping[str, Check], context: AbstractContextManager[Any] | None = None) -> None:
    """Run the checks named on the command line; prints what went wrong, a line of JSON for each check."""
    with context or nullcontext():
        for name in sys.argv[1:]:
            print(json.dumps(failures(checks[name])), flush=True)


def failures(check: Check) -> list[str]:
    try:
        return [wrong for wrong in check() if wrong]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _answer_requests() -> None:
    """Run the checks that lines of standard input name; prints what went wrong, and the processor time, of each."""
    before = 0.0  # the first check has the imports in its time
    for request in sys.stdin:
        name, check = json.loads(request)
        module = importlib.import_module(name)
        with getattr(module, "within", nullcontext)():
            found = failures(module.CHECKS[check])
        now = time.process_time()
        print(json.dumps([found, now - before]), flush=True)
        before = now


if __name__ == "__main__":
    _answer_requests()
