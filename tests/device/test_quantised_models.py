"""Models with quantised weights and activations on a GPU: calibration, layers that train in 8-bit floats, zero-points
with quantised activations, and scales of blocks in every dialect."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.nn import Float8Linear
from jitgen.quant.activations import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = 2.0**-8
"""The relative error of one rounding to bfloat16."""
FLOAT_ERROR = 1e-3
"""What tensor cores lose of sums of products of 8-bit floats, relative to the norm."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Block(nn.Module):
    """Norm, SwiGLU and a residual; a few columns of the norm's result are large, as in language models."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width)
        with torch.no_grad():
            self.norm.weight[::32] = 20.0
            self.gate.weight[:, ::32] /= 10
            self.up.weight[:, ::32] /= 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


@pytest.mark.parametrize(
    ("method", "format", "group", "activation"),
    [
        ("absmax", "int8", None, "int8"),
        ("percentile", "fp8_e4m3", None, "fp8_e4m3"),
        ("smoothquant", "int8", None, "int8"),
        ("awq", "int4", 64, None),
        ("gptq", "int4", 64, "int8"),
    ],
)
def test_calibrated_models_run_their_kernels(
    method: str, format: str, group: int | None, activation: str | None
) -> None:
    plain = Block().cuda().bfloat16().requires_grad_(False)
    mix = torch.randn(64, 256, device="cuda") / 8  # rows are correlated, as those of a model are
    data = [(torch.randn(400, 64, device="cuda") @ mix).bfloat16() for _ in range(3)]
    made, direct = copy.deepcopy(plain), copy.deepcopy(plain)
    report = jitgen.calibrate(
        made, data[:2], method, format=format, group_size=group, activation=activation, percentile=99.99
    )
    jitgen.quantize_(direct, format, group, activation=activation)
    assert len(report.layers) == 3
    assert bool(report.migrated) == (method in ("smoothquant", "awq"))
    wanted = plain.double()(data[2].double())
    error = relative(made(data[2]), wanted)
    if method in ("absmax", "percentile"):  # a scale for all rows, in place of one for each
        assert error < 2 * relative(direct(data[2]), wanted) + 4 * ROUNDED
    else:
        assert error < relative(direct(data[2]), wanted)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_float8_linears_train(scaling: str) -> None:
    def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        largest = x.float().abs().amax(-1, keepdim=True)
        largest = largest if scaling == "row" else largest.amax(0, keepdim=True)
        scales = (largest * (1 / {E4M3: 448.0, E5M2: 57344.0}[dtype])).clamp(min=2.0**-126)
        return (x.float() * scales.reciprocal()).to(dtype).double() * scales.double()

    layer = Float8Linear(272, 144, scaling=scaling, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    seed = torch.randn(200, 144, device="cuda", dtype=torch.bfloat16)
    found = layer(x)
    found.backward(seed)
    weight, rows = layer.weight.detach(), x.detach()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    for one, wanted in (
        (found.detach(), rounded(rows, E4M3) @ rounded(weight, E4M3).T + layer.bias.detach().double()),
        (x.grad, rounded(seed, E5M2) @ rounded(weight.T, E4M3).T),
        (layer.weight.grad, rounded(seed.T, E5M2) @ rounded(rows.T, E4M3).T),
        (layer.bias.grad, seed.double().sum(0)),
    ):
        assert relative(one, wanted) < 2 * ROUNDED + FLOAT_ERROR


def by(backend: str) -> Callable[..., torch.Tensor]:
    return jitgen.jit(F.linear, backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(
    ("format", "group", "activation"),
    [
        *(("uint4", 32, "int8"), ("uint4", None, "int8"), ("uint4", 64, "fp8_e4m3"), ("uint3", 32, "int8")),
        *(("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"), ("int8.rows128", 128, "int8.block128")),
    ],
)
def test_zero_points_and_blocks_meet_quantised_activations(
    format: str, group: int | None, activation: str, backend: str
) -> None:
    for m, n, k in ((9, 256, 384), (300, 128, 1152)):
        x = torch.randn(m, k, device="cuda") * torch.logspace(-2, 2, m, device="cuda")[:, None]
        x = x.bfloat16()
        weight = jitgen.quantize(torch.randn(n, k, device="cuda") + 0.5, format, group, activation=activation)
        expected = quantized(x, activation).double() @ weight.dequantize(torch.float64).T
        found = by(backend)(x, weight)
        assert relative(found, expected) < ROUNDED + FLOAT_ERROR, (m, n, k)
