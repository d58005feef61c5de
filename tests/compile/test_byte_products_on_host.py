"""Products of operands of one byte by ``mma.sync``: the kernels a GPU would get, run on the CPU.

``tests/host_mma_bytes.cuh`` sums 8-bit floats with as few bits as tensor cores have, so that what a long K loses is
seen here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import _data
from jitgen.compilers import host
from jitgen.families.gemm import stream_tiles, wgmma_tiles
from jitgen.families.gemm.mainloops import MmaQuantized, WgmmaQuantized
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE_SIGN_ERROR = 2.0**-10
"""Of sums of positive products of 8-bit floats, relative to their norm: tensor cores keep some 14 bits of a chain."""


def headers_of_bytes(promoted: bool = True) -> dict[str, str]:
    """The headers with instructions of a GPU, as they are on the host."""
    directory = _data.templates_directory()
    text = (directory / "common" / "include" / "jitgen" / "mma_bytes.cuh").read_text()
    text = re.sub(r'asm\("mma.sync.*?\);', "multiply_bytes<X, W>(sum, a, b0, b1, start);", text, flags=re.DOTALL)
    instruction = (Path(__file__).parents[1] / "host_mma_bytes.cuh").read_text()
    text = instruction + text.split("namespace jitgen {\n", 1)[1]
    if not promoted:
        text = re.sub(r"constexpr bool promoted = .*?;", "constexpr bool promoted = false;", text, flags=re.DOTALL)
    headers = host_headers() | {"jitgen/mma_bytes.cuh": text}
    loads = re.compile(r'asm volatile\("ld.shared.v4.*?\);', re.DOTALL)
    stores = re.compile(r'asm volatile\("st.shared.u(\d+) .*?"r"\((.*)\), "[rh]"\((.*)\) : "memory"\);')
    for name in ("gemm_rows", "gemm_dense"):
        text = (directory / "gemm" / "include" / "jitgen" / f"{name}.cuh").read_text()
        text = loads.sub("memcpy(b, shared_memory + address, 16);", text)
        headers[f"jitgen/{name}.cuh"] = stores.sub(r"store_shared<uint\1_t>(\2, \3);", text)
    return headers


def _product(x: torch.Tensor, w: torch.Tensor, promoted: bool = True) -> torch.Tensor:
    (found,) = run(lambda x, w: x.float() @ w.float().T, x, w, target="sm_89", headers=headers_of_bytes(promoted))
    return found


def _error(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    exact = x.double() @ w.double().T
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [(1, 17, 272), (7, 16, 1040), (20, 33, 300)], ids=str)
@pytest.mark.parametrize(
    "kinds", [(torch.int8, torch.int8), (torch.uint8, torch.int8), (torch.int8, torch.uint8)], ids=str
)
def test_integers_are_exact(sizes: tuple[int, int, int], kinds: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(sum(sizes))
    m, n, k = sizes
    x, w = (
        torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, (rows, k), dtype=dtype)
        for rows, dtype in zip((m, n), kinds, strict=True)
    )
    assert torch.equal(_product(x, w).double(), x.double() @ w.double().T)


@pytest.mark.parametrize("sizes", [(3, 16, 65536), (12, 8, 16383)], ids=str)
def test_sums_of_a_long_k_keep_their_bits(sizes: tuple[int, int, int]) -> None:
    """By the mainloop that reads weights as fragments, and by that through shared memory; each is off without
    promotion."""
    torch.manual_seed(sum(sizes))
    m, n, k = sizes
    x, w = (torch.rand(rows, k).to(E4M3) for rows in (m, n))
    assert _error(_product(x, w), x, w) < ONE_SIGN_ERROR
    assert _error(_product(x, w, promoted=False), x, w) > 8 * ONE_SIGN_ERROR


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (7, 24), (11, 72)])
@pytest.mark.parametrize(
    ("format", "group", "length"),
    [("int4", 128, 640), ("uint4", 64, 576), ("int4", 32, 352), ("uint4", None, 1040), ("int4", None, 528)],
)
def test_weights_of_four_bits(
    rows: int, columns: int, format: str, group: int | None, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet int8 activations. The last chunk of K is half of one, or less, but for groups of 128."""
    torch.manual_seed(rows + length)
    tiles = MmaQuantized(next(tokens for tokens in (1, 8, 16) if rows <= tokens), 2, 1, 2, 2)
    monkeypatch.setattr(stream_tiles, "candidates", lambda *_: [tiles])
    monkeypatch.setattr(wgmma_tiles, "candidates", lambda *_: [WgmmaQuantized(64, 2, 1, 2, stages=8)])
    monkeypatch.setattr(wgmma_tiles, "cost", lambda *_: math.inf)
    x = torch.randn(rows, length, dtype=torch.bfloat16)
    weight = jitgen.quantize(torch.randn(columns, length), format, group, activation="int8")
    (found,) = run(F.linear, x, weight, target="sm_90a", headers=headers_of_bytes())
    step = (x.float().abs().amax(-1, keepdim=True) * (1 / 127)).to(torch.float32)
    exact = ((x.float() * (1 / step)).round().double() * step) @ weight.dequantize(torch.float64).T
    assert (found.double() - exact).norm() <= 2**-8 * exact.norm()  # the product is rounded to bfloat16


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_floats(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(3)
    for m, n, k in ((2, 24, 272), (9, 16, 1040), (20, 33, 299)):
        x, w = torch.randn(m, k).to(kinds[0]), torch.randn(n, k).to(kinds[1])
        assert _error(_product(x, w), x, w) < 2.0**-11
