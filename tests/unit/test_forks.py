"""A child of ``fork`` computes, with torch and with kernels, whatever its parent has computed on several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen.compile import host

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
]

PROGRAM = """
import os, signal, sys
import torch, jitgen
from jitgen import forks
if "one" in sys.argv:
    forks._pause = lambda: False  # as an older runtime, which cannot end them
torch.set_num_threads(2)
x, w = torch.randn(700, 700), torch.randn(700, 700)
f = jitgen.jit(lambda x, w: torch.relu(x) @ w)
new = jitgen.jit(lambda x: torch.softmax(x * 2, -1))
def right():
    assert torch.allclose(f(x, w), torch.relu(x) @ w, atol=1e-2)
    assert torch.allclose(new(x), torch.softmax(x * 2, -1), atol=1e-5)
right() if "kernels" in sys.argv else torch.relu(x) @ w
child = os.fork()
if not child:
    signal.alarm(120)  # which ends a child that hangs
    right()
    again = os.fork()
    if not again:
        right()
        os._exit(0)
    assert os.waitpid(again, 0)[1] == 0
    os._exit(10 + torch.get_num_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
right()
assert torch.get_num_threads() == 2
"""


@pytest.mark.parametrize(
    ("arguments", "threads"), [(("kernels",), 2), (("torch",), 2), (("kernels", "one"), 1)], ids=str
)
def test_a_child_computes(arguments: tuple[str, ...], threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(10 + threads)
