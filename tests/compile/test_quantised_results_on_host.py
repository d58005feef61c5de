"""Products and norms whose result their own kernel quantises in blocks of 128 columns for the next product: the kernels
of sm_90a, run on the CPU with the instructions of ``tests/host_wgmma.cuh``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import launch, wgmma_tables, wgmma_tiles, wgmma_times
from jitgen.families.gemm.mainloops import WgmmaBytes
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

BLOCK, LARGEST = 128, 448.0
E4M3 = torch.float8_e4m3fn
TILES = {
    "wide": WgmmaBytes(2, 1, 256, stages=4),
    "across": WgmmaBytes(1, 2, 256, stages=4),
    "narrow": WgmmaBytes(1, 1, 256, stages=4),
    "in turn": WgmmaBytes(1, 1, 256, stages=4, pingpong=True),
}


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=2.0**-126)
    return (blocks / scales).to(E4M3).flatten(-2), scales.squeeze(-1)


def product(q: torch.Tensor, s: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x = (q.float().unflatten(-1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(-2)
    w = p.float().view(p.shape[0] // BLOCK, BLOCK, p.shape[1] // BLOCK, BLOCK) * t[:, None, :, None]
    return x @ w.view(p.shape).T


Tensors = tuple[torch.Tensor, torch.Tensor]


def one(x: Tensors, first: Tensors, second: Tensors) -> torch.Tensor:
    return product(*quantised(F.gelu(product(*x, *first))), *second)


def swiglu(x: Tensors, gate: Tensors, up: Tensors, down: Tensors) -> torch.Tensor:
    return product(*quantised(F.silu(product(*x, *gate)) * product(*x, *up)), *down)


def residual(x: Tensors, first: Tensors, second: Tensors, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return product(*quantised(product(*x, *first) + bias + y), *second)


def exact(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """The result in float64, but for the codes in the middle, which have three bits: these are of float32 values."""
    return function(*arguments).double()


def codes(rows: int, length: int, down: int = 1) -> Tensors:
    scales = torch.rand(rows // down, length // BLOCK) + 0.5
    return torch.randn(rows, length).to(E4M3), scales / length**0.5


def weights(rows: int, length: int) -> Tensors:
    return codes(rows, length, BLOCK)


def of_two_kernels(function: Callable[..., torch.Tensor], *arguments: object, clusters: bool = False) -> torch.Tensor:
    """The result of ``function``, of which the first kernel quantises what the second multiplies."""
    low = jitgen.jit(function).lower(*arguments, backend="cuda", target="sm_90a")
    assert len(low.kernels) == 2, low.explain()
    (result,) = run(function, *arguments, headers=wgmma_headers(), clusters=clusters)
    return result


CASES = {
    "one": (one, lambda rows: (codes(rows, 256), weights(384, 256), weights(128, 384))),
    "swiglu": (swiglu, lambda rows: (codes(rows, 256), weights(384, 256), weights(384, 256), weights(128, 384))),
    "residual": (
        residual,
        lambda rows: (
            *(codes(rows, 128), weights(256, 128), weights(256, 256)),
            *(torch.randn(256).bfloat16(), torch.randn(rows, 256).bfloat16()),
        ),
    ),
}


@pytest.mark.parametrize("rows", [150, 7])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case, tiles, rows: (case, tiles, rows) == ("swiglu", "narrow", 7))
def test_the_chain(case: str, tiles: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are equal but for values at the middle between two of them, which sums in another order round otherwise:
    one code is off by an eighth of its magnitude, of which a product of hundreds has few."""
    torch.manual_seed(rows)
    function, make = CASES[case]
    contractions = 2 if case == "swiglu" else 1
    chosen = TILES[tiles]
    if chosen.columns // chosen.across // contractions % BLOCK or rows <= chosen.height - 64:
        pytest.skip("no whole blocks in a warpgroup, or no rows for one")
    monkeypatch.setattr(wgmma_tables, "QUANTISING_TWO", (chosen,))
    others = (chosen,) if contractions == 1 else (WgmmaBytes(1, 1, 128, stages=8),)
    monkeypatch.setattr(wgmma_tables, "PROMOTED", others)
    monkeypatch.setattr(wgmma_tiles, "_splitting", lambda tiles, weights: tiles)  # clusters are tested on a device
    arguments = make(rows)
    found = of_two_kernels(function, *arguments)
    expected = exact(function, *arguments)
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


def share_k(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets two blocks of a cluster share the K of a tile."""
    tiles = replace(TILES["narrow"], columns=256 if case == "swiglu" else 128, cluster_k_splits=2)
    monkeypatch.setattr(wgmma_tables, "QUANTISING_TWO", (tiles,))
    monkeypatch.setattr(wgmma_tables, "PROMOTED", (replace(tiles, columns=128),))
    monkeypatch.setattr(wgmma_tiles, "_splitting", lambda tiles, weights: tiles)
    monkeypatch.setattr(wgmma_times.Times, "least", lambda *_, **__: (2, 1.0))


@pytest.mark.parametrize("rows", [50, 130])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case, rows: (case, rows) == ("residual", 50))
def test_blocks_of_a_cluster_share_k(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the sums of half of K, and computes and quantises half of the tile's blocks."""
    torch.manual_seed(rows)
    share_k(case, monkeypatch)
    function, make = CASES[case]
    arguments = make(rows)
    found, expected = of_two_kernels(function, *arguments, clusters=True), exact(function, *arguments)
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("case", ["one", "swiglu"])
@pytest.mark.quick(where=lambda case: case == "one")
def test_a_tile_of_a_cluster_follows_one_of_a_block(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks have three tiles. The stages of the third one are copied while the first two are quantised."""
    torch.manual_seed(3)
    share_k(case, monkeypatch)
    monkeypatch.setattr(launch, "blocks", lambda *_: 1)
    length, columns = 512, 384  # as long as all stages of a tile
    products = 2 if case == "swiglu" else 1
    arguments = codes(50, length), *(weights(columns, length) for _ in range(products)), weights(128, columns)
    function, _ = CASES[case]
    found, expected = of_two_kernels(function, *arguments, clusters=True), exact(function, *arguments)
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


def rms(x: torch.Tensor, gain: torch.Tensor, weight: Tensors) -> torch.Tensor:
    return product(*quantised(F.rms_norm(x, (x.shape[-1],), gain).float()), *weight)


def peak(x: torch.Tensor, gain: torch.Tensor, weight: Tensors) -> torch.Tensor:
    y = x.float() + x.float() ** 2
    return product(*quantised(y / y.abs().amax(-1, keepdim=True) * gain), *weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [256, 384, 640, 1024, 2048])
@pytest.mark.parametrize("norm", [rms, peak])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.quick(where=lambda norm, columns, dtype, aligned: norm is rms and columns == 640 and aligned)
def test_a_norm(norm: Callable[..., torch.Tensor], columns: int, dtype: torch.dtype, aligned: bool) -> None:
    """Rows that begin anywhere are read one element after another."""
    torch.manual_seed(columns)
    x = torch.randn(5, columns + (not aligned)).to(dtype)[:, :columns]
    gain, weight = torch.rand(columns).to(dtype) + 0.5, weights(128, columns)
    found = of_two_kernels(norm, x, gain, weight)
    expected = norm(x, gain, weight).double()
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.slow
def test_rows_of_several_dimensions() -> None:
    """A norm of a residual sum, whose codes and scales lie as those of a matrix."""
    torch.manual_seed(2)
    x, gain, weight = torch.randn(2, 3, 640), torch.rand(640) + 0.5, weights(128, 640)

    def norm(x: torch.Tensor, gain: torch.Tensor, weight: Tensors) -> torch.Tensor:
        return rms(x + x.flip(0), gain, weight)

    found = of_two_kernels(norm, x, gain, weight)
    expected = norm(x, gain, weight).double()
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.slow
def test_two_products_of_experts_share_a_kernel() -> None:
    """Each of the two has scales of its own, and those of a group's matrix."""
    torch.manual_seed(1)
    experts, hidden, length, ends = 3, 256, 384, torch.tensor([50, 60, 140], dtype=torch.int32)
    gate, up = (
        jitgen.quantize(torch.randn(experts, hidden, length), "fp8_e4m3.rows128", BLOCK, activation="fp8_e4m3.block128")
        for _ in range(2)
    )
    x = torch.randn(140, length).bfloat16()

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        first, second = (torch._grouped_mm(x, w.transpose(-2, -1), offs=ends) for w in (gate, up))
        return F.silu(first) * second

    found = of_two_kernels(gated, x, gate, up, ends)
    codes, scales = quantised(x.float())
    wide = codes.double() * scales.double().repeat_interleave(BLOCK, 1)
    exact, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        first, second = (wide[begin:end] @ w.dequantize(torch.float64)[expert].T for w in (gate, up))
        exact.append(F.silu(first) * second)
        begin = end
    expected = torch.cat(exact)
    # Each product is rounded to bfloat16, and the result is.
    assert (found.double() - expected).norm() <= 3 * 2**-8 * expected.norm()
