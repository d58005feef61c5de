"""Matrix products on a GPU with weights of every low-bit format, against float64 of the dequantised operands."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.quant.formats import FORMATS, find
from tests.gemm_numeric import VARIED_FORMATS, assert_near, operands, product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NAMES = (*FORMATS, *VARIED_FORMATS)
SIZES = ((1, 130, 1000), (7, 64, 384), (16, 257, 640), (65, 96, 128), (200, 129, 300))
GROUPS = (32, 64, 128, None)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("format", NAMES)
@pytest.mark.quick(where=lambda format: format in ("int3", "nvfp4", "mxfp6", "uint8.float16.floatzeros"))
def test_products(format: str, backend: str) -> None:
    torch.manual_seed(sum(map(ord, format)))
    drawn = random.Random(format)
    linear = jitgen.jit(lambda x, w: F.linear(x, w), backend=backend)
    for dtype, (rows, columns, length) in itertools.product((torch.bfloat16, torch.float16, torch.float32), SIZES):
        group = find(format).group_size or drawn.choice(GROUPS)
        x, w = operands(rows, columns, length, dtype, format, group)
        exact, spread = product(x, w)
        # A weight that becomes a number of x's dtype is rounded once, by half a unit in the last place; so is, before
        # that, a value of a table that is no number of x's dtype.
        roundings = 1 if find(format).is_exact_in(str(dtype).removeprefix("torch.")) else 2
        unit = roundings * torch.finfo(dtype).eps / 2
        spread = spread + unit * F.linear(x.double().abs(), w.dequantize(torch.float64).abs())
        out = torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")
        linear(x.cuda(), w.to("cuda"), out=out)
        assert_near(out.cpu(), exact, spread)
    gate, up = (operands(5, 48, 192, torch.bfloat16, format, find(format).group_size or 64)[1] for _ in range(2))
    x = torch.randn(5, 192, dtype=torch.bfloat16) / 8
    found = jitgen.jit(lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), backend=backend)(
        x.cuda(), gate.to("cuda"), up.to("cuda")
    )
    wide = [F.linear(x.double(), weight.dequantize(torch.float64)) for weight in (gate, up)]
    exact = F.silu(wide[0]) * wide[1]
    assert (found.cpu().double() - exact).norm() <= 2**-7 * exact.norm()
