"""Defines the rows of torch's activation functions, composed of pointwise operations.

The formulas are torch's (``aten/src/ATen/native/Activation.h``) where values at infinities, NaN and thresholds matter,
and otherwise the most accurate form. GELU, for example, is computed with erfc, since 1 + erf cancels the digits of its
negative tail.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.trace.derivatives import derived
from jitgen.trace.indexing import chunk
from jitgen.trace.movement import dimension
from jitgen.trace.pointwise import div
from jitgen.trace.selection import clamped, where
from jitgen.trace.table import row
from jitgen.trace.typing import (
    compare,
    float_dtype,
    floats_only,
    is_float,
    not_bool,
    one_dtype,
    pointwise,
    require_computable,
    require_range,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@row("relu")
def relu(trace: Trace, input: Node, inplace: bool = False) -> Node:
    not_bool(input)
    if trace.differentiable:  # no gradient flows where the input is 0
        return clamped(trace, input, 0, None, flat_ends=True)
    return pointwise(trace, "maximum", input, 0)


@row("relu6")
def relu6(trace: Trace, input: Node, inplace: bool = False) -> Node:
    not_bool(input)
    return clamped(trace, input, 0, 6, flat_ends=True)


@row("F.hardtanh_", inplace=True)
@row("_nn.hardtanh")
def hardtanh(trace: Trace, input: Node, min_val: float = -1.0, max_val: float = 1.0) -> Node:
    if not is_float(input):
        not_bool(input)
        min_val, max_val = int(min_val), int(max_val)
        if input.dtype == "uint8" and min_val < 0:
            raise ValueError("negative limits for an unsigned tensor")
    return clamped(trace, input, min_val, max_val, flat_ends=True)


@row("leaky_relu")
@floats_only
def leaky_relu(trace: Trace, input: Node, negative_slope: float = 0.01, inplace: bool = False) -> Node:
    require_computable(trace, negative_slope, input.dtype)
    return where(trace, compare(trace, "gt", input, 0), input, pointwise(trace, "mul", input, negative_slope))


@row("elu")
@floats_only
def elu(
    trace: Trace, input: Node, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Node:
    for number in (alpha, scale, input_scale):
        require_computable(trace, number, input.dtype)
    scaled = input if input_scale == 1.0 else pointwise(trace, "mul", input, input_scale)
    negative = pointwise(trace, "mul", pointwise(trace, "expm1", scaled), alpha * scale)
    positive = input if scale == 1.0 else pointwise(trace, "mul", input, scale)
    is_positive = compare(trace, "gt", input, 0)
    value = where(trace, is_positive, positive, negative)

    def slopes(value: Node) -> list[Node]:  # of a NaN, as of positive numbers
        power = pointwise(trace, "exp", where(trace, compare(trace, "ge", input, 0), 0, scaled))
        falling = pointwise(trace, "mul", power, alpha * scale * input_scale)
        return [where(trace, compare(trace, "le", input, 0), falling, scale)]

    return derived(trace, value, [input], slopes)


@row("selu")
@floats_only
def selu(trace: Trace, input: Node, inplace: bool = False) -> Node:
    return elu(trace, input, _SELU_ALPHA, _SELU_SCALE)


@row("celu")
@floats_only
def celu(trace: Trace, input: Node, alpha: float = 1.0, inplace: bool = False) -> Node:
    if alpha == 0:
        raise ZeroDivisionError("celu: alpha must not be 0")
    return elu(trace, input, alpha, 1.0, 1.0 / alpha)


@row("softplus")
@floats_only
def softplus(trace: Trace, input: Node, beta: float = 1.0, threshold: float = 20.0) -> Node:
    for number in (beta, threshold):
        require_computable(trace, number, input.dtype)
    scaled = pointwise(trace, "mul", input, beta)
    smooth = pointwise(trace, "div", pointwise(trace, "log1p", pointwise(trace, "exp", scaled)), beta)
    is_linear = compare(trace, "gt", scaled, threshold)
    value = where(trace, is_linear, input, smooth)
    return derived(trace, value, [input], lambda _: [where(trace, is_linear, 1.0, pointwise(trace, "sigmoid", scaled))])


row("softsign")(lambda trace, input: div(trace, input, pointwise(trace, "add", pointwise(trace, "abs", input), 1)))


@row("logsigmoid", "log_sigmoid")
@floats_only
def logsigmoid(trace: Trace, input: Node) -> Node:
    """Computes min(x, 0) - log1p(exp(-|x|)), whose exponential does not overflow."""
    tail = pointwise(trace, "exp", pointwise(trace, "neg", pointwise(trace, "abs", input)))
    return pointwise(trace, "sub", pointwise(trace, "minimum", input, 0), pointwise(trace, "log1p", tail))


@row("silu")
@floats_only
def silu(trace: Trace, input: Node, inplace: bool = False) -> Node:
    """Computes x * sigmoid(x): a dialect may have a better sigmoid than a division (``Dialect.coarse``)."""
    gate = pointwise(trace, "sigmoid", input)

    def slopes(value: Node) -> list[Node]:
        rest = pointwise(trace, "mul", input, pointwise(trace, "sub", 1.0, gate))
        return [pointwise(trace, "mul", gate, pointwise(trace, "add", 1.0, rest))]

    return derived(trace, pointwise(trace, "mul", input, gate), [input], slopes)


@row("mish")
@floats_only
def mish(trace: Trace, input: Node, inplace: bool = False) -> Node:
    factor = pointwise(trace, "tanh", softplus(trace, input))

    def slopes(value: Node) -> list[Node]:
        rest = pointwise(trace, "sub", 1.0, pointwise(trace, "mul", factor, factor))
        rest = pointwise(trace, "mul", pointwise(trace, "sigmoid", input), rest)
        return [pointwise(trace, "add", factor, pointwise(trace, "mul", input, rest))]

    return derived(trace, pointwise(trace, "mul", input, factor), [input], slopes)


@row("gelu")
@floats_only
def gelu(trace: Trace, input: Node, approximate: str = "none") -> Node:
    """Computes x / 2 * erfc(-sqrt(1/2) x), or for torch's approximation by tanh x * sigmoid(2 u), which is
    x / 2 * (1 + tanh u) without the digits that this sum cancels where x is negative."""
    if approximate == "none":
        half = pointwise(trace, "mul", input, 0.5)
        tail = pointwise(trace, "erfc", pointwise(trace, "mul", input, -math.sqrt(0.5)))
        return pointwise(trace, "mul", half, tail)
    if approximate == "tanh":
        cube = pointwise(trace, "mul", pointwise(trace, "mul", input, input), input)
        inner = pointwise(trace, "add", input, pointwise(trace, "mul", cube, 0.044715))
        gate = pointwise(trace, "sigmoid", pointwise(trace, "mul", inner, math.sqrt(8 / math.pi)))
        return pointwise(trace, "mul", input, gate)
    raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")


@row("hardsigmoid")
@floats_only
def hardsigmoid(trace: Trace, input: Node, inplace: bool = False) -> Node:
    value = pointwise(trace, "div", _ramp(trace, input), 6)
    inside = compare(trace, "lt", pointwise(trace, "abs", input), 3)
    return derived(trace, value, [where(trace, inside, input, 0)], lambda _: [1 / 6])


@row("hardswish")
@floats_only
def hardswish(trace: Trace, input: Node, inplace: bool = False) -> Node:
    value = pointwise(trace, "div", pointwise(trace, "mul", input, _ramp(trace, input)), 6)

    def slopes(value: Node) -> list[Node]:
        rising = pointwise(trace, "add", pointwise(trace, "div", input, 3), 0.5)
        return [where(trace, compare(trace, "lt", input, 3), rising, 1.0)]

    return derived(trace, value, [where(trace, compare(trace, "le", input, -3), 0, input)], slopes)


def _ramp(trace: Trace, input: Node) -> Node:
    """Computes 0 up to -3, 6 from 3 on, and rises between."""
    return clamped(trace, pointwise(trace, "add", input, 3), 0, 6, flat_ends=True)


@row("tanhshrink")
def tanhshrink(trace: Trace, input: Node) -> Node:
    not_bool(input)
    return pointwise(trace, "sub", input, pointwise(trace, "tanh", input, dtype=float_dtype(input.dtype)))


@row("hardshrink")
@floats_only
def hardshrink(trace: Trace, input: Node, lambd: float = 0.5) -> Node:
    require_range(trace, lambd, input.dtype)
    small = compare(trace, "le", pointwise(trace, "abs", input), lambd)
    return where(trace, small, 0, input)


@row("softshrink")
@floats_only
def softshrink(trace: Trace, input: Node, lambd: float = 0.5) -> Node:
    require_range(trace, lambd, input.dtype)
    if lambd < 0:
        raise ValueError(f"lambda must not be negative, but is {lambd}")
    above = where(trace, compare(trace, "gt", input, lambd), pointwise(trace, "sub", input, lambd), 0)
    below = where(trace, compare(trace, "lt", input, -lambd), pointwise(trace, "add", input, lambd), above)
    return where(trace, pointwise(trace, "isnan", input, result="bool"), input, below)


@row("threshold", "_threshold")
def threshold(trace: Trace, input: Node, threshold: float, value: float, inplace: bool = False) -> Node:
    require_computable(trace, threshold, input.dtype)
    require_range(trace, value, input.dtype)
    if not is_float(input):
        not_bool(input)
        threshold, value = int(threshold), int(value)
    return where(trace, compare(trace, "le", input, threshold), value, input)


@row("glu")
@floats_only
def glu(trace: Trace, input: Node, dim: int = -1) -> Node:
    size = input.shape[dimension(input, dim)]
    if not trace.guards.equal(symbols.mod(size, 2), 0):
        raise ValueError(f"glu halves a dimension, which has {trace.guards.hint(size)} elements here")
    values, gates = chunk(trace, input, 2, dim)
    return pointwise(trace, "mul", values, pointwise(trace, "sigmoid", gates))


@row("prelu")
@floats_only
def prelu(trace: Trace, input: Node, weight: Node) -> Node:
    one_dtype(input, weight)
    if weight.shape not in ((), (1,)):
        shape = (*weight.shape, *(1,) * (len(input.shape) - 2))
        channels = trace.make("view", (weight,), weight.dtype, shape, ("reshape",))
    else:
        channels = weight if not weight.shape else trace.make("view", (weight,), weight.dtype, (), ("squeeze", 0))
    is_positive = compare(trace, "gt", input, 0)
    value = where(trace, is_positive, input, pointwise(trace, "mul", input, channels))
    read = where(trace, is_positive, 0, channels)  # where a weight has a gradient
    return derived(trace, value, [input, read], lambda _: [where(trace, is_positive, 1.0, channels), input])
