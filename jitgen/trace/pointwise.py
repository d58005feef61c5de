"""Rows of torch's pointwise functions: arithmetic, comparison, logic, selection, casts.

A function that is one operation of ``ir/ops.py`` is one line of a table here; adding one is adding it there, a row per
dialect, and its name below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import CONTIGUOUS, Node, Shape
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.numbers import unwrap
from jitgen.trace.table import row
from jitgen.trace.typing import (
    broadcast_shapes,
    expand,
    float_dtype,
    is_constant,
    is_number,
    operand,
    pointwise,
    result_dtype,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Value = Any  # a Node or a number

FLOAT_UNARY = {
    "sqrt": ("sqrt",),
    "rsqrt": ("rsqrt",),
    "reciprocal": ("reciprocal",),
    "exp": ("exp",),
    "exp2": ("exp2",),
    "expm1": ("expm1",),
    "log": ("log",),
    "log2": ("log2",),
    "log10": ("log10",),
    "log1p": ("log1p",),
    "sin": ("sin",),
    "cos": ("cos",),
    "tan": ("tan",),
    "asin": ("asin", "arcsin"),
    "acos": ("acos", "arccos"),
    "atan": ("atan", "arctan"),
    "sinh": ("sinh",),
    "cosh": ("cosh",),
    "tanh": ("tanh",),
    "asinh": ("asinh", "arcsinh"),
    "acosh": ("acosh", "arccosh"),
    "atanh": ("atanh", "arctanh"),
    "erf": ("erf",),
    "erfc": ("erfc",),
    "sigmoid": ("sigmoid", "expit"),
}
"""Operation -> torch's names; integers are converted to the default dtype first."""

ROUNDING = {"floor": ("floor",), "ceil": ("ceil",), "trunc": ("trunc", "fix")}
"""The identity on integers."""

SAME_UNARY = {"neg": ("neg", "negative"), "abs": ("abs", "absolute"), "sign": ("sign", "sgn")}

BINARY = {
    "mul": ("mul", "multiply"),
    "minimum": ("minimum",),
    "maximum": ("maximum",),
    "fmod": ("fmod",),
    "remainder": ("remainder",),
    "floor_divide": ("floor_divide",),
}
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
SHIFTS = {
    "left_shift": ("bitwise_left_shift", "__lshift__"),
    "right_shift": ("bitwise_right_shift", "__rshift__"),
}


def is_float(node: Node) -> bool:
    return DTYPES[node.dtype].is_floating_point


def as_node(trace: Trace, value: Value) -> Node:
    """A number as the 0-d tensor torch would make of it."""
    return value if isinstance(value, Node) else operand(trace, value, result_dtype(value))


def stored(trace: Trace, value: Value, dtype: str) -> Value:
    """A number as it would be stored: torch compares in the tensor's dtype, so bfloat16(0.1) equals 0.1."""
    if isinstance(value, Node) or not DTYPES[dtype].is_floating_point:
        return value
    return trace.cast(operand(trace, value, "float64"), dtype)


def floats_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """A row that torch has for floating tensors alone."""

    @functools.wraps(function)
    def checked(trace: Trace, input: Node, *arguments: Any, **keywords: Any) -> Any:
        if not is_float(input):
            raise TypeError(f"not defined for {input.dtype} tensors")
        return function(trace, input, *arguments, **keywords)

    return checked


def not_bool(input: Node) -> None:
    if input.dtype == "bool":
        raise TypeError("not defined for bool tensors")


def _register() -> None:
    for op, names in FLOAT_UNARY.items():

        def float_unary(trace: Trace, input: Node, *, op: str = op) -> Node:
            return pointwise(trace, op, input, dtype=float_dtype(input.dtype))

        row(*names)(float_unary)
    for op, names in ROUNDING.items():

        def rounding(trace: Trace, input: Node, *, op: str = op) -> Node:
            not_bool(input)
            return pointwise(trace, op, input) if is_float(input) else input

        row(*names)(rounding)
    for op, names in SAME_UNARY.items():

        def same(trace: Trace, input: Node, *, op: str = op) -> Node:
            return pointwise(trace, op, input)

        row(*names)(same)
    for op, names in BINARY.items():

        def binary(trace: Trace, input: Value, other: Value, *, op: str = op) -> Node:
            dtype = result_dtype(input, other)
            if dtype == "bool" and op == "mul":
                return pointwise(trace, "bitwise_and", input, other)
            return pointwise(trace, op, input, other)

        row(*names)(binary)
    for op, names in FLOAT_BINARY.items():

        def float_binary(trace: Trace, input: Value, other: Value, *, op: str = op) -> Node:
            return pointwise(trace, op, input, other, dtype=float_dtype(result_dtype(input, other)))

        row(*names)(float_binary)
    for op, names in COMPARISONS.items():

        def comparison(trace: Trace, input: Value, other: Value, *, op: str = op) -> Node:
            dtype = result_dtype(input, other)
            return pointwise(trace, op, *(stored(trace, value, dtype) for value in (input, other)), result="bool")

        row(*names)(comparison)
    for op, names in (BITWISE | SHIFTS).items():

        def bits(trace: Trace, input: Value, other: Value, *, op: str = op) -> Node:
            dtype = result_dtype(input, other)
            if DTYPES[dtype].is_floating_point or (dtype == "bool" and op in SHIFTS):
                raise UnsupportedError(f"{op} is not defined for {dtype}")
            return pointwise(trace, op, input, other)

        row(*names)(bits)


_register()

# ------------------------------------------------------------------------------------------------------ arithmetic


def _scaled(trace: Trace, other: Value, alpha: Value, dtype: str) -> Value:
    """``alpha * other`` in ``dtype``, which ``alpha`` has no say in."""
    if type(alpha) in (int, bool) and alpha == 1:
        return other
    if symbols.kind_of(unwrap(alpha)) == "float" and not DTYPES[dtype].is_floating_point:
        raise TypeError(f"a float factor for {dtype} tensors")
    return pointwise(trace, "bitwise_and" if dtype == "bool" else "mul", other, alpha, dtype=dtype)


@row("add")
def add(trace: Trace, input: Value, other: Value, *, alpha: Value = 1) -> Node:
    dtype = result_dtype(input, other)
    return pointwise(trace, "bitwise_or" if dtype == "bool" else "add", input, _scaled(trace, other, alpha, dtype))


@row("sub", "subtract")
def sub(trace: Trace, input: Value, other: Value, *, alpha: Value = 1) -> Node:
    if any(value.dtype == "bool" if isinstance(value, Node) else isinstance(value, bool) for value in (input, other)):
        raise TypeError("subtraction is not defined for bool tensors, as in torch; use ^ or logical_xor")
    return pointwise(trace, "sub", input, _scaled(trace, other, alpha, result_dtype(input, other)))


@row("rsub", "__rsub__")
def rsub(trace: Trace, input: Value, other: Value, *, alpha: Value = 1) -> Node:
    return sub(trace, other, input, alpha=alpha)


@row("div", "divide", "true_divide")
def div(trace: Trace, input: Value, other: Value, *, rounding_mode: str | None = None) -> Node:
    dtype = result_dtype(input, other)
    if rounding_mode is None:
        return pointwise(trace, "div", input, other, dtype=float_dtype(dtype))
    if rounding_mode == "floor":
        return pointwise(trace, "floor_divide", input, other)
    if rounding_mode == "trunc":
        if DTYPES[dtype].is_floating_point:
            return pointwise(trace, "trunc", pointwise(trace, "div", input, other))
        return pointwise(trace, "trunc_divide", input, other)
    raise ValueError(f"rounding_mode must be None, 'trunc' or 'floor', not {rounding_mode!r}")


@row("positive", "__pos__", view=True)
def positive(trace: Trace, input: Node) -> Node:
    not_bool(input)
    return input


@row("detach", "alias", "requires_grad_", view=True)
def identity(trace: Trace, input: Node, *arguments: Any, **keywords: Any) -> Node:
    return input


@row("clone")
def clone(trace: Trace, input: Node, *, memory_format: Any = None) -> Node:
    return input


@row("contiguous", view=True)
def contiguous(trace: Trace, input: Node, memory_format: Any = torch.contiguous_format) -> Node:
    """A copy, laid out row-major where it is returned. torch returns the tensor itself where it is so already."""
    if memory_format is not torch.contiguous_format:
        raise UnsupportedError(f"memory format {memory_format} is not supported")
    return trace.make("cast", (input,), input.dtype, input.shape, CONTIGUOUS)


@row("fill", "zero")
def fill(trace: Trace, input: Node, value: Value = 0) -> Node:
    """In place only (``fill_``, ``zero_``) but for ``torch.fill``."""
    if isinstance(value, Node) and value.shape:
        raise TypeError("fill takes a number or a 0-d tensor")
    return expand_node(trace, operand(trace, value, input.dtype), input.shape)


@row("copy")
def copy(trace: Trace, input: Node, src: Node, non_blocking: bool = False) -> Node:
    """In place only: ``copy_``."""
    return expand(trace, trace.cast(src, input.dtype), broadcast_shapes(trace, input.shape, src.shape))


@row("square")
def square(trace: Trace, input: Node) -> Node:
    return power(trace, input, 2)


@row("float_power")
def float_power(trace: Trace, input: Value, exponent: Value) -> Node:
    return power(trace, *(trace.cast(as_node(trace, value), "float64") for value in (input, exponent)))


@row("pow")
def power(trace: Trace, input: Value, exponent: Value) -> Node:
    """Small constant exponents become products and roots, as in torch."""
    dtype = result_dtype(input, exponent)
    if is_constant(exponent) and isinstance(input, Node) and dtype != "bool":
        if exponent == 2:
            return pointwise(trace, "mul", input, input, dtype=dtype)
        if exponent == 3:
            return pointwise(trace, "mul", pointwise(trace, "mul", input, input, dtype=dtype), input, dtype=dtype)
        if not DTYPES[dtype].is_floating_point and exponent < 0:
            raise ValueError("integers to negative integer powers are not allowed")
        if DTYPES[dtype].is_floating_point:
            roots = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
            if exponent in roots:
                return pointwise(trace, roots[exponent], input, dtype=dtype)
            if exponent == -2:
                return pointwise(trace, "reciprocal", pointwise(trace, "mul", input, input, dtype=dtype), dtype=dtype)
    return pointwise(trace, "pow", input, exponent, dtype=dtype)


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


@row("frac")
def frac(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "sub", input, pointwise(trace, "trunc", input))


@row("deg2rad")
def deg2rad(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "mul", input, math.pi / 180, dtype=float_dtype(input.dtype))


@row("rad2deg")
def rad2deg(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "mul", input, 180 / math.pi, dtype=float_dtype(input.dtype))


@row("logit")
def logit(trace: Trace, input: Node, eps: float | None = None) -> Node:
    dtype = float_dtype(input.dtype)
    value = input if eps is None else clamp(trace, trace.cast(input, dtype), eps, 1 - eps)
    odds = pointwise(trace, "div", value, pointwise(trace, "sub", 1.0, value, dtype=dtype), dtype=dtype)
    return pointwise(trace, "log", odds)


@row("lerp")
@floats_only
def lerp(trace: Trace, input: Node, end: Node, weight: Value) -> Node:
    """From the nearer end, so that weight 1 gives ``end`` exactly; torch's formula."""
    span = pointwise(trace, "sub", end, input)
    low = pointwise(trace, "add", input, pointwise(trace, "mul", weight, span))
    rest = 1.0 - weight if is_number(weight) else pointwise(trace, "sub", 1.0, weight)
    high = pointwise(trace, "sub", end, pointwise(trace, "mul", span, rest))
    near = pointwise(trace, "lt", pointwise(trace, "abs", as_node(trace, weight)), 0.5, result="bool")
    return where(trace, near, low, high)


@row("addcmul")
def addcmul(trace: Trace, input: Node, tensor1: Node, tensor2: Node, *, value: Value = 1) -> Node:
    dtype = result_dtype(input, tensor1, tensor2)
    if dtype == "bool":
        raise TypeError("not defined for bool tensors")
    scaled = _scaled(trace, tensor1, value, dtype)
    return pointwise(trace, "add", input, pointwise(trace, "mul", scaled, tensor2, dtype=dtype), dtype=dtype)


@row("addcdiv")
def addcdiv(trace: Trace, input: Node, tensor1: Node, tensor2: Node, *, value: Value = 1) -> Node:
    if not DTYPES[result_dtype(tensor1, tensor2)].is_floating_point:
        raise UnsupportedError("integer division with addcdiv is not supported, as in torch")
    dtype = result_dtype(input, tensor1, tensor2)
    scaled = _scaled(trace, tensor1, value, dtype)
    return pointwise(trace, "add", input, pointwise(trace, "div", scaled, tensor2, dtype=dtype), dtype=dtype)


@row("hypot")
def hypot(trace: Trace, input: Node, other: Node) -> Node:
    """sqrt(a^2 + b^2), scaled by the larger so that neither square overflows."""
    first, second = (pointwise(trace, "abs", value) for value in (input, other))
    large, small = pointwise(trace, "maximum", first, second), pointwise(trace, "minimum", first, second)
    ratio = pointwise(trace, "div", small, large)
    root = pointwise(trace, "sqrt", pointwise(trace, "add", 1.0, pointwise(trace, "mul", ratio, ratio)))
    plain = pointwise(trace, "eq", large, 0.0, result="bool")
    infinite = pointwise(trace, "eq", large, math.inf, result="bool")
    either = pointwise(trace, "bitwise_or", plain, infinite)
    return where(trace, either, large, pointwise(trace, "mul", large, root))


@row("logaddexp")
def logaddexp(trace: Trace, input: Node, other: Node) -> Node:
    """max + log1p(exp(-|a - b|)); equal infinities stay what they are."""
    large = pointwise(trace, "maximum", input, other)
    gap = pointwise(trace, "neg", pointwise(trace, "abs", pointwise(trace, "sub", input, other)))
    total = pointwise(trace, "add", large, pointwise(trace, "log1p", pointwise(trace, "exp", gap)))
    equal = pointwise(trace, "eq", input, other, result="bool")
    infinite = pointwise(trace, "bitwise_and", equal, isinf(trace, as_node(trace, input)))
    return where(trace, infinite, large, total)


@row("xlogy")
def xlogy(trace: Trace, input: Value, other: Value) -> Node:
    dtype = float_dtype(result_dtype(input, other))
    product = pointwise(trace, "mul", input, pointwise(trace, "log", as_node(trace, other), dtype=dtype), dtype=dtype)
    zero = pointwise(trace, "eq", input, 0, result="bool")
    nan = isnan(trace, as_node(trace, other))
    return where(trace, nan, math.nan, where(trace, zero, 0.0, product))


# ----------------------------------------------------------------------------------------- comparison and selection


@row("isnan")
def isnan(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, False, "bool", input)
    return pointwise(trace, "isnan", input, result="bool")


@row("isinf")
def isinf(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, False, "bool", input)
    return pointwise(trace, "isinf", input, result="bool")


@row("isfinite")
def isfinite(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, True, "bool", input)
    return pointwise(trace, "lt", pointwise(trace, "abs", input), math.inf, result="bool")


@row("isposinf")
def isposinf(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "eq", input, math.inf, result="bool") if is_float(input) else isinf(trace, input)


@row("isneginf")
def isneginf(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "eq", input, -math.inf, result="bool") if is_float(input) else isinf(trace, input)


@row("signbit")
def signbit(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return pointwise(trace, "lt", input, 0, result="bool")
    return pointwise(trace, "signbit", input, result="bool")


@row("nan_to_num")
def nan_to_num(
    trace: Trace, input: Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Node:
    if not is_float(input):
        return input
    limits = torch.finfo(DTYPES[input.dtype])
    value = where(trace, isnan(trace, input), 0.0 if nan is None else nan, input)
    value = where(trace, isposinf(trace, input), limits.max if posinf is None else posinf, value)
    return where(trace, isneginf(trace, input), limits.min if neginf is None else neginf, value)


@row("fmin")
def fmin(trace: Trace, input: Node, other: Node) -> Node:
    floating = DTYPES[result_dtype(input, other)].is_floating_point
    return pointwise(trace, "fmin" if floating else "minimum", input, other)


@row("fmax")
def fmax(trace: Trace, input: Node, other: Node) -> Node:
    floating = DTYPES[result_dtype(input, other)].is_floating_point
    return pointwise(trace, "fmax" if floating else "maximum", input, other)


def expand_constant(trace: Trace, value: Any, dtype: str, like: Node) -> Node:
    """A tensor of ``like``'s shape that is ``value`` everywhere."""
    return expand_node(trace, operand(trace, value, dtype), like.shape)


def expand_node(trace: Trace, node: Node, shape: Shape) -> Node:
    """A 0-d ``node`` expanded to ``shape``."""
    return trace.make("view", (node,), node.dtype, shape, ("expand",)) if shape and not node.shape else node


def truth(trace: Trace, value: Value) -> Node:
    """``value != 0`` as bool."""
    node = as_node(trace, value)
    return node if node.dtype == "bool" else pointwise(trace, "ne", node, 0, result="bool")


@row("logical_not")
def logical_not(trace: Trace, input: Node) -> Node:
    return pointwise(trace, "bitwise_not", truth(trace, input))


@row("logical_and")
def logical_and(trace: Trace, input: Node, other: Node) -> Node:
    return pointwise(trace, "bitwise_and", truth(trace, input), truth(trace, other))


@row("logical_or")
def logical_or(trace: Trace, input: Node, other: Node) -> Node:
    return pointwise(trace, "bitwise_or", truth(trace, input), truth(trace, other))


@row("logical_xor")
def logical_xor(trace: Trace, input: Node, other: Node) -> Node:
    return pointwise(trace, "bitwise_xor", truth(trace, input), truth(trace, other))


@row("bitwise_not")
def bitwise_not(trace: Trace, input: Node) -> Node:
    if is_float(input):
        raise UnsupportedError(f"bitwise_not is not defined for {input.dtype}")
    return pointwise(trace, "bitwise_not", input)


@row("where")
def where(trace: Trace, condition: Node, input: Value = None, other: Value = None) -> Node:
    if input is None or other is None:
        raise UnsupportedError("torch.where with one argument has a result whose size depends on data")
    if condition.dtype not in ("bool", "uint8"):
        raise TypeError(f"where expects a bool condition, got {condition.dtype}")
    dtype = result_dtype(input, other)
    condition = truth(trace, condition)
    values = [value if isinstance(value, Node) else operand(trace, value, dtype) for value in (input, other)]
    shape = broadcast_shapes(trace, condition.shape, *(value.shape for value in values))
    operands = [expand(trace, condition, shape), *(expand(trace, trace.cast(v, dtype), shape) for v in values)]
    return trace.make("where", operands, dtype, shape)


@row("Tensor.where")
def tensor_where(trace: Trace, input: Node, condition: Node, other: Value) -> Node:
    return where(trace, condition, input, other)


@row("masked_fill")
def masked_fill(trace: Trace, input: Node, mask: Node, value: Value) -> Node:
    if isinstance(value, Node) and value.shape:
        raise TypeError("masked_fill takes a number or a 0-d tensor as its value")
    node = trace.cast(value, input.dtype) if isinstance(value, Node) else value
    shape = broadcast_shapes(trace, input.shape, mask.shape)
    filled = operand(trace, node, input.dtype)
    operands = [expand(trace, part, shape) for part in (truth(trace, mask), filled, input)]
    return trace.make("where", operands, input.dtype, shape)


@row("clamp", "clip")
def clamp(trace: Trace, input: Node, min: Value = None, max: Value = None) -> Node:
    if min is None and max is None:
        raise ValueError("clamp needs min, max or both")
    dtype = result_dtype(*(value for value in (input, min, max) if value is not None))
    if dtype == "bool" and min is not None and max is not None:
        raise TypeError("not defined for bool tensors")
    value = input
    if min is not None:
        value = pointwise(trace, "maximum", value, min, dtype=dtype)
    if max is not None:
        value = pointwise(trace, "minimum", value, max, dtype=dtype)
    return value


@row("clamp_min")
def clamp_min(trace: Trace, input: Node, min: Value) -> Node:
    return clamp(trace, input, min=min)


@row("clamp_max")
def clamp_max(trace: Trace, input: Node, max: Value) -> Node:
    return clamp(trace, input, max=max)


@row("heaviside")
def heaviside(trace: Trace, input: Node, values: Node) -> Node:
    positive = trace.cast(pointwise(trace, "gt", input, 0, result="bool"), input.dtype)
    step = where(trace, pointwise(trace, "eq", input, 0, result="bool"), values, positive)
    return where(trace, isnan(trace, input), 0.0, step) if is_float(input) else step


# ------------------------------------------------------------------------------------------------------------ casts

_CASTS = {"double": "float64", "float": "float32", "half": "float16", "bfloat16": "bfloat16", "long": "int64"}
_CASTS |= {"int": "int32", "short": "int16", "char": "int8", "byte": "uint8", "bool": "bool"}


def _register_casts() -> None:
    for name, dtype in _CASTS.items():

        def convert(trace: Trace, input: Node, *, dtype: str = dtype, memory_format: Any = None) -> Node:
            return trace.cast(input, dtype)

        row(name, view=True)(convert)


_register_casts()


@row("to", "type", view=True)
def to(trace: Trace, input: Node, *arguments: Any, **keywords: Any) -> Node:
    """Conversion of dtype; a device other than the inputs' is an error."""
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Node):
            input = trace.cast(input, value.dtype)
        elif isinstance(value, torch.dtype):
            input = trace.cast(input, dtype_name(value))
        elif isinstance(value, (torch.device, str, int)) and not isinstance(value, bool):
            wanted = torch.device(value)
            if wanted.type != trace.device.type or wanted.index not in (None, trace.device.index):
                raise UnsupportedError(f"moving a tensor from {trace.device} to {wanted} is not a kernel's work")
    return input


@row("type_as", view=True)
def type_as(trace: Trace, input: Node, other: Node) -> Node:
    return trace.cast(input, other.dtype)
