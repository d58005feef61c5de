"""Kernels that users wrote in Triton, launched within decorated functions and compiled models on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import jitgen
from jitgen.deploy import manifest_schema, tune
from jitgen.deploy.trials import Program
from jitgen.runtime import cuda

pytest.importorskip("triton")

from tests import own_kernel_programs
from tests import triton_own_kernels as functions

pytestmark = pytest.mark.gpu


def _close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    scale = max(1.0, expected.abs().max().item())
    assert result.shape == expected.shape
    assert (result.double() - expected.double()).abs().max().item() <= tolerance * scale


def test_between_operations_and_in_place() -> None:
    for shape in ((37, 50), (64, 128)):
        x, y, bias = (torch.randn(size, device="cuda") for size in (shape, shape, shape[1:]))
        _close(functions.between_operations(x, y, bias), F.gelu(x.double() * 2 + y + bias))
        _close(functions.in_place(x, 0.5), (x.double() + 1) - 1)
        argument = x.clone()
        functions.argument_in_place(argument)
        _close(argument, x.double() * 0.5)


def test_a_kernel_that_reads_what_its_program_has_stored() -> None:
    for shape in ((5, 77), (64, 1000)):
        x, y, z = torch.randn(3, *shape, device="cuda")
        _close(functions.pair(x, y, z), torch.relu((x.double() * 2 + y) * 3 + z))
        _close(functions.three_of_rows(x), x.double().softmax(1).softmax(1).softmax(1))
        _close(functions.pair_of_results(x, y)[0], (x.double() + y) * 4)
        _close(functions.shifted(x, y), (x.double() + y).flatten().roll(-1).reshape(shape))


def test_a_configuration_of_an_autotuner_is_launched() -> None:
    x, y = torch.randn(2, 1000, device="cuda")
    _close(functions.tuned(x, y), (x.double() + y) * 3)


def test_configurations_are_timed_with_the_integers_of_the_call(tmp_path: Path) -> None:
    x, lengths = torch.randn(64, 1000, device="cuda"), torch.randint(1, 1001, (64,), device="cuda", dtype=torch.int32)
    with jitgen.record(tmp_path / "manifest.json"):
        result = functions.by_lengths(x, lengths)
    _close(result, torch.where(torch.arange(1000, device="cuda") < lengths[:, None], x.double(), 0.0).sum(1))
    device = torch.device("cuda", torch.cuda.current_device())
    entries = manifest_schema.read(tmp_path / "manifest.json")
    (problem,) = tune.problems_of(entries, cuda.target_of(device.index), None)
    program = Program(problem.entry, problem.route, device)
    assert all(torch.equal(copy[1], lengths) for copy in program._copies)
    (measured,) = tune.tune([problem], tmp_path / "tuned", device, 50, jobs=1)
    assert not measured.failures
    assert None not in measured.seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(100, 72, device="cuda", dtype=dtype), torch.randn(72, 90, device="cuda", dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    expected = a.double() @ b.double()
    _close(functions.product(a, b), F.leaky_relu(expected, 0.01), tolerance)
    turned = a.t().contiguous().t()
    _close(functions.product(turned, b), F.leaky_relu(expected, 0.01), tolerance)


def test_rows_and_attention() -> None:
    x, weight, bias = torch.randn(33, 100, device="cuda"), *torch.randn(2, 100, device="cuda")
    y, _ = functions.layer_norm(x, weight, bias, 1e-5)
    _close(y, F.layer_norm(x.double(), (100,), weight.double(), bias.double()))
    q, k, v = torch.randn(3, 2, 100, 32, device="cuda", dtype=torch.float16)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    _close(functions.attention(q, k, v), expected, 1e-2)


def test_compiled() -> None:
    import triton

    from jitgen.dynamo.backend import compile_graph
    from tests import own_kernels as kernels

    def function(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[(triton.cdiv(x.numel(), 128),)](x * 2, y, out, x.numel(), BLOCK=128)
        return F.gelu(out + bias)

    x, y, bias = torch.randn(60, 70, device="cuda"), torch.randn(60, 70, device="cuda"), torch.randn(70, device="cuda")
    compiled = torch.compile(function, backend=compile_graph)
    _close(compiled(x, y, bias), F.gelu(x.double() * 2 + y + bias))
    assert math.isfinite(compiled(x, y, bias).sum().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_are_computed_in_the_kernel(dtype: torch.dtype) -> None:
    @jitgen.jit
    def function(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        product = own_kernel_programs._matmul(a * 0.5, b)
        return F.gelu(product + bias) + residual, product.to(torch.float16)

    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for m, n, k in ((100, 90, 72), (64, 128, 64), (1, 16, 8)):
        a, b, bias, residual = (
            torch.randn(shape, device="cuda", dtype=dtype) for shape in ((m, k), (k, n), (n,), (m, n))
        )
        found, product = function(a, b, bias, residual)
        right = (a * 0.5).double() @ b.double()
        _close(found, F.gelu(right + bias) + residual, tolerance)
        _close(product, right, 2e-2)
    assert {kernel.name for kernel in function.specializations[0].kernels} == {"function"}
    for number in range(6):
        assert own_kernel_programs.check(number, "cuda") is None


def test_a_grid_of_no_programs_is_an_error() -> None:
    x, y = torch.randn(2, 8, device="cuda")

    @jitgen.jit
    def launching(x: Tensor, y: Tensor, n: int) -> Tensor:
        out = torch.empty_like(x)
        functions.kernels.add[(n,)](x, y, out, x.numel(), BLOCK=16)
        return out

    with pytest.raises(jitgen.JitgenError, match="grid"):
        launching(x, y, 0)
