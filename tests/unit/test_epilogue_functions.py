"""The functions of a product's epilogue: coarse ones where every result has 16 bits, exact ones where one has more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.cuda_on_host import run

COARSE, TAIL = 2.0**-16, 2.0**-13
"""The relative error of a coarse function (``Dialect.coarse``), and that of GELU where a float16 is 0."""
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"gelu": F.gelu, "sigmoid": F.silu, "exp": torch.exp}


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_an_epilogue_is_as_exact_as_its_results(op: str, target: str) -> None:
    function = FUNCTIONS[op]

    def sources(dtype: torch.dtype, split: bool = False) -> str:
        rows, columns, length = (128, 256, 32768) if split else (300, 512, 128)
        specs = jitgen.TensorSpec((rows, length), dtype), jitgen.TensorSpec((columns, length), dtype)
        backend = "cpp" if target == "cpu" else "cuda"
        low = jitgen.jit(backend=backend)(lambda x, w: function(F.linear(x, w))).lower(*specs, target=target)
        assert len(low.kernels) == (2 if split else 1)
        return low.source

    exact = "erfc" if op == "gelu" else op
    coarse = exact if target == "cpu" else op
    assert f"jitgen::coarse_{coarse}(" in sources(torch.bfloat16)
    assert f"jitgen::{exact}(" in sources(torch.float32)
    if target == "sm_90a":
        assert f"jitgen::coarse_{coarse}(" in sources(torch.bfloat16, split=True)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU of float64, whose tail torch's own cancels."""
    return 0.5 * x * torch.special.erfc(-math.sqrt(0.5) * x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_every_number(dtype: torch.dtype) -> None:
    """Half a unit in the last place, and what ``coarse_gelu`` is off by; of infinities, infinity and NaN."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    (y,) = run(F.gelu, x)
    exact, finfo = _gelu(x.double()), torch.finfo(dtype)
    unit = torch.exp2(torch.frexp(exact.abs().clamp(min=finfo.smallest_normal)).exponent.double() - 1) * finfo.eps
    bound = unit / 2 + exact.abs() * torch.where(x < -5.95, TAIL, COARSE)
    finite = x.isfinite() & exact.isfinite()
    assert ((y.double() - exact).abs() <= bound)[finite & (x > -13.3)].all()
    assert (y.abs() <= finfo.smallest_normal)[x <= -13.3].logical_or(~finite[x <= -13.3]).all()
    assert torch.equal(y[~finite].nan_to_num(0.5, 2.0, 3.0), exact[~finite].nan_to_num(0.5, 2.0, 3.0).to(dtype))


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (F.gelu, True),
        (lambda x: 0.5 * x * torch.erfc(x * -math.sqrt(0.5)), True),
        (lambda x: x * 0.5 * torch.erfc(x * math.sqrt(0.5)), False),
        (lambda x: x * 0.25 * torch.erfc(x * -math.sqrt(0.5)), False),
        (lambda x: (x + 1) * 0.5 * torch.erfc(x * -math.sqrt(0.5)), False),
        (lambda x: F.gelu(x) + torch.erfc(x * -math.sqrt(0.5)), False),
        (lambda x: torch.erfc(x * -math.sqrt(0.5)) * torch.erfc(x * 0.5), False),
    ],
)
def test_what_is_gelu(function: Callable[[Any], Any], whole: bool) -> None:
    """Only x / 2 * erfc(-sqrt(1/2) x) whose factors nothing else reads is computed as GELU."""
    x = torch.randn(256).to(torch.bfloat16)
    low = jitgen.jit(backend="cuda")(function).lower(jitgen.TensorSpec((256,), torch.bfloat16), target="sm_90a")
    assert ("coarse_gelu(" in low.source) is whole
    assert ("coarse_erfc(" in low.source) is not whole
    (y,) = run(function, x)
    torch.testing.assert_close(y.float(), function(x.double()).float(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", FUNCTIONS)
def test_values_of_epilogues(op: str, dtype: torch.dtype) -> None:
    """The product by one times the unit matrix is exact, so that what is left is the function and one rounding."""
    function = FUNCTIONS[op]
    x = torch.cat([torch.linspace(-14, 11, 1000), torch.randn(24)]).to(dtype).view(64, 16)
    wide = x.double()  # of which torch's gelu cancels the digits of the tail
    exact = _gelu(wide) if op == "gelu" else function(wide)
    coarse = torch.where((x < -4.2 * math.sqrt(2)) & (op == "gelu"), TAIL, COARSE)
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2 * coarse) + torch.finfo(dtype).smallest_normal
    of_product = jitgen.jit(lambda x, w: function(F.linear(x, w)))
    assert ((of_product(x, torch.eye(16, dtype=dtype)).double() - exact).abs() <= bound).all()
    (on_gpu,) = run(function, x)
    assert ((on_gpu.double() - exact).abs() <= bound).all()
    special = torch.tensor([float("nan"), float("inf"), -30.0], dtype=dtype)
    assert run(function, special)[0].isnan().tolist() == [True, False, False]
