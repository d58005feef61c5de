"""Defines the rows of torch's pointwise functions: arithmetic, comparisons, bitwise operations, copies.

A torch function that is a single operation of ``ir/ops.py`` is one line of a table here. A new one needs the operation
there, a row in each dialect, and a line below. Neighbours: ``trace/selection.py`` (tests, logic, ``where``, ``clamp``),
``trace/activations.py`` and ``trace/casts.py``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CONST
from jitgen.spec import DIVISION, DTYPES
from jitgen.trace import own_facts
from jitgen.trace.casts import ordered
from jitgen.trace.derivatives import derived
from jitgen.trace.location import user_location
from jitgen.trace.numbers import unwrap
from jitgen.trace.selection import clamp, isinf, isnan, where
from jitgen.trace.table import row
from jitgen.trace.typing import (
    Value,
    as_node,
    as_stored,
    broadcast_shapes,
    compare,
    element,
    filled,
    float_dtype,
    floats_only,
    is_constant,
    is_float,
    is_number,
    not_bool,
    one_dtype,
    pointwise,
    readable,
    require_computable,
    require_range,
    result_dtype,
    rounded,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

FLOAT_UNARY = {
    **{op: (op,) for op in ("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p")},
    **{op: (op,) for op in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "erf", "erfc")},
    **{op: (op, f"arc{op[1:]}") for op in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    "sigmoid": ("sigmoid", "expit"),
}
"""Operation -> torch's names for it. Integers are converted to torch's default dtype first."""

ROUNDING = {"floor": ("floor",), "ceil": ("ceil",), "trunc": ("trunc", "fix")}
"""Operation -> torch's names for it. On integers it is the identity."""

SAME_UNARY = {"neg": ("neg", "negative"), "abs": ("abs", "absolute"), "sign": ("sign", "sgn")}

BINARY = {
    "mul": ("mul", "multiply"),
    "minimum": ("minimum",),
    "maximum": ("maximum",),
    "fmod": ("fmod",),
    "remainder": ("remainder",),
    "floor_divide": ("floor_divide",),
}
DIVISIONS = ("fmod", "remainder", "floor_divide")
FLOAT_BINARY = {"atan2": ("atan2", "arctan2"), "copysign": ("copysign",)}
COMPARISONS = {
    "eq": ("eq",),
    "ne": ("ne", "not_equal"),
    "lt": ("lt", "less"),
    "le": ("le", "less_equal"),
    "gt": ("gt", "greater"),
    "ge": ("ge", "greater_equal"),
}
BITWISE = {
    "bitwise_and": ("bitwise_and", "__and__"),
    "bitwise_or": ("bitwise_or", "__or__"),
    "bitwise_xor": ("bitwise_xor", "__xor__"),
}
SHIFTS = {"left_shift": ("bitwise_left_shift", "__lshift__"), "right_shift": ("bitwise_right_shift", "__rshift__")}


def _float_unary(trace: Trace, input: Node, *, op: str) -> Node:
    return pointwise(trace, op, input, dtype=float_dtype(input.dtype))


def _rounding(trace: Trace, input: Node, *, op: str) -> Node:
    not_bool(input)
    return pointwise(trace, op, input) if is_float(input) else input


def _same(trace: Trace, input: Node, *, op: str) -> Node:
    if op == "abs":
        return trace.cast(pointwise(trace, op, readable(trace, input)), input.dtype)
    return pointwise(trace, op, input)


def _binary(trace: Trace, input: Value, other: Value, *, op: str) -> Node:
    dtype = result_dtype(input, other)
    if dtype == "bool" and op == "mul":
        return pointwise(trace, "bitwise_and", input, other)
    if op in DIVISIONS:
        other = divisor_of(trace, dtype, other)
    if op in ("fmod", "remainder"):
        input, other = as_stored(trace, input, dtype), as_stored(trace, other, dtype)
    return pointwise(trace, op, input, other, dtype=dtype)


def _float_binary(trace: Trace, input: Value, other: Value, *, op: str) -> Node:
    return pointwise(trace, op, input, other, dtype=float_dtype(result_dtype(input, other)))


def _comparison(trace: Trace, input: Value, other: Value, *, op: str) -> Node:
    dtype = result_dtype(input, other)
    stored = [as_stored(trace, value, dtype) for value in (input, other)]
    if op in ("eq", "ne"):
        stored = [readable(trace, value) for value in stored]
    return pointwise(trace, op, *stored, result="bool")


def _bits(trace: Trace, input: Value, other: Value, *, op: str) -> Node:
    dtype = result_dtype(input, other)
    if DTYPES[dtype].is_floating_point or (dtype == "bool" and op in SHIFTS):
        raise UnsupportedError(f"{op} is not defined for {dtype}, as in torch; convert to integers, with .long() say")
    return pointwise(trace, op, input, other)


for _function, _names_of in (
    (_float_unary, FLOAT_UNARY),
    (_rounding, ROUNDING),
    (_same, SAME_UNARY),
    (_binary, BINARY),
    (_float_binary, FLOAT_BINARY),
    (_comparison, COMPARISONS),
    (_bits, BITWISE | SHIFTS),
):
    for _op, _names in _names_of.items():
        row(*_names)(partial(_function, op=_op))

# ------------------------------------------------------------------------------------------------------ arithmetic


def divisor_of(trace: Trace, dtype: str, divisor: Value) -> Value:
    """Checks the divisor of a division in ``dtype``.

    Where that is an integer's, the number 0 is refused, and elements that are 0 make a kernel on a CPU report an error,
    as torch's does. A kernel on a GPU gives some number, as torch's does.
    """
    if DTYPES[dtype].is_floating_point:
        return divisor
    if is_number(divisor):
        wrapped = rounded(divisor, dtype) if is_constant(divisor) else _wrapped(unwrap(divisor), dtype)
        if trace.guards.equal(wrapped, 0):
            raise ZeroDivisionError(f"integer division by zero: {trace.guards.hint(unwrap(divisor))} as {dtype}")
        return divisor
    if trace.device.type != "cpu" or divisor.kind is CONST:
        return divisor
    # The index is 0, or 1 of an element that is 0, which is out of range of a table of one element, itself 0.
    is_zero = trace.cast(compare(trace, "eq", divisor, 0), "int64")
    table = trace.make("iota", (), dtype, (1,), (0,))
    line = f"{user_location() or ''}{DIVISION}"
    zero = trace.builder.make("gather", (table, is_zero), dtype, is_zero.shape, (-1,), line)
    return pointwise(trace, "add", divisor, zero, dtype=dtype)


def _wrapped(divisor: Any, dtype: str) -> Any:
    """Returns what decides whether a number that varies is 0 in ``dtype``, whose integers wrap around."""
    bits = 8 * DTYPES[dtype].itemsize
    return symbols.mod(divisor, 2**bits) if bits < 64 and symbols.kind_of(divisor) == "int" else divisor


def _scaled(
    trace: Trace, other: Value, alpha: Value, dtype: str, checked: str | None = None, negated: bool = False
) -> Value:
    """Computes ``alpha * other`` in ``dtype``, which does not depend on ``alpha``.

    Args:
        checked: the dtype whose range ``alpha`` must be within, ``dtype`` if None; then a float is none for integers.
        negated: whether it is ``-alpha`` that must be, as where torch subtracts.
    """
    if type(alpha) in (int, bool) and alpha == 1:
        return other
    if checked is None and symbols.kind_of(unwrap(alpha)) == "float" and not DTYPES[dtype].is_floating_point:
        raise TypeError(f"a float factor for {dtype} tensors")
    require_range(trace, -alpha if negated else alpha, checked or dtype)
    return pointwise(trace, "bitwise_and" if dtype == "bool" else "mul", other, alpha, dtype=dtype)


def _require_alpha(alpha: Value, dtype: str) -> None:
    """Checks torch's rule for the factor of a sum or difference of ``dtype``: a bool multiplies bools alone."""
    if symbols.kind_of(unwrap(alpha)) == "bool" and dtype != "bool":
        raise TypeError(f"a bool alpha for a result of {dtype}, which torch refuses too; pass 0 or 1")


@row("add")
def add(trace: Trace, input: Value, other: Value, *, alpha: Value = 1) -> Node:
    dtype = result_dtype(input, other)
    _require_alpha(alpha, dtype)
    return pointwise(trace, "bitwise_or" if dtype == "bool" else "add", input, _scaled(trace, other, alpha, dtype))


@row("sub", "subtract")
def sub(trace: Trace, input: Value, other: Value, *, alpha: Value = 1) -> Node:
    if any(value.dtype == "bool" if isinstance(value, Node) else isinstance(value, bool) for value in (input, other)):
        raise TypeError("subtraction is not defined for bool tensors, as in torch; use ^ or logical_xor")
    _require_alpha(alpha, result_dtype(input, other))
    return pointwise(trace, "sub", input, _scaled(trace, other, alpha, result_dtype(input, other), negated=True))


row("rsub", "__rsub__")(lambda trace, input, other, *, alpha=1: sub(trace, other, input, alpha=alpha))


@row("div", "divide", "true_divide")
def div(trace: Trace, input: Value, other: Value, *, rounding_mode: str | None = None) -> Node:
    dtype = result_dtype(input, other)
    if rounding_mode is None and (isinstance(input, Node) or input in (1, -1)):
        return pointwise(trace, "div", input, other, dtype=float_dtype(dtype))
    if rounding_mode is None:  # torch divides a number by a tensor so, in two roundings
        inverse = pointwise(trace, "reciprocal", other, dtype=float_dtype(dtype))
        inverse = trace.as_stored(inverse, ()) if trace.rounds_results else inverse
        return pointwise(trace, "mul", inverse, input, dtype=float_dtype(dtype))
    other = divisor_of(trace, dtype, other)
    if rounding_mode == "floor":
        return pointwise(trace, "floor_divide", input, other)
    if rounding_mode == "trunc":
        if DTYPES[dtype].is_floating_point:
            return pointwise(trace, "trunc", pointwise(trace, "div", input, other))
        return pointwise(trace, "trunc_divide", input, other)
    raise ValueError(f"rounding_mode must be None, 'trunc' or 'floor', not {rounding_mode!r}")


@row("positive", "__pos__", itself=True)
def positive(trace: Trace, input: Node) -> Node:
    not_bool(input)
    return input


row("alias", view=True)(lambda trace, input: input)
row("detach", view=True)(lambda trace, input: trace.detached(input))


@row("requires_grad_", itself=True)
def requires_grad(trace: Trace, input: Node, requires_grad: bool = True) -> Node:
    if requires_grad:
        raise UnsupportedError("requires_grad_ inside a decorated function; call it outside, on the arguments")
    own_facts.refuse_other_history(trace, input)
    return input


@row("clone")
def clone(trace: Trace, input: Node, *, memory_format: Any = None) -> Node:
    plain = memory_format in (None, torch.preserve_format)
    return input if plain else ordered(trace, trace.copy(input, input.dtype), memory_format)


@row("contiguous", view=True)
def contiguous(trace: Trace, input: Node, memory_format: Any = torch.contiguous_format) -> Node:
    """Copies to row-major memory if it is returned. torch returns a tensor that is row-major already itself.

    A quantised weight is in no order, and is returned.
    """
    return input if input.is_weight else ordered(trace, input, memory_format)


@row("fill", "zero")
def fill(trace: Trace, input: Node, value: Value = 0) -> Node:
    """Traces ``fill_``, ``zero_`` and ``torch.fill``."""
    if isinstance(value, Node) and value.shape:
        raise TypeError("fill takes a number or a 0-d tensor")
    return filled(trace, element(trace, value, input.dtype), input.shape)


@row("copy")
def copy(trace: Trace, input: Node, src: Node, non_blocking: bool = False) -> Node:
    """Traces ``copy_``."""
    return filled(trace, trace.cast(src, input.dtype), broadcast_shapes(trace, input.shape, src.shape))


row("square")(lambda trace, input: power(trace, input, 2))


@row("float_power")
def float_power(trace: Trace, input: Value, exponent: Value) -> Node:
    return power(trace, *(trace.cast(as_node(trace, value), "float64") for value in (input, exponent)))


@row("pow")
def power(trace: Trace, input: Value, exponent: Value) -> Node:
    """Computes a power; for some constant exponents (2, 3, 0.5, -1, ...) products and roots, as in torch."""
    dtype = result_dtype(input, exponent)
    if isinstance(input, Node) and dtype not in ("float32", "float64"):
        require_range(trace, exponent, dtype)
    if is_constant(exponent) and isinstance(input, Node) and dtype != "bool":
        if exponent == 2:
            return pointwise(trace, "mul", input, input, dtype=dtype)
        if exponent == 3:
            return pointwise(trace, "mul", pointwise(trace, "mul", input, input, dtype=dtype), input, dtype=dtype)
        if not DTYPES[dtype].is_floating_point and exponent < 0:
            raise ValueError("integers to negative integer powers are not allowed")
        if DTYPES[dtype].is_floating_point:
            roots = {0.5: "sqrt", -1: "reciprocal"}
            if exponent in roots:
                return pointwise(trace, roots[exponent], input, dtype=dtype)
            if exponent in (-0.5, -2):
                base = input if exponent == -0.5 else pointwise(trace, "mul", input, input, dtype=dtype)
                value = pointwise(trace, "rsqrt" if exponent == -0.5 else "reciprocal", base, dtype=dtype)
                return derived(trace, value, [input], lambda _: [_power_slope(trace, input, exponent, dtype)])
            if exponent == 1.5:
                value = pointwise(trace, "pow", input, exponent, dtype=dtype)
                root = pointwise(trace, "sqrt", input, dtype=dtype)
                return derived(trace, value, [input], lambda _: [pointwise(trace, "mul", root, 1.5, dtype=dtype)])
    return pointwise(trace, "pow", input, exponent, dtype=dtype)


def _power_slope(trace: Trace, input: Node, exponent: float, dtype: str) -> Node:
    return pointwise(trace, "mul", pointwise(trace, "pow", input, exponent - 1, dtype=dtype), exponent, dtype=dtype)


@row("round")
def round_(trace: Trace, input: Node, *, decimals: int = 0) -> Node:
    not_bool(input)
    if not is_float(input):
        if decimals:
            raise TypeError(f"decimals is not defined for {input.dtype} tensors")
        return input
    if not decimals:
        return pointwise(trace, "round", input)
    scale = 10.0 ** abs(int(decimals))
    first, second = ("mul", "div") if decimals > 0 else ("div", "mul")
    return pointwise(trace, second, pointwise(trace, "round", pointwise(trace, first, input, scale)), scale)


row("frac")(lambda trace, input: pointwise(trace, "sub", input, pointwise(trace, "trunc", input)))


def _scaled_angle(trace: Trace, input: Node, *, factor: float) -> Node:
    return pointwise(trace, "mul", input, factor, dtype=float_dtype(input.dtype))


row("deg2rad")(partial(_scaled_angle, factor=math.pi / 180))
row("rad2deg")(partial(_scaled_angle, factor=180 / math.pi))


@row("logit")
def logit(trace: Trace, input: Node, eps: float | None = None) -> Node:
    """Computes log(x / (1 - x)), whose slope at -0.0 is infinite, as it is at 0.0."""
    dtype = float_dtype(input.dtype)
    if eps is not None and eps < 0:
        eps = None
    if eps is None:
        value = input
    elif eps > 0.5:  # numbers below the lower bound are that, and all others the upper one
        upper = where(trace, isnan(trace, input), input, 1 - eps)
        value = where(trace, compare(trace, "lt", input, eps), eps, upper)
    else:
        value = clamp(trace, trace.cast(input, dtype), eps, 1 - eps)
    rest = pointwise(trace, "sub", 1.0, value, dtype=dtype)
    logit_ = pointwise(trace, "log", pointwise(trace, "div", value, rest, dtype=dtype))

    ends = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    low, high = (as_stored(trace, end, dtype) for end in ends)
    below, above = (pointwise(trace, op, input, end, result="bool") for op, end in (("lt", low), ("gt", high)))
    outside = pointwise(trace, "bitwise_or", below, above)

    def slopes(value_: Node) -> list[Node]:
        spread = pointwise(trace, "abs", pointwise(trace, "mul", value, rest, dtype=dtype))
        slope = pointwise(trace, "reciprocal", spread)
        return [where(trace, outside, math.nan, slope) if eps is None else slope]

    read = input if eps is None else where(trace, outside, 0, input)  # where it has a gradient
    return derived(trace, logit_, [read], slopes)


@row("lerp")
@floats_only
def lerp(trace: Trace, input: Node, end: Node, weight: Value) -> Node:
    """Interpolates by torch's formula: it starts from the nearer end, so that a weight of 1 gives exactly ``end``."""
    one_dtype(input, end, *([weight] if isinstance(weight, Node) and weight.shape else []))
    require_computable(trace, weight, input.dtype)
    if isinstance(weight, Node):
        weight = trace.cast(weight, input.dtype)
    span = pointwise(trace, "sub", end, input)
    low = pointwise(trace, "add", input, pointwise(trace, "mul", weight, span))
    rest = 1.0 - weight if is_number(weight) else pointwise(trace, "sub", 1.0, weight)
    high = pointwise(trace, "sub", end, pointwise(trace, "mul", span, rest))
    near = compare(trace, "lt", pointwise(trace, "abs", as_node(trace, weight)), 0.5)
    return derived(trace, where(trace, near, low, high), [input, end, weight], lambda value: [rest, weight, span])


@row("addcmul")
def addcmul(trace: Trace, input: Node, tensor1: Node, tensor2: Node, *, value: Value = 1) -> Node:
    dtype = result_dtype(input, tensor1, tensor2)
    if dtype == "bool":
        raise TypeError("not defined for bool tensors")
    scaled = _scaled(trace, tensor1, value, dtype, compute_dtype(dtype))
    return pointwise(trace, "add", input, pointwise(trace, "mul", scaled, tensor2, dtype=dtype), dtype=dtype)


@row("addcdiv")
def addcdiv(trace: Trace, input: Node, tensor1: Node, tensor2: Node, *, value: Value = 1) -> Node:
    if not DTYPES[result_dtype(tensor1, tensor2)].is_floating_point:
        raise UnsupportedError(
            "integer division with addcdiv is not supported, as in torch; convert with .float(), or write a // b"
        )
    dtype = result_dtype(input, tensor1, tensor2)
    scaled = _scaled(trace, tensor1, value, dtype, compute_dtype(dtype))
    return pointwise(trace, "add", input, pointwise(trace, "div", scaled, tensor2, dtype=dtype), dtype=dtype)


@row("hypot")
def hypot(trace: Trace, input: Node, other: Node) -> Node:
    """Computes sqrt(a^2 + b^2). Both are divided by the larger one first, so that no square overflows.

    As in C, it is infinite where one of them is, even beside a NaN.
    """
    dtype = result_dtype(input, other)
    first, second = (pointwise(trace, "abs", value, dtype=dtype) for value in (input, other))
    large, small = pointwise(trace, "maximum", first, second), pointwise(trace, "minimum", first, second)
    ratio = pointwise(trace, "div", small, large)
    root = pointwise(trace, "sqrt", pointwise(trace, "add", 1.0, pointwise(trace, "mul", ratio, ratio)))
    plain = compare(trace, "eq", large, 0.0)
    infinite = pointwise(trace, "bitwise_or", *(isinf(trace, operand) for operand in (first, second)))
    value = where(trace, plain, large, pointwise(trace, "mul", large, root))
    value = where(trace, infinite, math.inf, value)
    return derived(
        trace,
        value,
        [input, other],
        lambda value: [pointwise(trace, "div", operand, value, dtype=dtype) for operand in (input, other)],
    )


@row("logaddexp")
def logaddexp(trace: Trace, input: Node, other: Node) -> Node:
    """Computes max + log1p(exp(-|a - b|)). Of two equal infinities the result is that infinity."""
    large = pointwise(trace, "maximum", input, other)
    gap = pointwise(trace, "neg", pointwise(trace, "abs", pointwise(trace, "sub", input, other)))
    total = pointwise(trace, "add", large, pointwise(trace, "log1p", pointwise(trace, "exp", gap)))
    equal = compare(trace, "eq", input, other)
    infinite = pointwise(trace, "bitwise_and", equal, isinf(trace, as_node(trace, input)))
    return where(trace, infinite, large, total)


@row("xlogy")
def xlogy(trace: Trace, input: Value, other: Value) -> Node:
    dtype = float_dtype(result_dtype(input, other))
    product = pointwise(trace, "mul", input, pointwise(trace, "log", as_node(trace, other), dtype=dtype), dtype=dtype)
    zero = compare(trace, "eq", input, 0)
    nan = isnan(trace, as_node(trace, other))
    value = where(trace, nan, math.nan, where(trace, zero, 0.0, product))

    def slopes(value: Node) -> list[Node]:
        below = compare(trace, "le", as_node(trace, other), 0)
        logarithm = pointwise(trace, "log", as_node(trace, other), dtype=dtype)
        of_input = where(trace, pointwise(trace, "bitwise_and", zero, below), 0.0, logarithm)
        return [of_input, pointwise(trace, "div", input, other, dtype=dtype)]

    return derived(trace, value, [input, other], slopes)
