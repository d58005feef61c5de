"""Products of 8-bit integers and floats on the tensor cores, against float64: integers equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

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
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error < tolerance, f"{error:.2e}"


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


@pytest.mark.parametrize("k", [4096, 65536])
def test_float8_of_one_sign(k: int) -> None:
    """Sums of one sign lose the most, and no more for a longer K."""
    x, w = codes(200, k, dtype=E4M3).float().abs().to(E4M3), codes(144, k, dtype=E4M3).float().abs().to(E4M3)
    close(run(lambda x, w: x.float() @ w.float().T, x, w), product(x, w), ONE_SIGN_ERROR)


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
    expected = rowwise(x, w, t, dtype).double()
    close(run(lambda x, w, t: rowwise(x, w, t, dtype), x, w, t), expected, 2.0**-8)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_several_weights(dtype: torch.dtype) -> None:
    """A SwiGLU, whose two products are one tile's, and three projections of one activation."""
    x, weights = codes(333, 1040, dtype=dtype), [codes(n, 1040, dtype=dtype) for n in (528, 528, 80)]

    def swiglu(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(x.float() @ a.float().T * 1e-3) * (x.float() @ b.float().T)

    expected = F.silu(product(x, weights[0]) * 1e-3) * product(x, weights[1])
    close(run(swiglu, x, *weights[:2]), expected, FLOAT_ERROR)
    found = run(lambda x, a, b, c: [x.float() @ w.float().T for w in (a, b, c)], x, *weights)
    for one, weight in zip(found, weights, strict=True):
        close(one, product(x, weight), FLOAT_ERROR)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_batches(dtype: torch.dtype) -> None:
    x, w = codes(5, 200, 272, dtype=dtype), codes(5, 144, 272, dtype=dtype)
    close(run(lambda x, w: x.float() @ w.float().mT, x, w), x.double() @ w.double().mT, FLOAT_ERROR)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_operands_along_their_rows(dtype: torch.dtype) -> None:
    x, w = codes(272, 208, dtype=dtype), codes(272, 144, dtype=dtype)
    expected = x.double().T @ w.double()
    close(run(lambda x, w: x.T.float() @ w.float(), x, w), expected, FLOAT_ERROR)
    wide = x.T.contiguous()
    close(run(lambda x, w: x.float() @ w.float(), wide, w), expected, FLOAT_ERROR)
