"""Functions of more products of one activation than a kernel sums: CUDA C++ that runs on the CPU, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_numeric import dequantized, operands, product

import jitgen
from jitgen.compilers import host
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import run


def summed(x: Any, *weights: Any) -> Any:
    first, *others = (F.linear(x, weight) for weight in weights)
    return sum(others, first)


def neighbours(x: Any, *weights: Any) -> Any:
    """Results share products, which one region would have all of."""
    values = [F.linear(x, weight) for weight in weights]
    return tuple(a + b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("function", [summed, neighbours])
@pytest.mark.parametrize("format", ["int4", None])
@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.quick(where=lambda function, format: (function is summed) == (format == "int4"))
def test_six_products(function: Any, format: str | None) -> None:
    torch.manual_seed(6)
    columns, length, dtype = 40, 160, torch.bfloat16 if format else torch.float32
    x, _ = operands(3, columns, length, dtype)
    weights = [operands(3, columns, length, dtype, format, 32 if format else None)[1] for _ in range(6)]
    products = [product(x, weight) for weight in weights]
    results = run(function, x, *weights, target="sm_80", headers=host_headers())
    wide = function(x.double(), *map(dequantized, weights))
    for result, exact in zip(results, wide if isinstance(wide, tuple) else (wide,), strict=True):
        # Products, and sums of some, may be rounded to their dtype, as eager torch does.
        rounding = 7 * torch.finfo(dtype).eps / 2
        spread = sum(error for _, error in products) + rounding * sum(value.abs() for value, _ in products)
        assert bool(((result.double() - exact).abs() <= spread).all())


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("format", ["int4", "int8", None])
@pytest.mark.quick(where=lambda format, target: (format == "int4") == (target == "sm_86") and format != "int8")
def test_every_region_has_a_schedule(format: str | None, target: str) -> None:
    quantized: Any = {"format": format, "group_size": 128} if format else {}
    weights = [jitgen.TensorSpec((512, 1024), torch.bfloat16, **quantized) for _ in range(7)]
    for function in (summed, neighbours):
        for rows in (1, 8, 64, 2000):
            x = jitgen.TensorSpec((rows, 1024), torch.bfloat16)
            low = jitgen.jit(function, backend="cuda").lower(x, *weights, target=target).lowered
            assert max(len(body.contractions) for kernel in low.program.kernels for body in kernel.bodies) <= 4
            for schedule in low.schedules:
                assert getattr(schedule, "shared_bytes", 0) <= low.route.device.target.shared_bytes
