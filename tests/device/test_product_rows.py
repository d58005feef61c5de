"""Products on a GPU for every number of rows at which something changes: buckets, tiles, warps, ragged last tiles.

Each result is written into poison and compared with float64 on the same numbers. N and K are ragged as well: N below,
at and above a tile, K of one step, of a few, and of an odd number of them that blocks of a cluster share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2.0**-8, F16: 2.0**-10, F32: 2.0**-17}
"""Of the norm of the difference, relative to the result's: half a unit in the last place of the result's rounding, and
as much again for a weight rounded once. Of float32 it is the roundings of up to 5888 sums of random signs: half a unit
times the root of their number."""
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 777, 1000)
SIZES = ((72, 1152), (1000, 384), (4104, 640), (184, 5888), (130, 128))
"""(N, K)"""
CASES: dict[str, tuple[str | None, int | None, torch.dtype]] = {
    "dense": (None, None, BF16),
    "dense float16": (None, None, F16),
    "dense float32": (None, None, F32),
    "int4": ("int4", 128, BF16),
    "int4 float16": ("int4", 128, F16),
    "uint4 64": ("uint4", 64, BF16),
    "int8": ("int8", None, BF16),
}


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def swiglu(x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def projections(x: torch.Tensor, q: Any, k: Any, v: Any) -> Any:
    return F.linear(x, q), F.linear(x, k).relu(), F.linear(x, v) * 2


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cuda").to(dtype)


def wide(value: Any) -> torch.Tensor:
    return value.dequantize(torch.float64) if isinstance(value, jitgen.QTensor) else value.double()


def check(
    function: Callable[..., Any], x: torch.Tensor, *weights: Any, slack: float = 1, backend: str = "cuda"
) -> None:
    expected = function(x.double(), *map(wide, weights))
    expected = expected if isinstance(expected, tuple) else (expected,)
    poisoned = tuple(torch.full(e.shape, float("nan"), dtype=x.dtype, device="cuda") for e in expected)
    plan = jitgen.jit(function, backend=backend).bind(x, *weights)
    plan(x, *weights, out=poisoned if len(poisoned) > 1 else poisoned[0])
    for got, want in zip(poisoned, expected, strict=True):
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error <= slack * TOLERANCE[x.dtype], f"{len(x)} rows: relative error {error:.2e}"


def weight(n: int, k: int, format: str | None, group: int | None, dtype: torch.dtype) -> Any:
    return random(n, k, dtype=dtype) if format is None else jitgen.quantize(random(n, k), format, group)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case, size, backend: backend == "cuda" and case in ("dense", "int4") and size[1] < 5000)
def test_every_number_of_rows(case: str, size: tuple[int, int], backend: str) -> None:
    format, group, dtype = CASES[case]
    w = weight(*size, format, group, dtype)
    for rows in ROWS:
        check(linear, random(rows, size[1], dtype=dtype), w, backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.quick(where=lambda dtype, backend: dtype == F32)
def test_a_k_of_an_odd_number_of_eights(dtype: torch.dtype, backend: str) -> None:
    for n, k in ((200, 1096), (1000, 8200), (64, 72)):
        w = random(n, k, dtype=dtype)
        for rows in ROWS:
            check(linear, random(rows, k, dtype=dtype), w, slack=2, backend=backend)


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("size", SIZES[:3], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.quick(where=lambda size, format: size == SIZES[0])
def test_two_products_in_one_tile(size: tuple[int, int], format: str | None) -> None:
    gate, up = (weight(*size, format, 128 if format else None, BF16) for _ in range(2))
    for rows in ROWS:
        check(swiglu, random(rows, size[1]) / size[1] ** 0.5, gate, up, slack=4)


@pytest.mark.parametrize("size", [*SIZES, (72, 150), (4096, 14336)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.quick(where=lambda size: size[1] < 500)
def test_two_rows_launch_tiles_of_their_own(size: tuple[int, int]) -> None:
    """One and two of up to eight rows of int4 products; at 4096 x 14336 other warps share K than those of eight."""
    n, k = size
    group = 128 if k % 128 == 0 else None
    w, gate, up = (weight(n, k, "int4", group, BF16) for _ in range(3))
    x = random(8, k) / k**0.5
    for rows in (2, 8):
        check(linear, x[:rows], w)
        check(swiglu, x[:rows], gate, up, slack=4)
    compiled = jitgen.jit(swiglu, backend="cuda")
    assert torch.equal(compiled(x[:2], gate, up), compiled(x[:2], gate, up))


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format == "int4")
def test_several_regions(format: str | None) -> None:
    q, k, v = (weight(n, 640, format, 128 if format else None, BF16) for n in (520, 136, 264))
    for rows in ROWS:
        check(projections, random(rows, 640), q, k, v)


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("function", [linear, swiglu, projections])
@pytest.mark.quick(where=lambda function, format: function is linear)
def test_k_split_over_a_temporary(function: Callable[..., Any], format: str | None) -> None:
    """Few tiles and a K that blocks of several clusters share: in order, so that calls give equal bits."""
    k = 24320
    sizes = {linear: (200,), swiglu: (136, 136), projections: (72, 8, 130)}[function]
    weights = [weight(n, k, format, 128 if format else None, BF16) for n in sizes]
    for rows in (17, 31, 64, 65, 100, 129, 192, 257):
        x = random(rows, k) / (k**0.5 if function is swiglu else 1)
        compiled = jitgen.jit(function, backend="cuda")
        if rows <= 64:
            assert len(compiled.lower(x, *weights).lowered.program.kernels) == 2
        check(function, x, *weights, slack=4 if function is swiglu else 1)
        first, again = compiled(x, *weights), compiled(x, *weights)
        pairs = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
        assert all(torch.equal(one, other) for one, other in pairs)
