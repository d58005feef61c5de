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
"""The relative error of a coarse function (``Dialect.coarse``), and that of erfc where a float16 is 0."""
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"erfc": F.gelu, "sigmoid": F.silu, "exp": torch.exp}


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

    assert f"jitgen::coarse_{op}(" in sources(torch.bfloat16)
    assert f"jitgen::{op}(" in sources(torch.float32)
    if target == "sm_90a":
        assert f"jitgen::coarse_{op}(" in sources(torch.bfloat16, split=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", FUNCTIONS)
def test_values_of_epilogues(op: str, dtype: torch.dtype) -> None:
    """The product by one times the unit matrix is exact, so that what is left is the function and one rounding."""
    function = FUNCTIONS[op]
    x = torch.cat([torch.linspace(-14, 11, 1000), torch.randn(24)]).to(dtype).view(64, 16)
    wide = x.double()  # of which torch's gelu cancels the digits of the tail
    exact = 0.5 * wide * torch.special.erfc(-math.sqrt(0.5) * wide) if op == "erfc" else function(wide)
    coarse = torch.where((x < -4.2 * math.sqrt(2)) & (op == "erfc"), TAIL, COARSE)
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2 * coarse) + torch.finfo(dtype).smallest_normal
    of_product = jitgen.jit(lambda x, w: function(F.linear(x, w)))
    assert ((of_product(x, torch.eye(16, dtype=dtype)).double() - exact).abs() <= bound).all()
    (on_gpu,) = run(function, x)
    assert ((on_gpu.double() - exact).abs() <= bound).all()
    special = torch.tensor([float("nan"), float("inf"), -30.0], dtype=dtype)
    assert run(function, special)[0].isnan().tolist() == [True, False, False]
