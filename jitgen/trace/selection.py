"""Defines the rows of torch's tests, logic and selection: ``isnan``, ``logical_and``, ``where``, ``clamp``, ``tril``.

Comparisons such as ``eq`` are single operations; they are in the tables of ``trace/pointwise.py``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES
from jitgen.trace.movement import unsqueeze
from jitgen.trace.numbers import unwrap
from jitgen.trace.table import row
from jitgen.trace.typing import (
    Value,
    as_node,
    as_stored,
    broadcast_shapes,
    compare,
    element,
    expand,
    filled,
    is_float,
    is_number,
    one_dtype,
    operand,
    pointwise,
    readable,
    require_range,
    require_scalar_tensor,
    result_dtype,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


@row("isnan")
def isnan(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, False, "bool", input)
    return pointwise(trace, "isnan", readable(trace, input), result="bool")


@row("isinf")
def isinf(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, False, "bool", input)
    return pointwise(trace, "isinf", input, result="bool")


@row("isfinite")
def isfinite(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return expand_constant(trace, True, "bool", input)
    return compare(trace, "lt", pointwise(trace, "abs", input), math.inf)


def _is_infinite(trace: Trace, input: Node, *, infinity: float) -> Node:
    return compare(trace, "eq", input, infinity) if is_float(input) else isinf(trace, input)


isposinf, isneginf = partial(_is_infinite, infinity=math.inf), partial(_is_infinite, infinity=-math.inf)
row("isposinf")(isposinf)
row("isneginf")(isneginf)


@row("signbit")
def signbit(trace: Trace, input: Node) -> Node:
    if not is_float(input):
        return compare(trace, "lt", input, 0)
    return pointwise(trace, "signbit", input, result="bool")


@row("nan_to_num")
def nan_to_num(
    trace: Trace, input: Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Node:
    if not is_float(input):
        return input
    limits = torch.finfo(DTYPES[input.dtype])
    of_nan = as_stored(trace, 0.0 if nan is None else nan, input.dtype)
    of_most = as_stored(trace, limits.max if posinf is None else posinf, input.dtype)
    of_least = as_stored(trace, limits.min if neginf is None else neginf, input.dtype)
    value = where(trace, isnan(trace, input), of_nan, input)
    value = where(trace, isposinf(trace, input), of_most, value)
    return where(trace, isneginf(trace, input), of_least, value)


def _without_nan(trace: Trace, input: Node, other: Node, *, op: str, of_integers: str) -> Node:
    """Computes the extremum of two tensors by ``op``, which takes the other one of a NaN and a number."""
    floating = DTYPES[result_dtype(input, other)].is_floating_point
    return pointwise(trace, op if floating else of_integers, input, other)


row("fmin")(partial(_without_nan, op="fmin", of_integers="minimum"))
row("fmax")(partial(_without_nan, op="fmax", of_integers="maximum"))


def expand_constant(trace: Trace, value: Any, dtype: str, like: Node) -> Node:
    """Makes a tensor of ``like``'s shape, every element of which is ``value``."""
    return filled(trace, operand(trace, value, dtype), like.shape)


def truth(trace: Trace, value: Value) -> Node:
    """Computes ``value != 0`` as bool."""
    node = as_node(trace, value)
    return node if node.dtype == "bool" else compare(trace, "ne", node, 0)


row("logical_not")(lambda trace, input: pointwise(trace, "bitwise_not", truth(trace, input)))


def _logical(trace: Trace, input: Node, other: Node, *, op: str) -> Node:
    return pointwise(trace, op, truth(trace, input), truth(trace, other))


logical_and, logical_or = partial(_logical, op="bitwise_and"), partial(_logical, op="bitwise_or")
row("logical_and")(logical_and)
row("logical_or")(logical_or)
row("logical_xor")(partial(_logical, op="bitwise_xor"))


@row("bitwise_not")
def bitwise_not(trace: Trace, input: Node) -> Node:
    if is_float(input):
        raise UnsupportedError(
            f"bitwise_not is not defined for {input.dtype}, as in torch; convert to integers, with .long() say"
        )
    return pointwise(trace, "bitwise_not", input)


CHOSEN_ROWS = (
    "; rows that belong to experts are multiplied by all of them in one torch._grouped_mm, after a sort by expert "
    '(transformers: experts_implementation="grouped_mm")'
)
"""What to do instead of a loop over experts that picks the rows of each."""


@row("nonzero")
def nonzero(trace: Trace, input: Node, as_tuple: Any = False) -> Node:
    raise UnsupportedError(
        "nonzero has a result whose size depends on data; keep the shape, with torch.where(condition, a, b), or call "
        f"it outside of the decorated function{CHOSEN_ROWS}"
    )


@row("where")
def where(trace: Trace, condition: Node, input: Value = None, other: Value = None) -> Node:
    if input is None or other is None:
        raise UnsupportedError(
            "torch.where with one argument has a result whose size depends on data; keep the shape, with "
            f"torch.where(condition, a, b), or call it outside of the decorated function{CHOSEN_ROWS}"
        )
    if condition.dtype not in ("bool", "uint8"):
        raise TypeError(f"where expects a bool condition, got {condition.dtype}")
    dtype = result_dtype(input, other)
    for value in (input, other):
        require_scalar_tensor(trace, value, dtype)
    condition = truth(trace, condition)
    values = [value if isinstance(value, Node) else operand(trace, value, dtype) for value in (input, other)]
    shape = broadcast_shapes(trace, condition.shape, *(value.shape for value in values))
    operands = [expand(trace, condition, shape), *(expand(trace, trace.cast(v, dtype), shape) for v in values)]
    return trace.make("where", operands, dtype, shape)


row("Tensor.where")(lambda trace, input, condition, other: where(trace, condition, input, other))


@row("masked_fill")
def masked_fill(trace: Trace, input: Node, mask: Node, value: Value) -> Node:
    if isinstance(value, Node) and value.shape:
        raise TypeError("masked_fill takes a number or a 0-d tensor as its value")
    if mask.dtype != "bool":
        raise TypeError(f"masked_fill expects a bool mask, got {mask.dtype}")
    shape = broadcast_shapes(trace, input.shape, mask.shape)
    replacement = element(trace, value, input.dtype)
    operands = [expand(trace, node, shape) for node in (truth(trace, mask), replacement, input)]
    return trace.make("where", operands, input.dtype, shape)


def clamped(trace: Trace, input: Node, min: Value, max: Value, flat_ends: bool = False) -> Node:
    """Clamps ``input`` between ``min`` and ``max``, either of which may be None.

    Args:
        flat_ends: whether no gradient flows to an element that is equal to a bound, as in ``relu6``.
    """
    if min is None and max is None:
        raise ValueError("clamp needs min, max or both")
    dtype = result_dtype(*(value for value in (input, min, max) if value is not None))
    bounds = [bound for bound in (min, max) if bound is not None]
    if dtype == "bool" and (len(bounds) == 2 or not isinstance(bounds[0], Node)):
        raise TypeError("not defined for bool tensors")
    for bound in bounds:
        require_range(trace, bound, dtype)
    value = input
    if trace.differentiable and any(isinstance(operand, Node) and is_float(operand) for operand in (input, min, max)):
        # A minimum or maximum would give half the gradient to an element that is equal to a bound.
        if isinstance(min, Node) and isinstance(max, Node) and is_float(min):  # of equal bounds, neither has a gradient
            min = where(trace, compare(trace, "lt", min, max), min, trace.detached(min))
        for bound, beyond in ((min, "le" if flat_ends else "lt"), (max, "ge" if flat_ends else "gt")):
            if bound is not None:
                chosen = pointwise(trace, beyond, value, bound, result="bool")
                if isinstance(bound, Node) and is_float(bound):  # a bound that is NaN is the result
                    chosen = logical_or(trace, chosen, isnan(trace, bound))
                elif is_number(bound) and math.isnan(trace.guards.hint(unwrap(bound))):  # require_range guards it
                    chosen = expand_constant(trace, True, "bool", value)
                value = where(trace, chosen, bound, value)
        if not flat_ends:  # a NaN has no gradient either
            value = where(trace, isnan(trace, value), trace.detached(value), value)
        return trace.cast(value, dtype)
    if min is not None:
        value = pointwise(trace, "maximum", value, min, dtype=dtype)
    if max is not None:
        value = pointwise(trace, "minimum", value, max, dtype=dtype)
    return value


@row("clamp", "clip")
def clamp(trace: Trace, input: Node, min: Value = None, max: Value = None) -> Node:
    return clamped(trace, input, min, max)


row("clamp_min")(lambda trace, input, min: clamped(trace, input, min, None))
row("clamp_max")(lambda trace, input, max: clamped(trace, input, None, max))


@row("heaviside")
def heaviside(trace: Trace, input: Node, values: Node) -> Node:
    one_dtype(input, values)
    positive = trace.cast(compare(trace, "gt", input, 0), input.dtype)
    step = where(trace, compare(trace, "eq", input, 0), values, positive)
    return where(trace, isnan(trace, input), 0.0, step) if is_float(input) else step


def _triangle(trace: Trace, input: Node, diagonal: Any = 0, *, comparison: str) -> Node:
    """Keeps the elements of ``input`` for which column - row compares with ``diagonal``, and sets the others to 0; in
    the last two dimensions."""
    if len(input.shape) < 2:
        raise ValueError(f"a triangle is of a matrix, got {len(input.shape)} dimensions")
    rows, columns = input.shape[-2:]
    column = trace.make("iota", (), "int64", (columns,), (0,))
    line = unsqueeze(trace, trace.make("iota", (), "int64", (rows,), (0,)), 1)
    inside = pointwise(trace, comparison, pointwise(trace, "sub", column, line), diagonal, result="bool")
    return where(trace, inside, input, operand(trace, 0, input.dtype))


row("tril")(partial(_triangle, comparison="le"))
row("triu")(partial(_triangle, comparison="ge"))
