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
from jitgen.families.gemm.mainloops import Dense
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import run


def summed(x: Any, *weights: Any) -> Any:
    first, *others = (F.linear(x, weight) for weight in weights)
    return sum(others, first)


def transposed(x: Any, *weights: Any) -> Any:
    first, *others = (x @ weight for weight in weights)
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


KINDS: dict[str, tuple[torch.dtype, str | None]] = {
    **{format: (torch.bfloat16, format) for format in ("int4", "int8")},
    **{name: (getattr(torch, name), None) for name in ("bfloat16", "float32", "float64")},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(where=lambda kind, target: (kind in ("int4", "bfloat16")) and target == "sm_86")
def test_every_region_has_a_schedule(kind: str, target: str) -> None:
    """As many products are one kernel as registers hold the sums of, whatever memory blocks have; the tiles are whole,
    also those of weights along N and of rows that no access of 16 bytes reads."""
    dtype, format = KINDS[kind]
    quantized: Any = {"format": format, "group_size": 128} if format else {}
    most = 4 if format else 5
    for function, count, length in ((summed, most, 1024), (transposed, most, 1024), (summed, most, 1021)):
        if format and (function is transposed or length % 128):
            continue
        shape = (length, length)
        weights = [jitgen.TensorSpec(shape, dtype, **quantized) for _ in range(count)]
        for rows in (1, 8, 16, 64, 2000):
            x = jitgen.TensorSpec((rows, length), dtype)
            low = jitgen.jit(function, backend="cuda").lower(x, *weights, target=target).lowered
            (kernel,) = low.program.kernels
            assert [len(body.contractions) for body in kernel.bodies] == [most]
            (schedule,) = low.schedules
            assert schedule.shared_bytes <= low.route.device.target.shared_bytes
            if isinstance(schedule, Dense):
                assert schedule.block_n == 16 * schedule.row_tiles * schedule.warps_n
    weights = [jitgen.TensorSpec((512, 1024), dtype, **quantized) for _ in range(most + 3)]
    for function in (summed, neighbours):
        low = jitgen.jit(function, backend="cuda").lower(jitgen.TensorSpec((64, 1024), dtype), *weights, target=target)
        assert max(len(body.contractions) for one in low.lowered.program.kernels for body in one.bodies) <= most


@pytest.mark.parametrize(
    ("kind", "target", "count", "rows"),
    [
        ("bfloat16", "sm_86", 3, 64),
        ("bfloat16", "sm_86", 5, 2000),
        ("bfloat16", "sm_90a", 3, 64),
        ("float64", "sm_86", 5, 64),
        ("float32", "sm_90a", 5, 64),
    ],
)
@pytest.mark.quick(where=lambda target, count: (target, count) == ("sm_86", 3))
def test_their_sums_do_not_spill(kind: str, target: str, count: int, rows: int) -> None:
    dtype, _ = KINDS[kind]
    specs = [jitgen.TensorSpec((shape, 1024), dtype) for shape in (rows, *[1024] * count)]
    (report,) = jitgen.jit(summed, backend="cuda").lower(*specs, target=target).compile().report
    assert report["spill_bytes"] == 0
