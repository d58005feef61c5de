"""Low-bit formats in CUDA C++: the kernels a GPU would get, run on the CPU, against float64 of the dequantised
operands.

The instructions of matrix products are those of ``tests/host_ptx.cuh``, so that layouts, decoding, scales and mainloops
are the real ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_numeric import assert_near, operands, product

from jitgen import _data
from jitgen.compilers import host
from jitgen.families.gemm import stream_tiles
from jitgen.families.gemm.mainloops import MmaQuantized
from jitgen.quant.formats import FORMATS, find
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

GROUPS = (32, 64, 96, None)
VARIED = ("uint3.floatzeros", "uint8.floatzeros", "int4.float16", "fp8_e4m3.rows128", "int6.e8m0", "int2.e4m3")
QUICK = ("int4", "uint3", "nvfp4", "int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def host_headers() -> dict[str, str]:
    """The headers with instructions of a GPU, as they are on the host."""
    loads = re.compile(r"  uint(32_t|2) word;\n  asm\(.*?\);\n  return word;", re.DOTALL)
    directory = _data.templates_directory() / "gemm" / "include" / "jitgen"
    planes = loads.sub("  return *address;", (directory / "gemm_planes.cuh").read_text())
    vector = (_data.templates_directory() / "common" / "include" / "jitgen" / "vector.cuh").read_text()
    vector = re.sub(r"  uint4 word;\n  asm\(.*?\);\n  return word;", "  return *address;", vector, flags=re.DOTALL)
    return {
        "jitgen/ptx.cuh": (Path(__file__).parents[1] / "host_ptx.cuh").read_text(),
        "jitgen/gemm_planes.cuh": planes,
        "jitgen/vector.cuh": vector,
    }


def _check(format: str, group: int | None, dtype: torch.dtype, rows: int, columns: int, length: int) -> None:
    row = find(format)
    x, w = operands(rows, columns, length, dtype, format, row.group_size or group)
    exact, spread = product(x, w)
    if not row.is_exact_in(str(dtype).removeprefix("torch.")):
        # Codes minus zero-points are rounded to x's dtype once.
        spread = spread + torch.finfo(dtype).eps / 2 * F.linear(x.double().abs(), _magnitudes(w))
    (found,) = run(lambda x, w: F.linear(x, w), x, w, target="sm_80", headers=host_headers())
    assert_near(found, exact, spread)


def _magnitudes(weight: Any) -> torch.Tensor:
    return weight.dequantize(torch.float64).abs()


@pytest.mark.parametrize(("columns", "length", "group"), [(40, 150, None), (72, 1152, 128)])
def test_two_rows_are_computed_by_tiles_of_their_own(
    columns: int, length: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an entry beside that of eight rows. A K of 150 is staged in accesses of four bytes."""
    monkeypatch.setattr(stream_tiles, "for_a_pair", lambda *_: MmaQuantized(2, 2, 2, 2, 2))
    x, w = operands(8, columns, length, torch.bfloat16, "int4", group)
    found = [
        run(lambda x, w: F.linear(x, w), part, w, target="sm_80", headers=host_headers())[0] for part in (x[:2], x)
    ]
    for result in found:
        exact, spread = product(x[: len(result)], w)
        assert_near(result, exact, spread)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [*FORMATS, *VARIED])
@pytest.mark.quick(where=lambda format, dtype: (format, dtype) in zip(QUICK, DTYPES, strict=True))
def test_products(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(map(ord, format)))
    number = sum(map(ord, format))
    for rows, columns, length in [(1, 40, 150), (20, 33, 70)]:
        _check(format, GROUPS[(number + rows) % 4], dtype, rows, columns, length)
