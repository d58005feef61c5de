"""A test that hangs fails at the line where it does, and the tests behind it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
SUITE = """
import time

def test_loops():
    while True:
        pass

def test_swallows():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def test_is_quick():
    pass
"""
IN_COMPILED_CODE = """
import ctypes
from tests import hangs
hangs.GRACE = 0.5

def test_waits_in_c():
    pause = ctypes.PyDLL(None).sleep  # with the interpreter's lock, as a kernel that never ends has it
    while True:
        pause(60)
"""


def _run(folder: Path, suite: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(suite)
    (folder / "conftest.py").write_text("from tests.hangs import *\n\npytest_addoption = add_option\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hang-seconds", "1", "test_suite.py"]
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {CHECKOUT}\nmarkers =\n    optimised\n    gpu\n    slow\n"
    )
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    done = _run(tmp_path, SUITE)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for name in ("test_loops", "test_swallows"):
        assert f"test_suite.py::{name} hangs: it has not ended within 1 s" in done.stdout


def test_one_that_hangs_in_compiled_code_ends_the_process_with_its_name(tmp_path: Path) -> None:
    done = _run(tmp_path, IN_COMPILED_CODE)
    assert done.returncode == 1
    assert "Timeout" in done.stderr, done.stdout + done.stderr
    assert "test_waits_in_c" in done.stderr
