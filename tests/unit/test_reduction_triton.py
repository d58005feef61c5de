"""Row reductions in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import triton_reductions

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failures() -> dict[str, list[str]]:
    """What went wrong, by check. One process for all of them: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_reductions"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", triton_reductions.CHECKS)
def test_reductions(check: str, failures: dict[str, list[str]]) -> None:
    assert failures[check] == []
