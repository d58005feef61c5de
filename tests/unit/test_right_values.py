"""Values of functions against mpmath, and against float64 where torch rounds within a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.conformance.references import REFERENCES, evaluated

ANY = (*(k / 7 for k in range(-40, 60) if k % 7), 1.0, 2.0, 3.0, 8.0, 1 + 1e-9, 2 - 1e-9, 1.4616321449683622, 1e-8, 1e8)
POSITIVE = tuple(x for x in ANY if x > 0)
TAILS = (*(k / 3 for k in range(-110, 30)), 0.0, 1e-9, -37.5)
PROBABILITIES = (1e-300, 1e-20, 1e-3, 0.2, 0.25, 0.3, 0.5 - 1e-9, 0.5, 0.7, 0.75, 0.999)
BESSEL = (-700.0, -20.5, -8.0, -1.25, -1e-3, 0.0, 0.5, 7.99, 8.01, 30.0, 700.0)

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., Any], tuple[float, ...]]] = {
    "lgamma": (torch.lgamma, lambda x: mpmath.log(abs(mpmath.gamma(x))), POSITIVE),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 1), lambda x: mpmath.log(abs(mpmath.gamma(x))), POSITIVE),
    "digamma": (torch.digamma, mpmath.digamma, POSITIVE),
    "polygamma of order 1": (lambda x: torch.polygamma(1, x), lambda x: mpmath.polygamma(1, x), ANY),
    "polygamma of order 2": (lambda x: torch.polygamma(2, x), lambda x: mpmath.polygamma(2, x), POSITIVE),
    "ndtr": (torch.special.ndtr, REFERENCES["special.ndtr"], TAILS),
    "log_ndtr": (torch.special.log_ndtr, lambda x: _log_ndtr(x), TAILS),
    "erfcx": (
        torch.special.erfcx,
        lambda x: mpmath.exp(mpmath.mpf(x) ** 2) * mpmath.erfc(x),
        (-5.0, -0.1, 3.3, 6.9, 9.0),
    ),
    "ndtri": (
        torch.special.ndtri,
        lambda p: mpmath.findroot(_off(p), float(torch.special.ndtri(_one(p)))),
        PROBABILITIES,
    ),
    "erfinv": (torch.erfinv, mpmath.erfinv, (-0.999, -0.51, -0.5, 0.0, 1e-9, 0.3, 0.9, 1 - 1e-9)),
    "i0": (torch.i0, lambda x: mpmath.besseli(0, x), BESSEL),
    "i1": (torch.special.i1, lambda x: mpmath.besseli(1, x), BESSEL),
    "sinc": (torch.sinc, REFERENCES["sinc"], (*ANY, 100.0, -101.0, 100.25, 0.0)),
    "angle": (torch.angle, lambda x: mpmath.pi if x < 0 else mpmath.mpf(0), ANY),
    "xlog1py of a number": (lambda x: torch.special.xlog1py(x, 0.1), lambda x: x * mpmath.log1p(0.1), ANY),
    "xlogy of a number": (lambda x: torch.xlogy(x, 0.1), lambda x: x * mpmath.log(0.1), ANY),
    "log10": (torch.log10, mpmath.log10, POSITIVE),
    "log2": (torch.log2, lambda x: mpmath.log(x, 2), POSITIVE),
    "exp2": (torch.exp2, lambda x: mpmath.mpf(2) ** x, TAILS),
    "rad2deg": (torch.rad2deg, lambda x: x * 180 / mpmath.pi, ANY),
    "logaddexp2": (
        lambda x: torch.logaddexp2(x, -x),
        lambda x: mpmath.log(mpmath.mpf(2) ** x + mpmath.mpf(2) ** -x, 2),
        ANY,
    ),
}


def _log_ndtr(x: float) -> Any:
    ndtr = REFERENCES["special.ndtr"]
    return mpmath.log(ndtr(x)) if x < 0 else mpmath.log1p(-ndtr(-x))


def _one(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _off(p: float) -> Callable[[Any], Any]:
    return lambda x: mpmath.log(REFERENCES["special.ndtr"](x)) - mpmath.log(p)


def _agree(got: torch.Tensor, want: torch.Tensor, within: float) -> None:
    least = torch.finfo(got.dtype).tiny
    wrong = (got.double() - want).abs() > within * want.abs() + least
    assert not wrong.any(), list(zip(got[wrong].tolist(), want[wrong].tolist(), strict=True))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-14), (torch.float32, 3e-6)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(where=lambda name, dtype: dtype == torch.float32 or list(CASES).index(name) % 4 == 0)
def test_values_are_right(name: str, dtype: torch.dtype, within: float) -> None:
    """Also where eager torch loses digits: at zeros, in tails, at integers."""
    function, right, elements = CASES[name]
    x = torch.tensor(elements, dtype=torch.float64).to(dtype)
    if dtype == torch.float32:
        x = x[(x.double() - torch.tensor(elements, dtype=torch.float64)).abs() < 1e-3]
    want = evaluated(right, x)
    kept = want.abs() < torch.finfo(dtype).max
    got = jitgen.jit(function)(x)
    assert got.dtype == dtype
    _agree(got[kept], want[kept], within)


@pytest.mark.parametrize("name", ["ndtr", "sinc", "lgamma", "angle"])
def test_their_gradients_are_right(name: str) -> None:
    function, right, elements = CASES[name]
    chosen = [x for x in elements if abs(x) > 1e-3 and abs(x) < 20 and x != round(x)]
    x = torch.tensor(chosen, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(jitgen.jit(function)(x).sum(), x)
    _agree(got, evaluated(lambda at: mpmath.diff(right, at), x.detach()), 3e-14)


def test_the_gradient_of_sinc_near_zero() -> None:
    x = torch.tensor([1e-3, -1e-4, 1e-6, 0.0], requires_grad=True)
    (got,) = torch.autograd.grad(jitgen.jit(torch.sinc)(x).sum(), x)
    _agree(got, -(math.pi**2) / 3 * x.detach().double() * (1 - (math.pi * x.detach().double()) ** 2 / 10), 1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["fweights", "aweights"])
def test_a_weighted_covariance_of_16_bits_has_the_weights_digits(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50).to(dtype)
    weights = torch.randint(1, 9, (50,)) if kind == "fweights" else torch.rand(50) + 0.1
    weights = {kind: weights}
    want = torch.cov(x.double(), **{k: w if kind == "fweights" else w.double() for k, w in weights.items()})
    got = jitgen.jit(lambda x, w: torch.cov(x, **{kind: w}))(x, weights[kind])
    assert got.dtype == torch.cov(x, **weights).dtype
    scale = want.diagonal().max()
    assert (
        (got.double() - want).abs() <= (torch.finfo(got.dtype).eps if kind == "fweights" else 2e-6) * 8 * scale
    ).all()


@pytest.mark.parametrize("sizes", [(5, 3), (4, 6, 5), (3, 7)], ids=str)
def test_adaptive_pools_of_16_bits_are_rounded_once(sizes: tuple[int, ...]) -> None:
    pool = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(sizes)]
    x = torch.randn(2, 3, *(7 + 2 * k for k in range(len(sizes)))).half()
    got = jitgen.jit(lambda x: pool(x, sizes))(x)
    assert got.dtype == torch.float16
    _agree(got, pool(x.double(), sizes), 2.0**-11 * 1.01)


def _random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max, (count,), dtype=bits).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ldexp_by_integers_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([_random_bits(dtype, 2000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan]).to(dtype)])
    near, far = torch.randint(-140, 140, (2005,)), torch.randint(-2300, 2300, (2005,))
    far[:3] = torch.tensor([2**40, -(2**40), 2**31])
    scaled = jitgen.jit(torch.ldexp)
    for exponents in (near, far.int(), near.to(torch.int16)):
        expected = torch.ldexp(x, exponents)
        torch.testing.assert_close(scaled(x, exponents), expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(jitgen.TraceError, match="bools"):
        scaled(x, near > 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_number_divided_by_a_tensor_is_rounded_twice_as_in_torch(dtype: torch.dtype) -> None:
    """Codes that a scale of ``448 / amax`` gives are eager torch's, ties included."""
    torch.manual_seed(0)

    def quantised(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = 448 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float(), scale, 1 / x, 2.5 / x, 3 / x

    x = torch.randn(64, 300, dtype=dtype)
    for got, expected in zip(jitgen.jit(quantised)(x), quantised(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
def test_a_divisor_that_wraps_around_to_0_is_refused(dtype: torch.dtype) -> None:
    x = torch.tensor([100, 7], dtype=dtype)
    for function in (lambda x, divisor: x // divisor, lambda x, divisor: x % divisor):
        jitted = jitgen.jit(function)
        for divisor in (3, 2**40, 259, -(2**31)):
            if divisor % 2 ** (8 * dtype.itemsize) == 0:
                with pytest.raises(jitgen.TraceError, match="division by zero"):
                    jitted(x, divisor)
            else:
                assert torch.equal(jitted(x, divisor), function(x, divisor))


@pytest.mark.parametrize("shape", [(1, 17, 1), (1, 1, 1), (3, 1, 1)], ids=str)
def test_any_and_all_over_sizes_of_1(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).relu()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.any(dim=(0, 2)), (x * 2).all(dim=(1, 2)), (x > 0).any(dim=(0, 1), keepdim=True)

    for found, expected in zip(jitgen.jit(both)(x), both(x), strict=True):
        assert torch.equal(found, expected)
