"""Every family's kernels as torch operators: C++ here, CUDA on a machine with a GPU and nvcc.

And every family's C++ with the compiler flags that users have, which `make test` does not give to other tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host, load_inline

FUNCTIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "elementwise": lambda x, weight: torch.sin(x) * 2 + 1,
    "softmax": lambda x, weight: torch.softmax(x, -1),
    "sum": lambda x, weight: x.sum(0),
    "dense product": lambda x, weight: F.linear(x, x).relu(),
    "int4 product": lambda x, weight: F.linear(x, weight) + 1,
    "scan": lambda x, weight: x.cumsum(-1),
    "sort": lambda x, weight: torch.topk(x, 5).values,
}


def _compare(name: str, backend: str, device: str, compiler: str = "load_inline") -> None:
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(24, 128, generator=generator).to(device)
    weight = jitgen.quantize(torch.randn(96, 128, generator=generator).to(device), "int4", group_size=32)
    function = jitgen.jit(backend=backend, compiler=compiler)(FUNCTIONS[name])
    plain = weight.dequantize(torch.float64)
    # A float32 sum of 128 products of numbers around 1, in any order, is off by 128 roundings of terms at most.
    tolerance = 128 * torch.finfo(torch.float32).eps * 16
    for _ in range(2):
        expected = FUNCTIONS[name](x.double(), plain)
        torch.testing.assert_close(function(x, weight).double(), expected, rtol=tolerance, atol=tolerance)
    [kernel] = function.specializations[0].kernels
    assert kernel.artifact.meta["route"] == compiler


@pytest.mark.optimised
@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_optimised(name: str) -> None:
    _compare(name, "cpp", "cpu", "host")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick(where=lambda name: name == "softmax")
def test_cpp(name: str) -> None:
    lack = load_inline.missing("cpp")
    if lack is not None:
        pytest.skip(lack)
    _compare(name, "cpp", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cuda(name: str) -> None:
    lack = load_inline.missing("cuda")
    if lack is not None:
        pytest.skip(lack)
    _compare(name, "cuda", "cuda")
