"""Checks under Triton's interpreter, in a process of their own: it is chosen when Triton is imported.

A module of checks has a table of functions by name, each of which yields a sentence for whatever is wrong and None for
what is not, and hands it to ``serve``. ``Interpreter`` runs such a module and asks it for one check after another, so
that each test pays for its own check alone; by hand, ``TRITON_INTERPRET=1 python -m tests.triton_scans NAME ...``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

Check = Callable[[], Iterable[str | None]]


class Interpreter:
    """A process that runs the checks of ``module`` by name; a context manager, which ends it."""

    def __init__(self, module: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __getitem__(self, check: str) -> list[str]:
        """Run a check; what went wrong, a sentence each.

        Raises:
            RuntimeError: the process has ended; its standard error says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the answer is missing too
            print(check, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the interpreter ended at {check!r}, with status {self._process.wait()}")
        found: list[str] = json.loads(answer)
        return found

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def serve(checks: Mapping[str, Check], setting: AbstractContextManager[Any] | None = None) -> None:
    """Run the checks named on the command line, or else by the lines of standard input, within ``setting``; prints
    what went wrong, a line of JSON for each check."""
    torch.seed()
    with setting or nullcontext():
        for name in sys.argv[1:] or map(str.rstrip, sys.stdin):
            print(json.dumps(failures(checks[name])), flush=True)


def failures(check: Check) -> list[str]:
    try:
        return [wrong for wrong in check() if wrong]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
