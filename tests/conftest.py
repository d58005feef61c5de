"""What every test shares: a private store for the kernels they compile, and the switch that rewrites golden sources."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
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
