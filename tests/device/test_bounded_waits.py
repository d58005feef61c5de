"""With ``JITGEN_DEBUG=5`` a kernel that would hang ends, and says at which barrier. Each runs in a process of its own,
since it leaves a CUDA context in which nothing works any more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of sm_90a")]

CHECKOUT = Path(__file__).parents[2]
PROGRAM = """
import torch, jitgen
import torch.nn.functional as F

def attention():
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    jitgen.jit(F.scaled_dot_product_attention, backend="cuda")(q, k, v).sum().backward()

def product():
    w = jitgen.quantize(torch.randn(1024, 1024, device="cuda").bfloat16(), "int4", group_size=128)
    jitgen.jit(F.linear, backend="cuda")(torch.randn(200, 1024, device="cuda", dtype=torch.bfloat16), w)

def softmax():
    jitgen.jit(lambda x: torch.softmax(x, -1), backend="cuda")(torch.randn(8, 151936, device="cuda"))

{case}()
torch.cuda.synchronize()
print("ended")
"""
FAULTS = {
    "an mbarrier": (
        "attention",
        "attention_backward/include/jitgen/attention_backward_block.cuh",
        "barrier_init(block_full(), Shape::copiers)",
        "barrier_init(block_full(), Shape::copiers + 1)",
        "block_(full|empty)",
    ),
    "a named barrier": (
        "product",
        "gemm/include/jitgen/gemm_wgmma_results.cuh",
        'group_barrier<128>(barrier, "staging',
        'group_barrier<160>(barrier, "staging',
        "staging of a warpgroup",
    ),
    "a cluster's barrier": (
        "softmax",
        "reduction/include/jitgen/reduce.cuh",
        "  cluster_arrived();",
        "  if (cluster_rank() != 1) cluster_arrived();",
        "the start of the cluster's blocks",
    ),
}


def ran(case: str, templates: Path, store: Path) -> tuple[int, str]:
    """The exit status of a process that runs ``case`` with bounded waits, and what it wrote."""
    settings = {"JITGEN_DEBUG": "5", "JITGEN_TEMPLATES": str(templates), "JITGEN_CACHE_DIR": str(store)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{case}", case)],
        env={**os.environ, **settings},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_without_an_end_is_named(fault: str, tmp_path: Path) -> None:
    case, header, written, instead, name = FAULTS[fault]
    templates = tmp_path / "templates"
    shutil.copytree(CHECKOUT / "templates", templates)
    text = (templates / header).read_text()
    assert text.count(written) >= 1
    (templates / header).write_text(text.replace(written, instead))
    status, output = ran(case, templates, tmp_path / "store")
    assert status != 0
    assert "ended" not in output.splitlines()
    message = rf"a wait of more than 2\^34 cycles:0: jitgen_\w+: block: \[\d+,0,0\], thread: \[\d+,0,0\] .*{name}"
    assert re.search(message, output), output[-2000:]


@pytest.mark.parametrize("case", ["attention", "product", "softmax"])
def test_other_kernels_end_as_before(case: str, tmp_path: Path) -> None:
    status, output = ran(case, CHECKOUT / "templates", tmp_path / "store")
    assert status == 0
    assert "ended" in output.splitlines()
