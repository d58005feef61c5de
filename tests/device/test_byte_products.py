"""Products of 8-bit integers and floats on the tensor cores, against float64: integers equal to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm import wgmma_tables, wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaBytes
from jitgen.quant.activations import codes_of, kind_of, scales_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [
    *((1, 48, 80), (7, 33, 16), (16, 16, 4112), (33, 272, 1008), (64, 4080, 144)),
    *((100, 520, 448), (300, 1000, 528), (777, 144, 16400), (1111, 2064, 2064), (2500, 1072, 304)),
]
"""(M, N, K)."""
UNEVEN = [(1, 5, 3), (9, 33, 17), (70, 130, 100), (200, 66, 1001)]
"""The same, where no row begins at a multiple of 16 bytes."""
FLOAT_ERROR = 2.0**-12
"""Of sums of products of 8-bit floats in float32, relative to the norm of the result: wgmma keeps some 14 bits of the
sums of 128 products."""
ROUNDED = 2.0**-8
"""The unit roundoff of bfloat16: no rounding of a result is more, relative to it, nor is that of the norms."""
ONE_SIGN_ERROR = 2.0**-10
"""The same where all products have one sign, so that all of what wgmma drops has one."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda").to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, device="cuda")


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().T


def run(function: Callable[..., Any], *arguments: Any, says: str = "a product of codes") -> Any:
    compiled = jitgen.jit(function, backend="cuda")
    assert says in compiled.lower(*arguments).explain()
    return compiled(*arguments)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares by the norm."""
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error < tolerance, f"{error:.2e}"


def same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares products of codes of ``dtype`` in float32: of integers they are the exact sums, rounded once."""
    if dtype.is_floating_point:
        close(found, expected, FLOAT_ERROR)
    else:
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("sizes", [*SIZES, *UNEVEN], ids=str)
def test_int8_is_exact(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    x, w = codes(m, k), codes(n, k)
    found = run(lambda x, w: torch._int_mm(x, w.T), x, w, says="matrix product")
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), product(x, w))


@pytest.mark.parametrize("sizes", [*SIZES[::3], *UNEVEN[:2]], ids=str)
@pytest.mark.parametrize("kinds", [(torch.uint8, torch.int8), (torch.int8, torch.uint8), (torch.uint8, torch.uint8)])
def test_unsigned(sizes: tuple[int, int, int], kinds: tuple[torch.dtype, torch.dtype]) -> None:
    m, n, k = sizes
    x, w = codes(m, k, dtype=kinds[0]), codes(n, k, dtype=kinds[1])
    found = run(lambda x, w: x.to(torch.int32) @ w.to(torch.int32).T, x, w)
    assert torch.equal(found.double(), product(x, w))


@pytest.mark.parametrize("sizes", [*SIZES, *UNEVEN], ids=str)
def test_float8(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    x, w = codes(m, k, dtype=E4M3), codes(n, k, dtype=E4M3)
    close(run(lambda x, w: x.float() @ w.float().T, x, w), product(x, w), FLOAT_ERROR)


@pytest.mark.parametrize("kinds", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_kinds_of_float8(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    for m, n, k in (SIZES[3], SIZES[6], UNEVEN[1]):
        x, w = codes(m, k, dtype=kinds[0]), codes(n, k, dtype=kinds[1])
        close(run(lambda x, w: x.float() @ w.float().T, x, w), product(x, w), FLOAT_ERROR)


@pytest.mark.parametrize("rows", [1, 8, 200])
@pytest.mark.parametrize("k", [4096, 65535, 65536])
def test_float8_of_one_sign(k: int, rows: int) -> None:
    """Sums of one sign lose the most, and no more for a longer K: by wgmma, and by mma.sync of few rows and of rows
    that begin anywhere."""
    x, w = codes(rows, k, dtype=E4M3).float().abs().to(E4M3), codes(144, k, dtype=E4M3).float().abs().to(E4M3)
    close(run(lambda x, w: x.float() @ w.float().T, x, w), product(x, w), ONE_SIGN_ERROR)


@pytest.mark.parametrize("k", [131072, 131073, 140032])
def test_sums_beyond_int32(k: int) -> None:
    """Of codes of -128 throughout. Integers wrap around as torch's do; sums of floats of the same codes do not."""
    for rows in (3, 100):
        x, w = (torch.full((count, k), -128, dtype=torch.int8, device="cuda") for count in (rows, 48))
        wrapped = (k * 2**14 + 2**31) % 2**32 - 2**31
        assert (jitgen.jit(lambda x, w: torch._int_mm(x, w.T), backend="cuda")(x, w) == wrapped).all()
        assert (jitgen.jit(lambda x, w: x.float() @ w.float().T, backend="cuda")(x, w) == float(k * 2**14)).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_weights_beyond_int32(format: str) -> None:
    """All codes of the weight are the least, and those of x -127: their sum is above 2**31."""
    k = 163840
    x = torch.full((70, k), -3.0, dtype=torch.bfloat16, device="cuda")
    dense = torch.full((48, k), -1.0, device="cuda")
    weight = jitgen.quantize(dense, format, None, activation="int8")
    expected = x.double() @ weight.dequantize(torch.float64).T
    close(jitgen.jit(F.linear, backend="cuda")(x, weight), expected, 2.0**-7)


def rowwise(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    s = x.float().abs().amax(-1, keepdim=True) / (448 if dtype == E4M3 else 127)
    q = x.float() / s
    q = q.to(E4M3) if dtype == E4M3 else q.round().clamp(-127, 127).to(torch.int8)
    return F.silu((q.float() @ w.float().T) * s * t + 0.5).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_activations_are_quantised_by_row(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    x, w, t = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), codes(n, k, dtype=dtype), torch.rand(n).cuda()
    # By a tensor: torch's quotients by a number are products with its reciprocal on a GPU, and some codes are others.
    s = x.float().abs().amax(-1, keepdim=True) / torch.tensor(448.0 if dtype == E4M3 else 127.0, device="cuda")
    wide = x.float() / s
    q = wide.to(E4M3) if dtype == E4M3 else wide.round()
    expected = F.silu(product(q, w) * s.double() * t.double() + 0.5)
    close(run(lambda x, w, t: rowwise(x, w, t, dtype), x, w, t), expected, ROUNDED + FLOAT_ERROR)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_several_weights(dtype: torch.dtype) -> None:
    """A SwiGLU, whose two products are one tile's, and three projections of one activation."""
    x, weights = codes(333, 1040, dtype=dtype), [codes(n, 1040, dtype=dtype) for n in (528, 528, 80)]

    def swiglu(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(x.float() @ a.float().T * 1e-3) * (x.float() @ b.float().T)

    expected = F.silu(product(x, weights[0]) * 1e-3) * product(x, weights[1])
    close(run(swiglu, x, *weights[:2]), expected, FLOAT_ERROR if dtype == E4M3 else 2.0**-20)
    found = run(lambda x, a, b, c: [x.float() @ w.float().T for w in (a, b, c)], x, *weights)
    for one, weight in zip(found, weights, strict=True):
        same(one, product(x, weight), dtype)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_batches(dtype: torch.dtype) -> None:
    x, w = codes(5, 200, 272, dtype=dtype), codes(5, 144, 272, dtype=dtype)
    same(run(lambda x, w: x.float() @ w.float().mT, x, w), x.double() @ w.double().mT, dtype)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_operands_along_their_rows(dtype: torch.dtype) -> None:
    x, w = codes(272, 208, dtype=dtype), codes(272, 144, dtype=dtype)
    expected = x.double().T @ w.double()
    same(run(lambda x, w: x.T.float() @ w.float(), x, w), expected, dtype)
    wide = x.T.contiguous()
    same(run(lambda x, w: x.float() @ w.float(), wide, w), expected, dtype)


def by_blocks(q: torch.Tensor, s: torch.Tensor | None, p: torch.Tensor, t: torch.Tensor | None) -> torch.Tensor:
    x, w = q.float(), p.float()
    if s is not None:
        x = (x.unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
    if t is not None:
        w = (w.view(p.shape[0] // 128, 128, p.shape[1] // 128, 128) * t[:, None, :, None]).view(p.shape)
    return x @ w.T


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("scaled", ["both", "x", "weight"])
def test_scales_of_blocks(scaled: str, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 128, 128), (9, 384, 1152), (100, 256, 16512), (777, 640, 2176), (1500, 2176, 384)):
        x, w = codes(m, k, dtype=dtype), codes(n, k, dtype=dtype)
        s = torch.rand(m, k // 128, device="cuda") + 0.1 if scaled != "weight" else None
        t = torch.rand(n // 128, k // 128, device="cuda") + 0.1 if scaled != "x" else None
        arguments = [one for one in (x, s, w, t) if one is not None]

        def function(*given: torch.Tensor) -> torch.Tensor:
            rest = list(given)
            q = rest.pop(0)
            first = rest.pop(0) if scaled != "weight" else None
            p = rest.pop(0)
            return by_blocks(q, first, p, rest.pop(0) if scaled != "x" else None)

        wide = x.double() if s is None else x.double() * s.double().repeat_interleave(128, 1)
        weight = (
            w.double() if t is None else w.double() * t.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        )
        found = run(function, *arguments, says="for each block of 128 of K")
        close(found, wide @ weight.T, FLOAT_ERROR if dtype == E4M3 else 2.0**-20)


X_SHARED = {"multicast": 2, "shares_x": True}
TILES = {
    "wide": WgmmaBytes(2, 1, 256, stages=4),
    "wide, x shared": WgmmaBytes(2, 1, 256, stages=4, **X_SHARED),
    "three": WgmmaBytes(3, 1, 128, stages=5, staged=32),
    "three, x shared": WgmmaBytes(3, 1, 128, stages=5, staged=32, **X_SHARED),
    "narrow": WgmmaBytes(2, 1, 128, stages=6),
    "one": WgmmaBytes(1, 1, 128, stages=4, resident=2),
    "across": WgmmaBytes(1, 2, 256, stages=5, staged=32),
    "in turn": WgmmaBytes(1, 1, 128, stages=8, pingpong=True),
}


def scaled_into(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x.float() @ w.float().T * a * b).to(dtype)

    return function


@pytest.mark.parametrize("tiles", TILES)
def test_tiles_of_promoted_products(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of tile, whatever the model would choose: scales of blocks, of rows and columns, and none; results of
    16 bits are computed in pairs of columns, of which an odd number has a last one alone."""
    monkeypatch.setattr(wgmma_tables, "PROMOTED", (TILES[tiles],))
    for m, n, k in ((1500, 2176, 384), (777, 640, 2176), (4001, 8320, 640), (200, 128, 128)):
        x, w = codes(m, k, dtype=E4M3), codes(n, k, dtype=E4M3)
        s, t = torch.rand(k // 128, m, device="cuda").T + 0.1, torch.rand(n // 128, k // 128, device="cuda") + 0.1
        wide = x.double() * s.double().repeat_interleave(128, 1)
        expected = wide @ (w.double() * t.double().repeat_interleave(128, 0).repeat_interleave(128, 1)).T
        close(run(lambda x, s, w, t: by_blocks(x, s, w, t).bfloat16(), x, s, w, t), expected, ROUNDED)
    for (m, n, k), dtype in itertools.product(((900, 263, 272), (2011, 4097, 1040)), (torch.bfloat16, torch.float16)):
        x, w = codes(m, k, dtype=E4M3), codes(n, k, dtype=E4M3)
        a, b = torch.rand(m, 1, device="cuda") + 0.1, torch.rand(n, device="cuda") + 0.1
        found = run(scaled_into(dtype), x, w, a, b)
        close(found, product(x, w) * a.double() * b.double(), ROUNDED)


def test_activations_are_quantised_by_block() -> None:
    x, w = torch.randn(3, 333, 1152, dtype=torch.bfloat16, device="cuda"), codes(640, 1152, dtype=E4M3)
    t, bias = torch.rand(5, 9, device="cuda") + 0.1, torch.randn(640, device="cuda")

    def layer(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, 128))
        s = blocks.abs().amax(-1, keepdim=True) / 448
        q = (blocks / s).to(E4M3).flatten(-2)
        return (by_blocks(q, s.squeeze(-1), w, t) + bias).to(torch.bfloat16)

    close(run(layer, x, w, t, bias, says="for each block of 128 of K"), layer(x, w, t, bias).double(), 2.0**-8)


def quantised(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The numbers that the codes of ``x`` stand for, each code to the bit as kernels compute it."""
    kind = kind_of(activation)
    scales = scales_of(x, kind)
    codes = codes_of(x, scales, kind).double()
    return codes * scales.double().repeat_interleave(kind.block or x.shape[-1], -1)


@pytest.mark.parametrize(
    ("format", "group", "activation"),
    [("fp8_e4m3.rows128", 128, "fp8_e4m3.block128.powers"), ("fp8_e4m3", None, "fp8_e4m3.most3")],
)
def test_scales_that_are_powers_of_two_or_bounded(format: str, group: int | None, activation: str) -> None:
    for m, n, k in ((1, 128, 256), (33, 384, 1152), (300, 1024, 640)):
        x, dense = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), torch.randn(n, k, device="cuda")
        x[::2] *= 7  # beyond the bound
        weight = jitgen.quantize(dense, format, group, activation=activation)
        expected = quantised(x, activation) @ weight.dequantize(torch.float64).T
        close(jitgen.jit(F.linear, backend="cuda")(x, weight), expected, 2.0**-8)


@pytest.mark.parametrize(
    ("format", "group"), [("int4", 128), ("int4", 64), ("int4", 32), ("int4", None), ("uint4", 128)]
)
def test_int8_activations_of_4_bit_weights(format: str, group: int | None) -> None:
    for m, n, k in (
        (1, 48, 128),
        (1, 2064, 4160),
        (2, 400, 1088),  # whose last 128 columns are half of them
        (7, 1000, 528),
        (12, 144, 14336),
        (16, 80, 4096),
        (33, 272, 1152),
        (100, 520, 448),
        (300, 1000, 528),
        (1500, 2064, 2176),
        (1024, 4096, 1152),  # tiles of 128 rows, in clusters that share them
        (2100, 4096, 3968),  # and in clusters that share K
    ):
        x, dense = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), torch.randn(n, k, device="cuda")
        weight = jitgen.quantize(dense, format, group, activation="int8")
        bias = torch.randn(n, dtype=torch.bfloat16, device="cuda")
        expected = quantised(x, "int8") @ weight.dequantize(torch.float64).T + bias.double()
        # The product is rounded, and its sum with the bias again.
        found = run(lambda x, w, b: F.linear(x, w, b), x, weight, bias, says="times codes of int8")
        close(found, expected, 2 * ROUNDED)


def test_swiglu_of_4_bit_weights() -> None:
    x = torch.randn(2, 150, 1152, dtype=torch.bfloat16, device="cuda")
    weights = [jitgen.quantize(torch.randn(640, 1152, device="cuda"), "int4", 128, activation="int8") for _ in range(2)]

    def swiglu(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, a)) * F.linear(x, b)

    first, second = (quantised(x, "int8") @ w.dequantize(torch.float64).T for w in weights)
    close(run(swiglu, x, *weights, says="2 products of one activation"), F.silu(first) * second, 2.0**-7)


@pytest.mark.parametrize("sizes", [(1, 128, 256), (70, 576, 1152), (900, 2176, 512)], ids=str)
def test_weights_and_activations_in_blocks(sizes: tuple[int, int, int]) -> None:
    """As DeepSeek-V3 has them; 576 rows are four blocks and a half."""
    m, n, k = sizes
    x, dense = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), torch.randn(n, k, device="cuda")
    weight = jitgen.quantize(dense, "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128")
    expected = quantised(x, "fp8_e4m3.block128") @ weight.dequantize(torch.float64).T
    found = run(lambda x, w: F.linear(x, w), x, weight, says="for each block of 128 of K")
    close(found, expected, ROUNDED + FLOAT_ERROR)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_norm_and_swiglu_are_quantised_in_blocks(backend: str) -> None:
    """What each product meets is quantised by one kernel; the codes are of values in bfloat16, as eager torch has."""
    k, n = 512, 896
    weights = [
        jitgen.quantize(torch.randn(shape, device="cuda"), "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128")
        for shape in ((n, k), (n, k), (k, n))
    ]
    gain = torch.rand(k, dtype=torch.bfloat16, device="cuda") + 0.5

    def block(x: torch.Tensor, g: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        x = F.rms_norm(x, (k,), g)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    gate, up, down = (weight.dequantize(torch.float64).T for weight in weights)
    for rows in (1, 70, 900, 2500):
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        compiled = jitgen.jit(block, backend=backend)
        assert len(compiled.lower(x, gain, *weights).kernels) == {"cuda": 3, "triton": 5}[backend]
        normed = quantised(F.rms_norm(x.float(), (k,), gain.float()).bfloat16(), "fp8_e4m3.block128")
        hidden = quantised((F.silu(normed @ gate) * (normed @ up)).bfloat16(), "fp8_e4m3.block128")
        # One value in 2**4 is within its rounding to bfloat16 of the middle between two codes, and either is up to
        # 2**-3 of it away: by the norm 2**-5 at each of both quantisations.
        close(compiled(x, gain, *weights), hidden @ down, 2.0**-4)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_attention_is_quantised_in_blocks(backend: str) -> None:
    """One kernel has the codes and the scales of rows with all heads."""
    weight = jitgen.quantize(
        torch.randn(384, 512, device="cuda"), "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128"
    )

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: Any) -> torch.Tensor:
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2), w)

    compiled = jitgen.jit(block, backend=backend)
    for rows in (1, 70):
        q, k, v = (torch.randn(1, 4, size, 128, dtype=torch.bfloat16, device="cuda") for size in (rows, 90, 90))
        assert len(compiled.lower(q, k, v, weight).kernels) == 3
        h = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v))).transpose(1, 2).flatten(-2).bfloat16()
        expected = quantised(h, "fp8_e4m3.block128") @ weight.dequantize(torch.float64).T
        close(compiled(q, k, v, weight), expected, 2.0**-4)


@pytest.mark.parametrize("function", ["gelu", "biased", "layer norm"])
def test_results_are_quantised_in_blocks(function: str) -> None:
    """Rows of clusters, rows that begin anywhere, tiles in turn, no row for a warpgroup, several tiles of a block,
    and tiles that clusters share behind those of a block (227 rows)."""
    sizes = ((1, 640, 384), (33, 8192, 1024), (150, 5120, 256), (700, 1024, 2176), (40, 16384, 256), (1500, 256, 4224))
    for rows, k, n in (*sizes, (227, 3456, 8704)):
        weights = [
            jitgen.quantize(torch.randn(shape, device="cuda"), "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128")
            for shape in ((n, k), (k, n))
        ]
        up, down = (weight.dequantize(torch.float64).T for weight in weights)
        bias = torch.randn(n, dtype=torch.bfloat16, device="cuda") * k**0.5
        x = torch.randn(rows, k + 1, dtype=torch.bfloat16, device="cuda")[:, : k if rows != 150 else k + 1]
        x = x[:, -k:]

        def block(x: torch.Tensor, bias: torch.Tensor, up: Any, down: Any, k: int = k) -> torch.Tensor:
            x = F.layer_norm(x, (k,)) if function == "layer norm" else F.rms_norm(x, (k,))
            y = F.linear(x, up)
            return F.linear(F.gelu(y) if function == "gelu" else y + bias if function == "biased" else y, down)

        compiled = jitgen.jit(block, backend="cuda")
        assert len(compiled.lower(x, bias, *weights).kernels) == 3
        normed = F.layer_norm(x.float(), (k,)) if function == "layer norm" else F.rms_norm(x.float(), (k,))
        y = quantised(normed.bfloat16(), "fp8_e4m3.block128") @ up
        y = F.gelu(y) if function == "gelu" else y + bias.double() if function == "biased" else y
        # Both quantisations may be of a value next to a middle between codes, as above.
        close(compiled(x, bias, *weights), quantised(y.bfloat16(), "fp8_e4m3.block128") @ down, 2.0**-4)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("activation", ["int8.block128", "fp8_e4m3.block128", "mxfp8"])
def test_codes_in_blocks_are_returned_by_one_kernel(activation: str, backend: str) -> None:
    kind = kind_of(activation)

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = scales_of(x, kind)
        return codes_of(x, scales, kind), scales

    compiled = jitgen.jit(quantise, backend=backend)
    for shape in ((1, 256), (33, 1152), (2, 700, 4224)):
        x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        codes, scales = compiled(x)
        assert len(compiled.lower(x).kernels) == 1
        # torch's own quotients and powers on a GPU may differ in the last bit, and so may a value next to a middle.
        for found, expected in ((scales, scales_of(x, kind)), (codes.float(), codes_of(x, scales, kind).float())):
            assert (found == expected).double().mean() > 0.999


def test_scaled_mm_takes_scales_of_blocks() -> None:
    x, w = codes(300, 1152, dtype=E4M3), codes(640, 1152, dtype=E4M3)
    s, t = torch.rand(9, 300, device="cuda").t() + 0.1, torch.rand(5, 9, device="cuda") + 0.1

    def function(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w.t(), s, t.t(), out_dtype=torch.bfloat16)

    expected = (x.double() * s.double().repeat_interleave(128, 1)) @ (
        w.double() * t.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).T
    close(run(function, x, w, s, t, says="for each block of 128 of K"), expected, 2.0**-8)


@pytest.mark.parametrize("tile", wgmma_tiles._TALL_CODES, ids=str)
@pytest.mark.parametrize("format", ["int4", "uint4"])
def test_tall_tiles_of_4_bit_codes(format: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone, for rows and columns that fill no tile, and groups of a stage and of less."""
    monkeypatch.setattr(wgmma_tiles, "SHAPES", ())
    monkeypatch.setattr(wgmma_tiles, "_TALL_CODES", (tile,))
    for (m, n, k), group in (((300, 1000, 1152), 128), ((193, 264, 640), 32)):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weight = jitgen.quantize(torch.randn(n, k, device="cuda"), format, group, activation="int8")
        step = x.float().abs().amax(-1, keepdim=True) / 127
        expected = ((x.float() / step).round().double() * step) @ weight.dequantize(torch.float64).T
        function = jitgen.jit(F.linear, backend="cuda")
        assert f"tiles of {tile[0]} x {64 * tile[1]}" in function.lower(x, weight).explain()
        close(function(x, weight), expected, ROUNDED)
