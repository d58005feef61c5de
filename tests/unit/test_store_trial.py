"""``tools/store_trial.py`` with a few faults and kills; ``docs/measured/store.json`` has the figures of many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen import _data
from jitgen.compilers import host

CHECKOUT = _data.checkout_directory()
pytestmark = pytest.mark.skipif(CHECKOUT is None or host.toolchain() is None, reason="needs the checkout, a compiler")


@pytest.mark.slow
def test_faults_and_kills(tmp_path: Path) -> None:
    assert CHECKOUT is not None
    script, answer = CHECKOUT / "tools" / "store_trial.py", tmp_path / "store.json"
    options = ["faults", "storm", "--faults", "60", "--kills", "20", "--json", str(answer)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(answer.read_text())
    faults, storm = found["faults"], found["storm"]
    assert (faults["right"], faults["lost"], faults["verify clean"]) == (60, 0, True)
    assert (storm["wrong or failed"], storm["plans"], storm["artifacts"], storm["verify clean"]) == ([], 50, 50, True)


def test_the_figures_that_are_kept_are_of_enough_faults() -> None:
    assert CHECKOUT is not None
    found = json.loads((CHECKOUT / "docs/measured" / "store.json").read_text())
    assert found["faults"]["faults"] >= 1000
    assert [found["faults"][name] for name in ("wrong", "hung", "error", "lost")] == [0, 0, 0, 0]
    assert found["storm"]["killed"] >= 100
