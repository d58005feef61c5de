"""Defines the rows of softmax and of the normalisations: reductions whose results are broadcast to what they reduced.

The formulas are the numerically stable ones: the maximum is subtracted before an exponential, and a variance is
computed from deviations from the mean.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.ir import symbols
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.graph import Node, Shape
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.movement import to_shape
from jitgen.trace.numbers import unwrap
from jitgen.trace.reductions import Dims, as_float, average, broadcast_like, dims_of, p_norm, reduce, squeeze_reduced
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import (
    broadcast_shapes,
    compare,
    filled,
    float_dtype,
    floats_only,
    one_dtype,
    pointwise,
    require_float,
    require_shape,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


# --------------------------------------------------------------------------------------------------------- softmax


def shifted(trace: Trace, input: Node, dims: Sequence[int]) -> Node:
    """Subtracts from ``input`` its maximum over ``dims``, which changes no result that is computed of it, and so no
    gradient."""
    top = trace.detached(reduce(trace, "max", input, dims))
    return pointwise(trace, "sub", input, broadcast_like(trace, top, input))


@row("softmax")
def softmax(trace: Trace, input: Node, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Node:
    input = as_float(trace, input, dtype)
    dims = dims_of(input, _softmax_dim(input, dim))
    if not dims:
        return pointwise(trace, "exp", pointwise(trace, "sub", input, input))
    powers = pointwise(trace, "exp", shifted(trace, input, dims))
    total = pointwise(trace, "reciprocal", reduce(trace, "sum", powers, dims))
    return pointwise(trace, "mul", powers, broadcast_like(trace, total, input))


@row("log_softmax")
def log_softmax(trace: Trace, input: Node, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Node:
    input = as_float(trace, input, dtype)
    dims = dims_of(input, _softmax_dim(input, dim))
    if not dims:
        return pointwise(trace, "sub", input, input)
    differences = shifted(trace, input, dims)
    total = pointwise(trace, "log", reduce(trace, "sum", pointwise(trace, "exp", differences), dims))
    return pointwise(trace, "sub", differences, broadcast_like(trace, total, input))


def _softmax_dim(input: Node, dim: Any) -> int:
    if dim is None:
        raise TypeError("softmax without dim is ambiguous; give dim=-1")
    return operator.index(dim)


@row("logsumexp")
def logsumexp(trace: Trace, input: Node, dim: Dims, keepdim: bool = False) -> Node:
    """Computes max + log(sum(exp(x - max))). An infinite maximum is not subtracted, since inf - inf is NaN."""
    input = trace.cast(input, float_dtype(input.dtype))
    dims = dims_of(input, dim)
    top = trace.detached(reduce(trace, "max", input, dims))
    finite = compare(trace, "lt", pointwise(trace, "abs", top), math.inf)
    base = where(trace, finite, top, 0.0)
    powers = pointwise(trace, "exp", pointwise(trace, "sub", input, broadcast_like(trace, base, input)))
    total = pointwise(trace, "log", reduce(trace, "sum", powers, dims))
    return squeeze_reduced(trace, pointwise(trace, "add", total, base), dims, keepdim)


# --------------------------------------------------------------------------------------------------- normalisations


def _normalized_dims(input: Node, normalized_shape: Any) -> tuple[int, ...]:
    sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    rank = len(input.shape)
    if len(sizes) > rank or not sizes:
        raise ValueError(f"normalized_shape {tuple(sizes)} does not fit a tensor of {rank} dimensions")
    return tuple(range(rank - len(sizes), rank))


def _check_normalized(trace: Trace, input: Node, normalized_shape: Any) -> tuple[int, ...]:
    dims = _normalized_dims(input, normalized_shape)
    sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    for dim, size in zip(dims, sizes, strict=True):
        if not trace.guards.equal(input.shape[dim], unwrap(size)):
            here = tuple(map(trace.guards.hint, input.shape))
            raise ValueError(f"normalized_shape {tuple(sizes)} does not fit the last dimensions of {here}")
    return dims


@row("rms_norm")
@floats_only
def rms_norm(
    trace: Trace, input: Node, normalized_shape: Any, weight: Node | None = None, eps: float | None = None
) -> Node:
    dims = _check_normalized(trace, input, normalized_shape)
    if weight is not None:
        require_shape(trace, weight, input.shape[dims[0] :], "the weight")
    # Without eps torch adds that of the dtype in which it computes.
    small = torch.finfo(DTYPES[accumulator_dtype(input.dtype)]).eps if eps is None else eps
    square = average(trace, pointwise(trace, "mul", input, input), dims)
    scale = pointwise(trace, "rsqrt", pointwise(trace, "add", square, small))
    normal = pointwise(trace, "mul", input, broadcast_like(trace, scale, input))
    return normal if weight is None else trace.cast(pointwise(trace, "mul", normal, weight), input.dtype)


@row("layer_norm")
@floats_only
def layer_norm(
    trace: Trace,
    input: Node,
    normalized_shape: Any,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Node:
    dims = _check_normalized(trace, input, normalized_shape)
    _check_parameters(trace, input, weight, bias, input.shape[dims[0] :])
    return _affine(trace, standardized(trace, input, dims, eps), weight, bias)


def standardized(trace: Trace, input: Node, dims: Sequence[int], eps: float) -> Node:
    """Normalises ``input`` to mean 0 and variance 1 over ``dims``."""
    deviation = pointwise(trace, "sub", input, broadcast_like(trace, average(trace, input, dims), input))
    variance = average(trace, pointwise(trace, "mul", deviation, deviation), dims)
    scale = pointwise(trace, "rsqrt", pointwise(trace, "add", variance, eps))
    return pointwise(trace, "mul", deviation, broadcast_like(trace, scale, input))


def _check_parameters(trace: Trace, input: Node, weight: Node | None, bias: Node | None, shape: Shape) -> None:
    """Refuses a weight or bias with another shape, or another dtype than ``input``, as torch does. On a CPU the
    parameters of a 16-bit input may be float32."""
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    mixed = trace.device.type == "cpu" and DTYPES[input.dtype].itemsize == 2
    one_dtype(
        *parameters, *(() if mixed and all(parameter.dtype == "float32" for parameter in parameters) else (input,))
    )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require_shape(trace, parameter, shape, f"the {name}")


def _affine(trace: Trace, normal: Node, weight: Node | None, bias: Node | None) -> Node:
    """Computes ``normal * weight + bias`` in the dtype of ``normal``."""
    result = normal if weight is None else pointwise(trace, "mul", normal, weight)
    result = result if bias is None else pointwise(trace, "add", result, bias)
    return trace.cast(result, normal.dtype)


@row("group_norm")
@floats_only
def group_norm(
    trace: Trace,
    input: Node,
    num_groups: Any,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Node:
    """Normalises ``input`` (N, C, ...) within groups of adjacent channels; weight and bias have shape (C,)."""
    groups = unwrap(num_groups)
    if len(input.shape) < 2:
        raise ValueError(f"group_norm takes (N, C, ...), got {len(input.shape)} dimensions")
    rows, channels, *spatial = input.shape
    if not trace.guards.equal(symbols.mod(channels, groups), 0):
        raise ValueError(f"{trace.guards.hint(channels)} channels cannot be divided into {num_groups} groups")
    _check_parameters(trace, input, weight, bias, (channels,))
    own = symbols.floordiv(channels, groups)
    # One dimension for the channels of a group, along which parameters differ, and one along which they do not.
    grouped = to_shape(trace, input, (rows, groups, own, symbols.product(spatial)))
    column = (groups, own, 1)
    scale, shift = (None if parameter is None else to_shape(trace, parameter, column) for parameter in (weight, bias))
    return to_shape(trace, _affine(trace, standardized(trace, grouped, (2, 3), eps), scale, shift), input.shape)


@row("normalize")
def normalize(trace: Trace, input: Node, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Node:
    require_float(input.dtype)
    dims = dims_of(input, dim)
    size = pointwise(trace, "maximum", p_norm(trace, input, p, dims), eps)
    return pointwise(trace, "div", input, broadcast_like(trace, size, input))


@row("cosine_similarity")
def cosine_similarity(trace: Trace, x1: Node, x2: Node, dim: Any = 1, eps: float = 1e-8) -> Node:
    """Computes ``sum(a * b)`` of the two vectors, each divided by its norm, or by ``eps`` if the norm is smaller."""
    shape = broadcast_shapes(trace, x1.shape, x2.shape)
    dtype = dtype_name(torch.promote_types(DTYPES[x1.dtype], DTYPES[x2.dtype]))  # 0-d tensors have full precedence
    require_float(dtype)
    sides = [filled(trace, trace.cast(side, dtype), shape) for side in (x1, x2)]
    dims = dims_of(sides[0], dim)
    norms = [pointwise(trace, "maximum", p_norm(trace, side, 2.0, dims), eps) for side in sides]
    scaled = [
        pointwise(trace, "div", side, broadcast_like(trace, size, side))
        for side, size in zip(sides, norms, strict=True)
    ]
    return squeeze_reduced(trace, reduce(trace, "sum", pointwise(trace, "mul", *scaled), dims), dims)
