"""Matrix products with weights of every low-bit format: on the CPU, and in Triton under its interpreter.

They are compared with float64 of the dequantised operands. An accumulator may be off by roundings of float32; where a
dialect makes numbers of x's dtype of the weights, in which they are not exact, each is rounded once (``spread``).
CUDA's are in ``tests/compile/test_formats_on_host.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from gemm_numeric import VARIED_FORMATS, assert_near, bounds, operands, product, run
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from jitgen.quant.formats import FORMATS, check_group_size, find
from tests import triton_formats
from tests.interpreter import Interpreter

NAMES = (*FORMATS, *VARIED_FORMATS)
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
GROUPS = (32, 64, None, 128, 96, 256)
QUICK = ("int3", "nvfp4", "fp6_e3m2", "uint8.float16.floatzeros")


def group_of(format: str, number: int) -> int | None:
    """A group size that a format has."""
    return check_group_size(find(format).group_size or GROUPS[number % len(GROUPS)], format)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> random.Random:
    torch.manual_seed(sum(map(ord, request.node.name)))
    return random.Random(request.node.name)


def check(format: str, group: int | None, dtype: torch.dtype, rows: int, columns: int, length: int) -> None:
    x, w = operands(rows, columns, length, dtype, format, group)
    exact, spread = product(x, w)
    assert_near(run(jitgen.jit(lambda x, w: F.linear(x, w)), (x, w), exact.shape, dtype), exact, spread)


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.quick(where=lambda format: format in QUICK)
def test_on_the_cpu(format: str, seeded: random.Random) -> None:
    number = NAMES.index(format)
    for place, rows in enumerate((1, 5, 31)):  # a tile of one row, of up to eight, and decoded panels
        dtype = DTYPES[(number + place) % len(DTYPES)]
        check(
            format, group_of(format, number + place), dtype, rows, seeded.choice((1, 16, 49)), seeded.choice((7, 150))
        )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_on_the_cpu(data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(NAMES))
    multiple = find(format).group_multiple
    groups = st.sampled_from([None, *(multiple * factor for factor in (1, 2, 3, 4, 5, 8))])
    group = find(format).group_size or data.draw(groups)
    sizes = [data.draw(st.integers(0, most)) for most in (40, 70, 300)]
    check(format, group, data.draw(st.sampled_from(DTYPES)), *sizes)


@pytest.mark.parametrize("format", ["int3", "mxfp4", "nvfp4", "uint5.floatzeros"])
@pytest.mark.quick(where=lambda format: format == "nvfp4")
def test_swiglu_and_batches_on_the_cpu(format: str) -> None:
    group = group_of(format, 0)
    pairs = [operands(6, 33, 100, torch.bfloat16, format, group) for _ in range(2)]
    x, weights = pairs[0][0], [weight for _, weight in pairs]
    exact, spread = bounds(lambda a, b: F.silu(a) * b, [product(x, weight) for weight in weights], [])
    function = jitgen.jit(lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b))
    unit = 2.0**-24
    found = run(function, (x, *weights), exact.shape, x.dtype)
    assert_near(found, exact, spread + 64 * unit * exact.abs().clamp(min=1), operations=64)
    assert len(function.lower(x, *weights).kernels) == 1
    batch = torch.randn(2, 3, 100)
    found = jitgen.jit(lambda x, w: x @ w.t())(batch, weights[0])
    exact, spread = product(batch.reshape(6, 100), weights[0])
    assert_near(found.reshape(6, 33), exact, spread)


def test_extremes() -> None:
    """Weights that are all equal, zeros, subnormal, or with one outlier in each group."""
    for format in ("int2", "uint3", "nf4", "mxfp6", "nvfp4", "fp8_e5m2"):
        group = group_of(format, 0)
        for weight in (
            torch.full((5, 64), 0.3),
            torch.zeros(5, 64),
            torch.randn(5, 64) * 1e-41,
            torch.randn(5, 64) + 1e4 * torch.eye(5, 64),
        ):
            made = jitgen.quantize(weight, format, group)
            dense = made.dequantize(torch.float64)
            assert dense.isfinite().all()
            assert ((dense - weight.double()).abs() <= weight.abs().max().double()).all()
            if not weight.any():
                assert not dense.any() or find(format).values.abs().min() > 0


# -------------------------------------------------------------------------------------------------------------- Triton


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_formats") as process:
        yield process


@pytest.mark.parametrize("format", triton_formats.CHECKS)
@pytest.mark.quick(where=lambda format: format in ("uint5", "nf4", "nvfp4"))
def test_in_triton(format: str, failures: Interpreter) -> None:
    assert failures[format] == []
