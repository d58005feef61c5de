"""Products on a GPU for every number of rows at which something changes: buckets, tiles, warps, ragged last tiles.

Each result is written into poison and compared with float64 (``test_gemm.check``). N and K are ragged as well: N below,
at and above a tile, K of one step, of a few, and of an odd number of them that blocks of a cluster share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gemm import BF16, F16, check, linear, projections, quantized, random, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 777, 1000)
SIZES = ((72, 1152), (1000, 384), (4104, 640), (184, 5888), (130, 128))
"""(N, K)"""
CASES: dict[str, tuple[str | None, int | None, torch.dtype]] = {
    "dense": (None, None, BF16),
    "dense float16": (None, None, F16),
    "int4": ("int4", 128, BF16),
    "int4 float16": ("int4", 128, F16),
    "uint4 64": ("uint4", 64, BF16),
    "int8": ("int8", None, BF16),
}


def weight(n: int, k: int, format: str | None, group: int | None, dtype: torch.dtype) -> Any:
    return random(n, k, dtype=dtype) if format is None else quantized(n, k, format, group)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case, size, backend: backend == "cuda" and case in ("dense", "int4") and size[1] < 5000)
def test_every_number_of_rows(case: str, size: tuple[int, int], backend: str) -> None:
    format, group, dtype = CASES[case]
    w = weight(*size, format, group, dtype)
    for rows in ROWS:
        check(linear, random(rows, size[1], dtype=dtype), w, backend=backend)


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("size", SIZES[:3], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.quick(where=lambda size, format: size == SIZES[0])
def test_two_products_in_one_tile(size: tuple[int, int], format: str | None) -> None:
    gate, up = (weight(*size, format, 128 if format else None, BF16) for _ in range(2))
    for rows in ROWS:
        check(swiglu, random(rows, size[1]) / size[1] ** 0.5, gate, up, slack=4)


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format == "int4")
def test_several_regions(format: str | None) -> None:
    q, k, v = (weight(n, 640, format, 128 if format else None, BF16) for n in (520, 136, 264))
    for rows in ROWS:
        check(projections, random(rows, 640), q, k, v)
