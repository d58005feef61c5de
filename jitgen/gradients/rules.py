"""Lists the derivatives of pointwise operations, a row for each of ``ir/ops.py``.

A row has a function for every operand: the gradient of that operand, given the gradient ``g`` of the result. What else
it reads, it names: ``a``, ``b`` and ``c`` are the operands, ``out`` is the result. Only what the wanted gradients name
is saved or computed again for the backward (``plan.py``). Values (``values.py``) have one shape and one dtype; an
operand that is the same number in every call is that number.

Where two operands of a minimum or a maximum are equal, each gets half the gradient, and where one is NaN each gets all
of it, as in torch. None stands for an operand without a gradient: a condition, a comparison, an operation that is
constant almost everywhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jitgen.gradients.values import fn

Rule = Callable[..., Any]


def _chosen(g: Any, lost: Any, equal: Any) -> Any:
    """Computes 0 where ``lost`` holds, half of ``g`` where ``equal`` holds, and ``g`` elsewhere."""
    return fn.where(equal, g * 0.5, fn.where(lost, 0.0, g))


def _over_square(g: Any, a: Any, b: Any) -> Any:
    """Divides ``g`` by the squared length of (a, b), and gives 0 at the origin."""
    square = a * a + b * b
    return fn.where(square == 0, 0.0, g / square)


def _power(g: Any, a: Any, b: Any) -> Any:
    """Computes the gradient of the base: b * a ** (b - 1), and 0 for b = 0 even where a is 0."""
    if isinstance(b, float) and b in (0.5, 1.5):  # a tensor's: powers are no roots, which differ at -0.0 and -inf
        return g * (b * a ** fn.full_like(g, b - 1))
    if isinstance(b, (int, float)):
        return fn.zeros_like(g) if b == 0 else g * (b * a ** (b - 1))
    return fn.where(b == 0, 0.0, g * (b * a ** (b - 1)))


def _exponent(g: Any, a: Any, b: Any, out: Any) -> Any:
    """Computes the gradient of the exponent: out * log(a), and 0 for a = 0 with a non-negative exponent."""
    if isinstance(a, (int, float)):
        logarithm = math.log(a) if a > 0 else math.nan
        return fn.where(b >= 0, 0.0, g * out * -math.inf) if a == 0 else g * out * logarithm
    exponent = fn.full_like(g, b) if isinstance(b, (int, float)) else b
    return fn.where((a == 0) & (exponent >= 0), 0.0, g * out * fn.log(a))


_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)

RULES: dict[str, tuple[Rule | None, ...]] = {
    # arithmetic
    "add": (lambda g: g, lambda g: g),
    "sub": (lambda g: g, lambda g: -g),
    "mul": (lambda g, b: g * b, lambda g, a: g * a),
    "div": (lambda g, b: g / b, lambda g, b, out: -g * (out / b)),
    "floor_divide": (None, None),
    "fmod": (lambda g: g, lambda g, a, b: -g * fn.div(a, b, rounding_mode="trunc")),
    "remainder": (lambda g: g, lambda g, a, b: -g * fn.div(a, b, rounding_mode="floor")),
    "pow": (_power, _exponent),
    "atan2": (lambda g, a, b: _over_square(g * b, a, b), lambda g, a, b: _over_square(-g * a, a, b)),
    "copysign": (lambda g, a, out: fn.where(a == 0, 0.0, g * (out / a)), None),
    "minimum": (lambda g, a, b: _chosen(g, a > b, a == b), lambda g, a, b: _chosen(g, b > a, a == b)),
    "maximum": (lambda g, a, b: _chosen(g, a < b, a == b), lambda g, a, b: _chosen(g, b < a, a == b)),
    "fmin": (
        lambda g, a, b: fn.where((a <= b) | (b != b), g, 0.0),
        lambda g, a, b: fn.where((a <= b) | (b != b), 0.0, g),
    ),
    "fmax": (
        lambda g, a, b: fn.where((a >= b) | (b != b), g, 0.0),
        lambda g, a, b: fn.where((a >= b) | (b != b), 0.0, g),
    ),
    # unary arithmetic
    "neg": (lambda g: -g,),
    "abs": (lambda g, a: g * fn.sign(a),),
    "sign": (None,),
    "floor": (None,),
    "ceil": (None,),
    "round": (None,),
    "trunc": (None,),
    "sqrt": (lambda g, out: g / (2 * out),),
    "rsqrt": (lambda g, out: g * (out * out * out * -0.5),),
    "reciprocal": (lambda g, out: -g * out * out,),
    # exponentials and logarithms
    "exp": (lambda g, out: g * out,),
    "exp2": (lambda g, out: g * out * math.log(2.0),),
    "expm1": (lambda g, out: g * (out + 1),),
    "log": (lambda g, a: g / a,),
    "log2": (lambda g, a: g / (a * math.log(2.0)),),
    "log10": (lambda g, a: g / (a * math.log(10.0)),),
    "log1p": (lambda g, a: g / (a + 1),),
    # trigonometry
    "sin": (lambda g, a: g * fn.cos(a),),
    "cos": (lambda g, a: -g * fn.sin(a),),
    "tan": (lambda g, out: g * (1 + out * out),),
    "asin": (lambda g, a: g * fn.rsqrt(1 - a * a),),
    "acos": (lambda g, a: -g * fn.rsqrt(1 - a * a),),
    "atan": (lambda g, a: g / (1 + a * a),),
    "sinh": (lambda g, a: g * fn.cosh(a),),
    "cosh": (lambda g, a: g * fn.sinh(a),),
    "tanh": (lambda g, out: g * (1 - out * out),),
    "asinh": (lambda g, a: g * fn.rsqrt(a * a + 1),),
    "acosh": (lambda g, a: g * fn.rsqrt(a * a - 1),),
    "atanh": (lambda g, a: g / (1 - a * a),),
    "erf": (lambda g, a: g * _TWO_OVER_ROOT_PI * fn.exp(-a * a),),
    "erfc": (lambda g, a: -g * _TWO_OVER_ROOT_PI * fn.exp(-a * a),),
    "sigmoid": (lambda g, out: g * (1 - out) * out,),
    # selection
    "where": (None, lambda g, a: fn.where(a, g, 0.0), lambda g, a: fn.where(a, 0.0, g)),
}


@cache
def reads(rule: Rule) -> tuple[str, ...]:
    """Returns what ``rule`` reads besides the gradient of the result: of ``"a"``, ``"b"``, ``"c"``, ``"out"``."""
    return tuple(name for name in inspect.signature(rule).parameters if name != "g")


def apply(rule: Rule, gradient: Any, values: Mapping[str, Any]) -> Any:
    """Returns the gradient that ``rule`` gives an operand; ``values`` has all that it reads, by name."""
    return rule(gradient, **{name: values[name] for name in reads(rule)})
