"""A child of ``fork`` computes, with torch and with kernels, whatever its parent has computed on several threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jitgen.compilers import host
from tests import fresh

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
    done = fresh.run(PROGRAM, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(10 + threads)


LOCKED = """
import os, signal, threading, time
import torch, jitgen
from jitgen import forks
from jitgen.quant import storage, token
from jitgen.trace import proxy
jitgen.jit(lambda x: x + 1)(torch.ones(2))
def hold():
    for lock in [*forks._locks]:
        lock.__enter__()
    held.set()
    time.sleep(600)
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
own = forks.Lock()
with own:
    child = os.fork()
    if not child:
        signal.alarm(120)  # which ends a child that hangs
        weight = jitgen.quantize(torch.randn(64, 64), "int8")
        jitgen.jit(lambda x, w: torch.nn.functional.linear(x, w))(torch.ones(2, 64), weight)
        assert own._lock._is_owned()
if not child:
    os._exit(0)
print(len(forks._locks), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_child_waits_for_no_lock_of_its_parents_threads() -> None:
    done = fresh.run(LOCKED, cwd=ROOT)
    count, status = map(int, done.stdout.split())
    assert count > 8, done.stderr
    assert status == 0, done.stderr
