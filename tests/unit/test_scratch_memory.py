"""Kernels of the CPU whose scratch memory cannot be allocated: an error, and the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen.compilers import host

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD"),
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
]

ALLOCATOR = """
#include <stdlib.h>
extern "C" int refused = 0;
extern "C" void* aligned_alloc(size_t alignment, size_t bytes) {
  void* memory = nullptr;
  return refused || posix_memalign(&memory, alignment, bytes) ? nullptr : memory;
}
"""
PROGRAM = """
import ctypes
import torch, jitgen
import torch.nn.functional as F
torch.set_num_threads(2)
heads = [torch.randn(1, 2, 300, 64, requires_grad=True) for _ in range(3)]
cases = {
    "a product": (lambda x, w: F.linear(x, w), (torch.randn(200, 900), torch.randn(800, 900))),
    "products": (lambda x, w: x @ w, (torch.randn(9, 200, 90), torch.randn(9, 90, 80))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [h.detach() for h in heads]),
    "sort": (lambda x: torch.sort(x, -1)[0], (torch.randn(3, 70000),)),
    "cumsum": (lambda x: x.cumsum(-1), (torch.randn(2, 900000),)),
    "softmax": (lambda x: torch.softmax(x, -1), (torch.randn(2, 900000),)),
}
refused = ctypes.c_int.in_dll(ctypes.CDLL(None), "refused")
for name, (function, arguments) in cases.items():
    served = jitgen.jit(function)
    plan = served.bind(*arguments)
    out = plan(*arguments)
    expected = function(*arguments)
    assert torch.allclose(out, expected, atol=1e-2), name
    refused.value = 1
    try:
        plan(*arguments, out=out)
        found = "computed"
    except MemoryError as error:
        found = str(error)
    refused.value = 0
    if found == "computed": assert torch.allclose(out, expected, atol=1e-2), name
    assert torch.allclose(served(*arguments), expected, atol=1e-2), name
    print(f"{name}: {found}", flush=True)
"""


def test_no_memory_is_an_error(tmp_path: Path) -> None:
    source, library = tmp_path / "allocator.cpp", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run([*(host.command() or ()), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert {name for name, what in found.items() if what == "computed"} == {"cumsum", "softmax"}  # which do without
    for name in ("a product", "products", "attention", "sort"):
        assert "scratch memory cannot be allocated; free memory, or let it run on fewer threads" in found[name], name
