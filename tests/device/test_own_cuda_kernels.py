"""Kernels that users wrote in CUDA C++, and functions that they spelled, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
import jitgen.dynamo.registration

pytest.importorskip("triton")

from tests import own_c_kernels
from tests.own_kernel_programs import check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return own_c_kernels.cuda(tmp_path_factory.mktemp("kernels"))


def test_random_rules(kernels: dict[str, Any]) -> None:
    launches = own_c_kernels.cuda_launches(kernels)
    for number in range(8):
        torch.manual_seed(number)
        assert check(number, "cuda", launches) is None


@pytest.mark.parametrize("shape", [(2048, 2048, 64), (37, 41, 29), (1, 1, 1)])
def test_a_long_rule_behind_a_product(kernels: dict[str, Any], shape: tuple[int, int, int]) -> None:
    m, n, k = shape

    @jitgen.jit
    def gated(a: Tensor, b: Tensor, bias: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.empty((m, n), device=a.device)
        kernels["matmul"][(-(-n // 8), -(-m // 8)), (8, 8)](a, b, c, m, n, k)
        c = c + bias
        return F.gelu(c), c * torch.tanh(gate)

    a, b, bias, gate = (torch.randn(shape, device="cuda") for shape in ((m, k), (k, n), (n,), (m, n)))
    low = gated.lower(a, b, bias, gate)
    assert low.source.count("__noinline__") == 1
    c = a.double() @ b.double() + bias
    for got, right in zip(gated(a, b, bias, gate), (F.gelu(c), c * torch.tanh(gate.double())), strict=True):
        assert torch.allclose(got.double(), right, atol=1e-6 * k + 1e-5, rtol=1e-5)


def test_dynamic_shared_memory_and_a_launch_by_itself(kernels: dict[str, Any]) -> None:
    x, out = torch.randn(37, 1000, device="cuda"), torch.zeros(37, device="cuda")
    kernels["sums"][37, 256, 256 * 4](x, out, 1000)
    assert torch.allclose(out.double(), x.double().sum(1), atol=1e-4)
    out.zero_()
    kernels["sums"](grid=(37, 1, 1), block=(64, 1, 1), args=(x, out, 1000), shared_mem=64 * 4)
    assert torch.allclose(out.double(), x.double().sum(1), atol=1e-4)

    @jitgen.jit
    def scaled(x: Tensor, factor: float) -> Tensor:
        out = torch.empty(x.shape[0], device=x.device)
        kernels["sums"][x.shape[0], 128, 128 * 4](x * x, out, x.shape[1])
        return torch.sqrt(out) * factor

    for rows in (1, 5, 300):
        x = torch.randn(rows, 77, device="cuda")
        assert torch.allclose(scaled(x, 0.5).double(), x.double().norm(dim=1) * 0.5, rtol=1e-5)


def test_more_shared_memory_than_a_block_has_by_default(kernels: dict[str, Any]) -> None:
    x, out = torch.randn(3, 50, device="cuda"), torch.zeros(3, device="cuda")
    kernels["sums"][3, 32, 64 << 10](x, out, 50)
    assert torch.allclose(out.double(), x.double().sum(1), atol=1e-5)


def test_a_launch_on_another_stream(kernels: dict[str, Any]) -> None:
    x, y, out = torch.randn(3, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kernels["add"][16, 256](x, y, out, 4096, 4096, stream=stream)
    stream.synchronize()
    assert torch.equal(out, x + y)


def test_several_grids_and_a_graph(kernels: dict[str, Any]) -> None:
    x, y = torch.randn(2, 1000, device="cuda")
    out = torch.zeros(1000, device="cuda")
    for blocks in (4, 1, 2):  # a launcher of one grid serves no other
        out.zero_()
        kernels["add"][blocks, 256](x, y, out, 1000, 1000)
        count = min(blocks * 256, 1000)
        assert torch.equal(out[:count], (x + y)[:count])
        assert not out[count:].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels["add"][4, 256](x, y, out, 1000, 1000)
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("backend", ["inductor", "jitgen"])
def test_torch_compile(kernels: dict[str, Any], backend: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels["add"][-(-x.numel() // 64), 64](x * 2, y, out, x.numel(), x.shape[1])
        return F.gelu(out)

    x, y = torch.randn(9, 33, device="cuda"), torch.randn(9, 33, device="cuda")
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert torch.allclose(compiled(x, y), F.gelu(x * 2 + y), atol=1e-5)


@pytest.mark.parametrize("name", ["__half", "__nv_bfloat16"])
def test_the_types_of_cudas_headers(tmp_path: Path, name: str) -> None:
    text = f"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void half_sum(const {name}* x, {name}* out, int n) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[i], 0, i) + {name}(1.0f), 0, i);
}}
"""
    kernel = jitgen.cuda_kernel(text, "half_sum")

    @jitgen.jit
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[-(-x.numel() // 64), 64](x * 2, out, x.numel())
        return torch.relu(out)

    x = torch.randn(500, device="cuda").to(torch.float16 if name == "__half" else torch.bfloat16)
    assert torch.allclose(function(x).double(), torch.relu(x.double() * 2 + 1), rtol=2**-7, atol=2**-7)
    assert len(function.lower(x).kernels) == 1


@pytest.mark.parametrize("place", ["0, i", "first, i", "i, 0", "i % 7, i / 7"])
def test_a_hook_that_counts_in_any_way_and_a_tensor_twice(place: str) -> None:
    text = f"""
typedef float real;
extern "C" __global__ void doubled(const real* x, real* out, int n) {{
  const int first = 0, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = JITGEN_EPILOGUE(2 * JITGEN_PROLOGUE(x[i], {place}), {place});
}}
"""
    kernel = jitgen.cuda_kernel(text, "doubled")

    @jitgen.jit
    def function(x: Tensor, column: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[-(-x.numel() // 64), 64](x * column, out, x.numel())
        return torch.relu(out + bias)

    for rows, columns in ((37, 50), (300, 7), (1, 1000)):
        x, bias = torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")
        column = torch.randn(rows, 1, device="cuda")
        right = torch.relu(2 * x.double() * column + bias)
        assert torch.allclose(function(x, column, bias).double(), right, atol=1e-5)
        assert len(function.lower(x, column, bias).kernels) == 1
    expected = x * 2
    kernel[16, 64](x, x, x.numel())
    assert torch.equal(x, expected)


def test_arguments_on_another_device(kernels: dict[str, Any]) -> None:
    x = torch.randn(8, device="cuda")
    with pytest.raises(jitgen.UnsupportedError, match="y is on cpu"):
        kernels["add"][1, 32](x, x.cpu(), x.clone(), 8, 8)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_function_spelled_in_the_dialects(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "1")  # compares the spelling with the reference, too
    softened = jitgen.device_function(
        lambda x, a: x / (a + x.abs()), cuda="x / (a + abs(x))", triton="x / (a + tl.abs(x))"
    )

    @jitgen.jit(backend=backend)
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return softened(x @ w, 1.5), torch.softmax(softened(x, 0.5), -1)

    x, w = torch.randn(20, 64, device="cuda"), torch.randn(64, 48, device="cuda")
    product, rows = function(x, w)
    exact = x.double() @ w.double()
    assert torch.allclose(product.double(), exact / (1.5 + exact.abs()), atol=1e-5)
    assert torch.allclose(rows.double(), torch.softmax(x.double() / (0.5 + x.double().abs()), -1), atol=1e-6)
