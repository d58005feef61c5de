"""What every test shares: a private store for the kernels they compile, and the switch that rewrites golden sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden sources instead of comparing")


@pytest.fixture(scope="session", autouse=True)
def session_store() -> Iterator[Path]:
    """A store of this run's own: no test reads what an earlier version of the code compiled."""
    with tempfile.TemporaryDirectory(prefix="jitgen-tests-") as directory:
        before = os.environ.get("JITGEN_CACHE_DIR")
        os.environ["JITGEN_CACHE_DIR"] = directory
        yield Path(directory)
        if before is None:
            del os.environ["JITGEN_CACHE_DIR"]
        else:
            os.environ["JITGEN_CACHE_DIR"] = before


@pytest.fixture(scope="session")
def interpreted() -> Callable[[str], dict[str, list[str]]]:
    """Runs a module of checks under Triton's interpreter and says what went wrong, by check.

    In a process of its own, one for all checks of the module: the interpreter is chosen when Triton is imported.
    """

    def run(module: str) -> dict[str, list[str]]:
        done = subprocess.run(
            [sys.executable, "-m", module],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
