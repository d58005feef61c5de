"""Kernels that users wrote in CUDA C++: compiled for GPUs without one, and run on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
from jitgen import TensorSpec
from tests import cuda_on_host

pytest.importorskip("cuda.bindings")
pytest.importorskip("triton")
own_c_kernels: Any = pytest.importorskip("tests.own_c_kernels")

TARGETS = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return own_c_kernels.cuda(tmp_path_factory.mktemp("kernels"))


def _gated(kernels: dict[str, Any]) -> Any:
    def gated(x: Tensor, y: Tensor, bias: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        n = x.numel()
        kernels["add"][-(-n // 64), 64](x * 0.5, y, out, n, x.shape[1])
        kept = out + bias
        return F.gelu(kept).bfloat16(), kept * gate

    return gated


def _product(kernels: dict[str, Any]) -> Any:
    def product(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty((m, n), device=a.device)
        kernels["matmul"][(-(-n // 8), -(-m // 8)), (8, 8)](torch.relu(a), b, c, m, n, k)
        return torch.tanh(c + bias) + residual

    return product


def _summed(kernels: dict[str, Any]) -> Any:
    def summed(x: Tensor, factor: float) -> Tensor:
        out = torch.empty(x.shape[0], device=x.device)
        kernels["sums"][x.shape[0], 32, 32 * 4](x * x, out, x.shape[1])
        return out * factor

    return summed


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["add", "matmul", "sums"])
def test_what_is_around_a_kernel_is_compiled_into_it(kernels: dict[str, Any], name: str, target: str) -> None:
    matrix, row = TensorSpec(("M", 24)), TensorSpec((24,))
    functions = {
        "add": (_gated, (matrix, matrix, row, matrix)),
        "matmul": (_product, (TensorSpec(("M", 20)), TensorSpec((20, 24)), row, matrix)),
        "sums": (_summed, (matrix, 0.5)),
    }
    function, specs = functions[name]
    low = jitgen.jit(function(kernels)).lower(*specs, target=target)
    assert len(low.kernels) == 1
    compiled = low.compile()
    (report,) = compiled.report
    assert report["spill_bytes"] == 0
    assert compiled.asm["ptx"].count(".entry") >= 1
    if name == "add":
        assert "ld.global.nc" in compiled.asm["ptx"]  # __restrict__ has its meaning


def test_a_long_rule_behind_a_loop_takes_none_of_its_registers(kernels: dict[str, Any]) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty((m, n), device=a.device)
        kernels["matmul"][(-(-n // 8), -(-m // 8)), (8, 8)](a, b, c, m, n, k)
        return c

    specs = (TensorSpec(("M", 2048)), TensorSpec((2048, 2048)))
    registers, is_called = {}, {}
    for name, rule in (("bare", lambda c: c), ("short", lambda c: F.relu(c) + 1), ("long", F.gelu)):
        low = jitgen.jit(lambda a, b, rule=rule: rule(product(a, b))).lower(*specs, target="sm_90a")
        (report,) = low.compile().report
        assert report["spill_bytes"] == 0
        registers[name], is_called[name] = report["registers"], "__noinline__" in low.source
    assert is_called == {"bare": False, "short": False, "long": True}
    assert registers["long"] <= registers["bare"] + 2


def test_values_of_rules_on_the_host(kernels: dict[str, Any]) -> None:
    x, y, gate = torch.randn(3, 5, 13)
    bias = torch.randn(13)
    low, kept = cuda_on_host.run(_gated(kernels), x, y, bias, gate)
    right = x.double() * 0.5 + y + bias
    assert torch.allclose(kept.double(), right * gate, atol=1e-6)
    assert torch.allclose(low.double(), F.gelu(right), rtol=2**-8, atol=1e-6)

    a, b, residual = torch.randn(9, 11), torch.randn(11, 13), torch.randn(13, 9).t()
    (product,) = cuda_on_host.run(_product(kernels), a, b, bias, residual)
    exact = torch.tanh(a.double().relu() @ b.double() + bias) + residual
    assert (product.double() - exact).abs().max() < 1e-5

    (sums,) = cuda_on_host.run(_summed(kernels), torch.ones(3, 70) * 2, 0.5)
    assert torch.equal(sums, torch.full((3,), 140.0))


def test_a_launch_by_itself_is_one_kernel_in_place(kernels: dict[str, Any]) -> None:
    spec = TensorSpec((4, 16))
    low = kernels["add"][1, 64].lower(spec, spec, spec, 64, 16, target="sm_90a")
    assert len(low.kernels) == 1
    assert "0 temporaries" in low.explain()
    x, y = torch.randn(2, 4, 16)
    out = torch.zeros(4, 16)
    found = cuda_on_host.run(lambda x, y, out: kernels["add"][1, 64](x, y, out, 64, 16) or out, x, y, out)
    assert torch.equal(found[0], x + y)


def test_a_store_has_what_a_header_is(tmp_path: Path) -> None:
    """The key of a kernel follows from the content of what it includes, wherever that is."""
    keys = []
    for folder, width in (("a", 1), ("b", 1), ("c", 2)):
        directory = tmp_path / folder
        directory.mkdir()
        (directory / "width.h").write_text(f"#define WIDTH {width}\n")
        (directory / "k.cu").write_text(
            '#include "width.h"\nextern "C" __global__ void k(const float* x, float* y) { y[0] = x[0] * WIDTH; }'
        )
        kernel = jitgen.cuda_kernel(directory / "k.cu", "k")
        low = kernel[1, 1].lower(TensorSpec((4,)), TensorSpec((4,)), target="sm_80")
        keys.append(low.kernels[0].key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('#include "absent.h"\nextern "C" __global__ void k(float* y) { y[0] = 1; }', "absent.h"),
        ('extern "C" __global__ void k(float* y) {\n  y[0] = undeclared;\n}', "undeclared"),
    ],
)
def test_what_does_not_compile_names_file_and_line(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "k.cu"
    file.write_text(body)
    low = jitgen.cuda_kernel(file, "k")[1, 1].lower(TensorSpec((4,)), target="sm_80")
    with pytest.raises(jitgen.CompileError, match=words) as caught:
        low.compile()
    assert f"{file}:{body.split(words)[0].count(chr(10)) + 1}" in str(caught.value)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        (0, 32, 0, r"its grid is \(0, 1, 1\)"),
        (1, 0, 0, r"its block is \(0, 1, 1\)"),
        ((1, 70000), 32, 0, "the grid of own::add is"),
        (1, 2048, 0, "the block of own::add is"),
        (1, (32, 32, 2), 0, "all together at most 1024"),
        (1, 32, 1 << 20, "1048576 bytes of shared memory"),
        (1.5, 32, 0, "is no integer"),
        ((1, 1, 1, 1), 32, 0, "one to three sizes"),
    ],
)
def test_sizes_that_no_launch_has(kernels: dict[str, Any], grid: Any, block: Any, shared: int, words: str) -> None:
    spec = TensorSpec((4, 16))
    with pytest.raises(jitgen.JitgenError, match=words):
        kernels["add"][grid, block, shared].lower(spec, spec, spec, 64, 16, target="sm_90a")._lowered.launch(0)


def test_what_a_kernel_says_of_launches_is_of_its_namespace() -> None:
    text = """
namespace own {
constexpr int THREADS = 4;
template <class T>
__global__ void __launch_bounds__(THREADS * sizeof(unsigned int) * sizeof(T)) k(const T* x, T* out) { out[0] = x[0]; }
}  // namespace own
"""
    kernel = jitgen.cuda_kernel(text, "own::k<float>")
    assert kernel[1, 32].lower(TensorSpec((4,)), TensorSpec((4,)), target="sm_90a").compile()
