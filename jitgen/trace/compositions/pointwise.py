"""Composes pointwise functions of those that have operations of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.ir.custom_gradients import with_gradient
from jitgen.spec import dtype_name, scales_by_integers
from jitgen.trace.compositions.checks import require_float
from jitgen.trace.table import composition


def floating(value: Any) -> Any:
    """Converts a tensor of integers to torch's default dtype."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value.to(torch.get_default_dtype())
    return value


@composition("addr")
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = torch.outer(vec1, vec2)
    whole = torch.result_type(input, product)
    for factor in (alpha, beta):
        if isinstance(factor, bool) and whole != torch.bool:
            raise TypeError(f"a bool factor for a result of {dtype_name(whole)}, which torch refuses too; pass 0 or 1")
        if isinstance(factor, float) and not whole.is_floating_point:
            raise TypeError(f"a float factor for a result of {dtype_name(whole)}, which torch refuses too")
        torch.full((), factor, dtype=product.dtype)  # is refused where it is beyond the dtype
    input = input.expand(product.shape)  # is refused where it does not broadcast
    product = product if alpha == 1 else product * alpha
    result = product if beta == 0 else (input if beta == 1 else input * beta) + product
    return result.to(whole)


@composition("isclose")
def isclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    if input.dtype != other.dtype:
        raise TypeError(f"isclose takes two tensors of one dtype, not {input.dtype} and {other.dtype}")
    if rtol < 0 or atol < 0:
        raise ValueError("the tolerances must not be negative")
    equal = input == other
    if equal_nan and input.is_floating_point():
        equal = equal | (input.isnan() & other.isnan())
    if rtol == 0 and atol == 0:
        return equal
    first, second = floating(input), floating(other)
    distance = (first - second).abs()
    return equal | (distance.isfinite() & (distance <= atol + (rtol * second).abs()))


@composition("ldexp")
def ldexp(input: Tensor, other: Tensor) -> Tensor:
    """Computes input * 2**other. Of floats and integers it is rounded once, in the dtype of the floats, from torch 2.13
    on; others, and all before, are a product with a power in float32, which may be infinite or 0."""
    if other.is_floating_point() or not input.is_floating_point() or not scales_by_integers():
        return input * torch.pow(2.0, other)
    if other.dtype == torch.bool:
        raise TypeError("an exponent of bools, which torch has not for floats; convert it to int32")
    scaled, exponent = input.double(), other.to(torch.int32).clamp(-3000, 3000)
    for _ in range(2 if input.dtype == torch.float64 else 0):
        # A power of 2 may be beyond float64. Downwards 53 bits are left, so that what a step rounds is 0 in the end.
        for bound, step in ((1023, 1023), (-1022, -969)):
            is_beyond = exponent > bound if step > 0 else exponent < bound
            scaled = torch.where(is_beyond, scaled * 2.0**step, scaled)
            exponent = torch.where(is_beyond, exponent - step, exponent)
    return (scaled * _power_of_two(exponent.clamp(-1022, 1023))).to(input.dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2**exponent in float64, exactly; exponents of int32 are from -1022 to 1023."""
    power, magnitude = torch.ones_like(exponent, dtype=torch.float64), exponent.abs()
    for bit in range(9, -1, -1):
        power = torch.where((magnitude >> bit) & 1 == 1, power * 2.0 ** (1 << bit), power)
    return torch.where(exponent < 0, 1 / power, power)


@composition("logaddexp2")
def logaddexp2(input: Tensor, other: Tensor) -> Tensor:
    """Computes max + log2(1 + 2^-|a - b|). Of two equal infinities the result is that infinity."""
    require_float(input, other)
    large = torch.maximum(input, other)
    tail = (-(input - other).abs()).exp2().log1p() * (1 / math.log(2))
    return torch.where(input.isinf() & (input == other), input, large + tail)


NEAR_ZERO = tuple((-1) ** k * 2 * k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(1, 10))
"""The coefficients of sinc's derivative divided by x, by powers of x^2; for x in [-1/4, 1/4], where its formula
cancels."""


@composition("sinc")
def sinc(input: Tensor) -> Tensor:
    """Computes sin(pi x) / (pi x) by the sine of the distance to the nearest integer, so that it is 0 at integers."""
    x = floating(input)
    nearest = x.round()
    rest, sign = (x - nearest) * math.pi, 1 - 2 * nearest.remainder(2)
    sine, cosine = rest.sin() * sign, rest.cos() * sign
    near = x.abs() <= 0.25
    far = torch.where(near, 1.0, x)
    square, slope = x * x, torch.full_like(x, NEAR_ZERO[-1])
    for coefficient in NEAR_ZERO[-2::-1]:
        slope = slope * square + coefficient
    slope = torch.where(near, slope * x, (cosine - sine / (far * math.pi)) / far)
    return with_gradient(torch.where(x == 0, 1.0, sine / (x * math.pi)), x, slope)


@composition("xlog1py")
def xlog1py(input: Any, other: Any) -> Tensor:
    number = torch.full((), float(other), dtype=floating(input).dtype) if not isinstance(other, Tensor) else other
    y = floating(number)
    logarithm, is_zero = torch.log1p(y), torch.as_tensor(input) == 0
    value = torch.where(is_zero, 0.0, input * logarithm)
    value = torch.where(torch.isnan(other), math.nan, value) if isinstance(other, Tensor) else value
    return with_gradient(value, input, torch.where(is_zero & (y <= -1), 0.0, logarithm), other, input / (y + 1))


@composition("entr")
def entr(input: Tensor) -> Tensor:
    x = floating(input)
    inside = torch.where(x > 0, -x * x.log(), torch.where(x == 0, torch.zeros_like(x), -math.inf))
    return with_gradient(torch.where(x.isnan(), x, inside), x, -1 - x.log())


composition("__rdiv__")(lambda input, other: other / input)
composition("__rmatmul__")(lambda input, other: torch.matmul(other, input))


@composition("_nn.rrelu", "torch.rrelu")
def rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    for name, bound in (("lower", lower), ("upper", upper)):
        if bound != bound or abs(bound) == math.inf:
            raise ValueError(f"the {name} bound must be finite, as in torch; it is {float(bound)}")
    if lower > upper:
        raise ValueError(
            f"the lower bound {float(lower)} is above the upper one, {float(upper)}, which torch refuses too"
        )
    if training:
        return torch.where(input > 0, input, input * torch.empty_like(input).uniform_(lower, upper))
    return torch.nn.functional.leaky_relu(input, (lower + upper) / 2)


composition("special_softmax")(lambda input, dim, *, dtype=None: input.softmax(dim, dtype=dtype))
composition("isreal")(lambda input: torch.ones_like(input, dtype=torch.bool))


@composition("angle")
def angle(input: Tensor) -> Tensor:
    """Computes 0 or pi, or NaN."""
    x = floating(input)
    result = torch.where(x < 0, torch.full_like(x, math.pi), 0.0)
    return with_gradient(torch.where(x.isnan(), x, result), x, 0.0)


composition("sym_int")(lambda a: int(a))
composition("sym_float")(lambda a: a * 1.0)


# ----------------------------------------------------------------------------------------------- orthogonal polynomials


def _degree(n: Any) -> int:
    if isinstance(n, Tensor):
        raise UnsupportedError("the degree of a polynomial must be a number; pass an int")
    if int(n) > 64:
        raise UnsupportedError(f"a polynomial of degree {int(n)} is not supported; up to 64 are")
    return int(n)


def _recurrence(x: Any, n: Any, first: Any, step: Any) -> Tensor:
    """Evaluates the polynomial of degree ``n`` by its three-term recurrence; 0 for negative degrees."""
    if not isinstance(x, Tensor):
        raise UnsupportedError("the argument of a polynomial must be a tensor; write torch.tensor(x)")
    x, degree = floating(x), _degree(n)
    if degree < 0:
        return torch.zeros_like(x)
    before, now = torch.ones_like(x), first(x)
    if degree == 0:
        return before
    for k in range(1, degree):
        before, now = now, step(k, x, now, before)
    return now


def _polynomial(name: str, first: Any, step: Any) -> None:
    """Registers a polynomial by its recurrence; of Chebyshev's also the one shifted to [0, 1]."""
    composition(name)(lambda input, n: _recurrence(input, n, first, step))
    if name.startswith("chebyshev"):
        composition(f"shifted_{name}")(lambda input, n: _recurrence(2 * floating(input) - 1, n, first, step))


_polynomial("chebyshev_polynomial_t", lambda x: x, lambda k, x, p, q: (x + x) * p - q)
_polynomial("chebyshev_polynomial_u", lambda x: x + x, lambda k, x, p, q: (x + x) * p - q)
_polynomial("chebyshev_polynomial_v", lambda x: x + x - 1, lambda k, x, p, q: (x + x) * p - q)
_polynomial("chebyshev_polynomial_w", lambda x: x + x + 1, lambda k, x, p, q: (x + x) * p - q)
_polynomial("hermite_polynomial_h", lambda x: x + x, lambda k, x, p, q: (x + x) * p - 2 * k * q)
_polynomial("hermite_polynomial_he", lambda x: x, lambda k, x, p, q: x * p - k * q)
_polynomial("laguerre_polynomial_l", lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1 - x) * p - k * q) / (k + 1))
_polynomial("legendre_polynomial_p", lambda x: x, lambda k, x, p, q: ((2 * k + 1) * x * p - k * q) / (k + 1))
