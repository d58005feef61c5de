"""Defines the rows of torch's reductions: sums, products, extrema, and what is composed of them.

Every row is composed of ``reduce`` nodes, whose reduced dimensions remain with size 1, and of pointwise nodes. Which of
them share a kernel is decided later, by the reduction family (``families/rows/reduction/claim.py``). The formulas are
the numerically stable ones: a variance is computed from deviations from the mean, an exponential after subtracting the
maximum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.custom_gradients import PRODUCT_OF_ALL
from jitgen.ir.graph import Node, one_along, reduced_dims
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.derivatives import derived, marked, shared, with_gradient
from jitgen.trace.gathers import gather
from jitgen.trace.movement import dimensions, flatten, squeezed, unsqueeze
from jitgen.trace.numbers import unwrap
from jitgen.trace.pointwise import power
from jitgen.trace.selection import truth, where
from jitgen.trace.table import row
from jitgen.trace.typing import as_node, compare, expand, operand, pointwise, require_float

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Dims = Any  # None, an int, or a sequence of ints


def dims_of(input: Node, dim: Dims) -> tuple[int, ...]:
    """Returns the dimensions that torch's argument ``dim`` names: all of them for None or ()."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(len(input.shape)))
    chosen = dimensions(input, dim)
    return tuple(sorted(chosen)) if input.shape else ()


def reduce(trace: Trace, kind: str, input: Node, dims: Sequence[int], dtype: str | None = None) -> Node:
    """Reduces ``input`` by ``kind`` (of ``ir.graph.REDUCTIONS``) over ``dims``, which remain with size 1."""
    dtype = dtype or input.dtype
    dims = reduced_dims(kind, dims, input.shape)
    if not dims:
        if kind in ("argmax", "argmin"):
            return expand(trace, operand(trace, 0, "int64"), input.shape)
        return trace.cast(input, dtype)
    shape = one_along(input.shape, dims)
    return trace.make("reduce", (input,), dtype, shape, (kind, tuple(dims)))


def squeeze_reduced(trace: Trace, node: Node, dims: Sequence[int], keepdim: bool = False) -> Node:
    """Removes the dimensions ``dims`` of a reduction, unless ``keepdim``."""
    for dim in () if keepdim else reversed(dims):
        node = squeezed(trace, node, dim)
    return node


def broadcast_like(trace: Trace, node: Node, input: Node) -> Node:
    """Broadcasts ``node``, a reduction of ``input``, to the shape of ``input``."""
    return expand(trace, node, input.shape)


def count(input: Node, dims: Sequence[int]) -> Any:
    """Counts the elements that a reduction over ``dims`` combines."""
    return symbols.product(input.shape[dim] for dim in dims)


def as_float(trace: Trace, input: Node, dtype: torch.dtype | None = None) -> Node:
    name = dtype_name(dtype) if dtype is not None else input.dtype
    if dtype is None and not DTYPES[name].is_floating_point:
        raise TypeError(f"expected a floating tensor or dtype=, got {input.dtype}; as in torch")
    return trace.cast(input, name)


def _nonempty(trace: Trace, input: Node, dims: Sequence[int]) -> None:
    """Refuses to reduce nothing; that there is something becomes a guard."""
    if any(trace.guards.equal(input.shape[dim], 0) for dim in dims):
        raise IndexError("expected the reduced dimensions to have a size other than 0")


# ---------------------------------------------------------------------------------------------------- plain reductions


@row("sum")
def sum_(trace: Trace, input: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    return _accumulated(trace, "sum", input, dim, keepdim, dtype)


def _accumulated(trace: Trace, kind: str, input: Node, dim: Dims, keepdim: bool, dtype: Any) -> Node:
    dims = dims_of(input, dim)
    input = trace.cast(input, _accumulated_dtype(input, dtype))
    return squeeze_reduced(trace, reduce(trace, kind, input, dims), dims, keepdim)


def _accumulated_dtype(input: Node, dtype: torch.dtype | None) -> str:
    """Returns the dtype of a sum or product: ``dtype``, else that of ``input``, or int64 of integers and bool."""
    return dtype_name(dtype) if dtype else input.dtype if DTYPES[input.dtype].is_floating_point else "int64"


@row("mean")
def mean(trace: Trace, input: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    input, dims = as_float(trace, input, dtype), dims_of(input, dim)
    return squeeze_reduced(trace, average(trace, input, dims), dims, keepdim)


def average(trace: Trace, input: Node, dims: Sequence[int]) -> Node:
    return pointwise(trace, "div", reduce(trace, "sum", input, dims), _number(count(input, dims)))


def _number(value: Any) -> Any:
    return symbols.mul(value, 1.0)


@row("prod")
def prod(trace: Trace, input: Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    if dim is not None or not input.shape:
        return _accumulated(trace, "prod", input, dim, keepdim, dtype)
    input = trace.cast(input, _accumulated_dtype(input, dtype))
    if all(size == 1 for size in input.shape):  # one element has the gradient of a product, not of a copy
        input = flatten(trace, input)
    dims = dims_of(input, None)
    return squeeze_reduced(trace, reduce(trace, "prod", marked(trace, input, PRODUCT_OF_ALL), dims), dims)


def _extremum(
    trace: Trace, input: Node, dim: Dims = (), keepdim: bool = False, *, kind: str, dtype: str | None = None
) -> Node:
    """Reduces by ``kind``, an extremum, which nothing has none of."""
    dims = dims_of(input, dim)
    _nonempty(trace, input, dims)
    return squeeze_reduced(trace, reduce(trace, kind, input, dims, dtype), dims, keepdim)


amax, amin = row("amax")(partial(_extremum, kind="max")), row("amin")(partial(_extremum, kind="min"))


@row("aminmax")
def aminmax(trace: Trace, input: Node, *, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.return_types.aminmax((amin(trace, input, dim, keepdim), amax(trace, input, dim, keepdim)))


def _extreme(trace: Trace, input: Node, dim: Any = None, keepdim: bool = False, *, other: Any = None, kind: str) -> Any:
    """Finds the extremum of all elements; (values, indices) along ``dim``; or the extremum of two tensors where one is
    ``other`` or in the place of ``dim``. Where gradients are computed the values are gathered: of equal elements the
    one that the index names has the gradient, as in torch. A reduction's is divided among them."""
    if dim is None and other is None:
        return _extremum(trace, shared(trace, input), kind=kind)
    other = dim if other is None else other
    if isinstance(other, Node):
        return pointwise(trace, f"{kind}imum", input, other)
    index = _arg(trace, input, dim, keepdim, kind=f"arg{kind}")
    dims = dims_of(input, operator.index(dim))
    if trace.differentiable and dims and DTYPES[input.dtype].is_floating_point:
        values = gather(trace, input, dims[0], index if keepdim else unsqueeze(trace, index, dims[0]))
    else:
        values = reduce(trace, kind, input, dims)
    return getattr(torch.return_types, kind)((squeeze_reduced(trace, values, dims, keepdim), index))


for _kind in ("max", "min"):
    row(_kind)(partial(_extreme, kind=_kind))


def _arg(trace: Trace, input: Node, dim: Any = None, keepdim: bool = False, *, kind: str) -> Node:
    if dim is not None:
        return _extremum(trace, input, operator.index(dim), keepdim, kind=kind, dtype="int64")
    _nonempty(trace, input, range(len(input.shape)))
    index = squeeze_reduced(trace, reduce(trace, kind, flatten(trace, input), (0,), "int64"), (0,))
    for dim in range(len(input.shape) if keepdim else 0):
        index = unsqueeze(trace, index, dim)
    return index


for _kind in ("argmax", "argmin"):
    row(_kind)(partial(_arg, kind=_kind))


def _reduced_truth(trace: Trace, input: Node, dim: Dims = None, keepdim: bool = False, *, kind: str) -> Node:
    """Computes any or all, a bool, which torch has as uint8 for a uint8 input."""
    dims = dims_of(input, dim)
    result = reduce(trace, kind, truth(trace, input), dims)
    return squeeze_reduced(trace, trace.cast(result, "uint8" if input.dtype == "uint8" else "bool"), dims, keepdim)


for _kind in ("any", "all"):
    row(_kind)(partial(_reduced_truth, kind=_kind))


row("count_nonzero")(lambda trace, input, dim=None: sum_(trace, trace.cast(truth(trace, input), "int64"), dim))


# ------------------------------------------------------------------------------------------------- variance and norms


def _variance(trace: Trace, input: Node, dim: Dims, correction: Any) -> tuple[Node, Node]:
    """Computes (variance, mean). The variance is computed from deviations from the mean; dimensions remain with size
    1."""
    dims, whole = dims_of(input, dim), dim is None or not input.shape
    require_float(input.dtype)
    middle = average(trace, input, dims)
    deviation = pointwise(trace, "sub", input, broadcast_like(trace, middle, input))
    total = reduce(trace, "sum", pointwise(trace, "mul", deviation, deviation), dims)
    number = count(input, dims)
    decided = [trace.guards.decide(symbols.compare("gt", number, least)) for least in (0, unwrap(correction))]
    if all(decided):
        freedom = symbols.sub(_number(number), float(correction))
        value = pointwise(trace, "div", total, freedom)
        # torch's formula: the mean has no part in it, so that an infinite element leaves the others finite deviations.

        def slopes(value: Node) -> list[Node]:
            return [pointwise(trace, "div", pointwise(trace, "mul", deviation, 2.0), freedom)]

        return derived(trace, value, [input], slopes), middle
    zero = trace.cast(as_node(trace, 0.0), total.dtype)
    if trace.differentiable:
        return _without_freedom(
            trace, input, deviation, dims, symbols.sub(_number(number), float(correction)), whole
        ), middle
    return pointwise(trace, "div", total, zero), middle


def _without_freedom(
    trace: Trace, input: Node, deviation: Node, dims: Sequence[int], freedom: Any, whole: bool
) -> Node:
    """Computes the variance of ``input`` from deviations if ``freedom``, the degrees of freedom, is at most 0:
    infinite, with eager torch's gradients. These are infinite by the sign of the deviation, finite along ``dims`` for a
    freedom below 0, and +inf everywhere for a reduction of a ``whole`` tensor. None flows through the mean, whose
    gradient is 0: it would be a sum of infinities of both signs."""
    zero = trace.cast(as_node(trace, 0.0), deviation.dtype)
    value = trace.detached(deviation)
    moves = pointwise(trace, "sub", input, trace.detached(input))  # 0, and a gradient of 1
    if whole:
        value = pointwise(trace, "abs", value)
    moved = pointwise(trace, "add", value, moves)
    total = reduce(trace, "sum", pointwise(trace, "mul", moved, moved), dims)
    if whole or trace.guards.equal(freedom, 0):
        return pointwise(trace, "div", total, zero)
    infinite = trace.detached(pointwise(trace, "div", total, zero))
    moves = pointwise(trace, "sub", total, trace.detached(total))
    return pointwise(trace, "add", pointwise(trace, "div", moves, freedom), infinite)


def _correction(unbiased: Any, correction: Any) -> Any:
    if correction is not None:
        return correction
    return 1 if unbiased is None or unbiased else 0


def _dim_and_unbiased(dim: Any, unbiased: Any) -> tuple[Any, Any]:
    """Tells ``dim`` from ``unbiased`` in ``torch.var``'s second argument, which is ``unbiased`` if it is a bool."""
    return (None, dim) if isinstance(dim, bool) else (dim, unbiased)


@row("var")
def var(
    trace: Trace, input: Node, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Node:
    dim, unbiased = _dim_and_unbiased(dim, unbiased)
    dims = dims_of(input, dim)
    return squeeze_reduced(trace, _variance(trace, input, dim, _correction(unbiased, correction))[0], dims, keepdim)


@row("std")
def std(
    trace: Trace, input: Node, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Node:
    return _root(trace, var(trace, input, dim, unbiased, keepdim, correction=correction))


@row("var_mean")
def var_mean(
    trace: Trace, input: Node, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Node, Node]:
    dim, unbiased = _dim_and_unbiased(dim, unbiased)
    dims = dims_of(input, dim)
    variance = _variance(trace, input, dim, _correction(unbiased, correction))
    return tuple(squeeze_reduced(trace, node, dims, keepdim) for node in variance)  # type: ignore[return-value]


@row("std_mean")
def std_mean(
    trace: Trace, input: Node, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Node, Node]:
    variance, middle = var_mean(trace, input, dim, unbiased, keepdim, correction=correction)
    return _root(trace, variance), middle


def _root(trace: Trace, total: Node) -> Node:
    """Computes the square root of a sum of squares. Where that is 0 its gradient is 0, as that of eager torch's norm
    and std."""
    if trace.differentiable:
        total = where(trace, compare(trace, "eq", total, 0), trace.detached(total), total)
    return pointwise(trace, "sqrt", total)


def p_norm(trace: Trace, input: Node, p: Any, dims: Sequence[int]) -> Node:
    """Computes the vector norm over ``dims``, which remain with size 1."""
    if p == "nuc":
        raise UnsupportedError(
            "the matrix norm 'nuc' needs singular values, which no kernel computes; compute it outside of "
            "the decorated function, or take p='fro'"
        )
    p = 2.0 if p in (None, "fro") else float(p)
    size = pointwise(trace, "abs", input)
    if p == math.inf:
        return reduce(trace, "max", shared(trace, size), dims)
    if p == -math.inf:
        return reduce(trace, "min", shared(trace, size), dims)
    if p == 0:
        count = reduce(trace, "sum", trace.cast(truth(trace, input), input.dtype), dims)
        return with_gradient(trace, count, input, 0.0)
    if p == 1:
        return reduce(trace, "sum", size, dims)
    if p == 2:
        total = reduce(trace, "sum", pointwise(trace, "mul", input, input), dims)
        return _root(trace, total)
    total = reduce(trace, "sum", pointwise(trace, "pow", size, p), dims)
    value = pointwise(trace, "pow", total, 1.0 / p)
    return derived(trace, value, [input], lambda norm: [_norm_slope(trace, input, norm, p)])


def _norm_slope(trace: Trace, input: Node, norm: Node, p: float) -> Node:
    """Computes the derivative of a norm: ``sign(x) |x|^(p - 1) norm^(1 - p)``, and 0 where the norm is 0.

    Below p = 1 it is 0 where x is 0, too, as eager torch has it.
    """
    is_zero = compare(trace, "eq", input, 0)
    size = where(trace, is_zero, 1.0, pointwise(trace, "abs", input))
    if p < 2:
        scaled = pointwise(trace, "mul", pointwise(trace, "sign", input), power(trace, size, p - 1))
    else:
        scaled = pointwise(trace, "mul", input, power(trace, size, p - 2))
    without = compare(trace, "eq", norm, 0)
    factor = where(trace, without, 0.0, power(trace, where(trace, without, 1.0, norm), 1 - p))
    return pointwise(trace, "mul", scaled, broadcast_like(trace, factor, input))


@row("norm")
def norm(trace: Trace, input: Node, p: Any = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Node:
    input, dims = as_float(trace, input, dtype), dims_of(input, dim)
    return squeeze_reduced(trace, p_norm(trace, input, p, dims), dims, keepdim)


@row("linalg_vector_norm", "vector_norm")
def vector_norm(
    trace: Trace, x: Node, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Node:
    return norm(trace, x, ord, dim, keepdim, dtype=dtype)
