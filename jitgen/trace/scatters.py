"""Defines the rows of functions that write a tensor at computed indices: ``scatter``, ``index_add``, ``index_put``,
assignment to a part of a tensor, and their likes.

Each becomes one ``scatter`` node (``ir/scatters.py``), or several where torch's function is composed of them; values
are combined in float32 at least. Assignment through a mask is a ``where``, of the view that the rest of the key makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir.body import compute_dtype
from jitgen.ir.custom_gradients import EXCLUDED_BASE
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import VIEW
from jitgen.spec import DTYPES
from jitgen.trace.contents import is_numpy
from jitgen.trace.derivatives import marked, with_gradient
from jitgen.trace.gathers import Chosen, along, at_least_1d, first_elements, from_end, require_index
from jitgen.trace.indexing import refuse_nested, viewed_by
from jitgen.trace.movement import dimension, flatten, squeezed, to_shape, unsqueeze
from jitgen.trace.numbers import SymbolicBool
from jitgen.trace.pieces import placed
from jitgen.trace.reductions import sum_
from jitgen.trace.selection import expand_constant, where
from jitgen.trace.table import row
from jitgen.trace.typing import (
    broadcast_shapes,
    compare,
    element,
    expand,
    filled,
    is_float,
    one_dtype,
    operand,
    pointwise,
    require_range,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Movements = Sequence[tuple[Any, Shape]]
_REDUCTIONS = {"sum": "sum", "add": "sum", "mean": "sum", "prod": "prod", "multiply": "prod", "amax": "max"}
_REDUCTIONS |= {"amin": "min"}
"""torch's names of reductions, and the kind of scatter that each takes."""


def scattered(
    trace: Trace,
    base: Node,
    value: Node,
    indices: Sequence[Node],
    coordinates: Sequence[int],
    kind: str = "set",
    movements: Movements = (),
) -> Node:
    """Replaces the elements of ``base`` at ``coordinates`` by ``value``, or combines them with it; see
    ``ir/scatters.py``.

    Args:
        value: of the base's dtype; the indices are broadcast to its shape.
    """
    dtype = base.dtype if kind == "set" else compute_dtype(base.dtype)
    value = filled(trace, value, value.shape) if value.kind.is_number else value
    if kind == "set" and not indices and tuple(coordinates) == tuple(range(len(value.shape))):

        def write(node: Node, new: Node, path: Movements) -> Node:
            return scattered(trace, node, new, (), range(len(new.shape)), movements=path)

        joined = placed(trace, base, trace.cast(value, dtype), movements, write)
        if joined is not None:
            return _read_nothing_of(trace, joined, value) if 0 in value.shape else joined
    operands = [trace.cast(base, dtype), trace.cast(value, dtype)]
    operands += [expand(trace, trace.cast(index, "int64"), value.shape) for index in indices]
    attrs = (kind, tuple(coordinates), tuple(movements))
    return trace.cast(trace.make("scatter", operands, dtype, base.shape, attrs), base.dtype)


def _read_nothing_of(trace: Trace, result: Node, value: Node) -> Node:
    """Gives ``value``, no element of which is in ``result``, a gradient of zeros, as torch does."""
    return with_gradient(trace, result, result, 1.0, sum_(trace, value), 0.0)


def _dims_but(rank: int, dim: int) -> list[int]:
    return [-1 if other == dim else other for other in range(rank)]


def _shaped_as(trace: Trace, input: Node, result: Node) -> Node:
    """Returns ``result``, which has one dimension, in the shape of an ``input`` that may have none."""
    return result if input.shape else squeezed(trace, result, 0)


# ----------------------------------------------------------------------------------------------- along one dimension


@row("scatter")
def scatter(
    trace: Trace, input: Node, dim: int, index: Node, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Node:
    source = value if src is None else src
    if reduce not in (None, "add", "multiply"):
        raise ValueError("reduce argument must be either add or multiply")
    return _scatter(trace, input, dim, index, source, _REDUCTIONS[reduce] if reduce else "set")


row("scatter_add")(lambda trace, input, dim, index, src: _scatter(trace, input, dim, index, src, "sum"))


def _scatter(trace: Trace, input: Node, dim: Any, index: Node, source: Any, kind: str) -> Node:
    require_index(index)
    at, base, index = dimension(input, dim), at_least_1d(trace, input), at_least_1d(trace, index)
    ranks = {len(base.shape), len(index.shape), *([len(source.shape)] if isinstance(source, Node) else [])}
    if isinstance(source, Node) and not source.kind.is_number:
        one_dtype(input, source)
    if len(ranks) > 1 and any(trace.guards.equal(size, 0) for size in index.shape):  # nothing is written, as in torch
        result = trace.copy(input, input.dtype)
        return _read_nothing_of(trace, result, source) if isinstance(source, Node) else result
    if isinstance(source, Node) and not (source.kind.is_number and index.shape):
        one_dtype(input, source)
        source = first_elements(trace, at_least_1d(trace, source), index.shape, -1, "src")
    else:
        source = filled(trace, element(trace, source, input.dtype), index.shape)
    first_elements(trace, base, index.shape, at, "input")
    return _shaped_as(trace, input, scattered(trace, base, source, [index], _dims_but(len(base.shape), at), kind))


@row("scatter_reduce")
def scatter_reduce(
    trace: Trace, input: Node, dim: int, index: Node, src: Node, reduce: str, *, include_self: bool = True
) -> Node:
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        raise ValueError(f"reduce argument must be sum, prod, mean, amax or amin, not {reduce}")

    def combine(base: Node, source: Any, kind: str) -> Node:
        return _scatter(trace, base, dim, index, source, kind)

    return _reduced(trace, input, src, reduce, include_self, combine)


@row("index_reduce")
def index_reduce(
    trace: Trace, input: Node, dim: int, index: Node, source: Node, reduce: str, *, include_self: bool = True
) -> Node:
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise ValueError(f"reduce argument must be prod, mean, amax or amin, not {reduce}")

    _require_scalars_agree(input, source)

    def combine(base: Node, value: Any, kind: str) -> Node:
        return _along(trace, base, dim, index, value, kind)

    return _reduced(trace, input, source, reduce, include_self, combine)


def _reduced(trace: Trace, input: Node, source: Node, reduce: str, include_self: bool, combine: Any) -> Node:
    """Reduces ``input`` with ``source``; ``combine(base, source, kind)`` is the scatter."""
    kind, base = _REDUCTIONS[reduce], input
    if not include_self:
        base = combine(input, _identity(reduce, input.dtype), "set")
    wide = compute_dtype(input.dtype)
    base = trace.cast(base, wide)
    if not include_self and kind in ("max", "min"):
        base = marked(trace, base, EXCLUDED_BASE)
    result = combine(base, trace.cast(source, wide), kind)
    if reduce == "mean":
        count = combine(expand_constant(trace, int(include_self), "int64", input), 1, "sum")
        count = pointwise(trace, "maximum", count, 1)
        if is_float(input):
            result = pointwise(trace, "div", result, trace.cast(count, wide))
        else:
            result = pointwise(trace, "floor_divide", result, trace.cast(count, wide))
    return trace.cast(result, input.dtype)


def _identity(reduce: str, dtype: str) -> Any:
    """Returns the number that is neutral in a reduction."""
    if reduce in ("sum", "mean", "prod"):
        return 1 if reduce == "prod" else 0
    if dtype == "bool":
        return reduce == "amin"
    if DTYPES[dtype].is_floating_point:
        return float("-inf") if reduce == "amax" else float("inf")
    limits = torch.iinfo(DTYPES[dtype])
    return limits.min if reduce == "amax" else limits.max


@row("index_add")
def index_add(trace: Trace, input: Node, dim: int, index: Node, source: Node, *, alpha: Any = 1) -> Node:
    require_range(trace, alpha, input.dtype)
    _require_scalars_agree(input, source)
    if alpha != 1:
        wide = compute_dtype(source.dtype)
        source = pointwise(trace, "mul", trace.cast(source, wide), operand(trace, alpha, wide))
        return trace.cast(_along(trace, trace.cast(input, wide), dim, index, source, "sum"), input.dtype)
    return _along(trace, input, dim, index, source, "sum")


@row("index_copy")
def index_copy(trace: Trace, input: Node, dim: int, index: Node, source: Node) -> Node:
    require_index(index, "int64")
    if not source.shape and (len(input.shape) > 1 or not all(trace.guards.equal(size, 1) for size in index.shape)):
        raise ValueError(
            "a source without dimensions is copied to one element of a tensor of one dimension, as in torch"
        )
    return _along(trace, input, dim, index, source, "set")


def _require_scalars_agree(input: Node, source: Node) -> None:
    if bool(source.shape) != bool(input.shape):
        raise ValueError("a source without dimensions is for a tensor without dimensions, and no other is, as in torch")


@row("index_fill")
def index_fill(trace: Trace, input: Node, dim: int, index: Node, value: Any) -> Node:
    require_index(index, "int64")
    if isinstance(value, Node) and value.shape:
        raise ValueError("index_fill takes a number or a 0-d tensor as its value")
    base = at_least_1d(trace, input)
    from_behind = from_end(trace, at_least_1d(trace, index), base.shape[dimension(input, dim)])
    value = element(trace, value, input.dtype)
    result = _along(trace, input, dim, from_behind, value, "set", everywhere=True)
    if not (trace.differentiable and is_float(value) and not value.kind.is_number):
        return result
    written = _along(trace, expand_constant(trace, False, "bool", input), dim, from_behind, True, "set")
    return with_gradient(trace, result, where(trace, written, value, input), 1.0)  # once of equal indices


def _along(
    trace: Trace, input: Node, dim: Any, index: Node, source: Any, kind: str, *, everywhere: bool = False
) -> Node:
    """Replaces slices of ``input`` along ``dim`` by those of ``source``, or by a number, or combines them with it.

    Args:
        everywhere: whether a ``source`` without dimensions is for all slices, however many there are.
    """
    require_index(index)
    if len(index.shape) > 1:
        raise IndexError("the index must have at most one dimension")
    at, base, index = dimension(input, dim), at_least_1d(trace, input), at_least_1d(trace, index)
    shape = (*base.shape[:at], index.shape[0], *base.shape[at + 1 :])
    if isinstance(source, Node) and not everywhere and (source.shape or not input.shape):
        one_dtype(input, source)
        source = at_least_1d(trace, source)
        here, wanted = (tuple(map(trace.guards.hint, sizes)) for sizes in (source.shape, shape))
        if here != wanted:
            raise ValueError(f"the source has shape {here}, expected {wanted}")
        for size, other in zip(source.shape, shape, strict=True):
            trace.guards.equal(size, other)
        source = expand(trace, source, shape)
    else:
        if isinstance(source, Node) and not source.kind.is_number:
            one_dtype(input, source)
        source = filled(trace, element(trace, source, input.dtype), shape)
    rank = len(base.shape)
    result = scattered(trace, base, source, [along(trace, index, at, rank)], _dims_but(rank, at), kind)
    return _shaped_as(trace, input, result)


@row("put")
def put(trace: Trace, input: Node, index: Node, source: Node, accumulate: bool = False) -> Node:
    require_index(index, "int64")
    one_dtype(input, source)
    flat = flatten(trace, input)
    number = from_end(trace, flatten(trace, index), flat.shape[0])
    value = to_shape(trace, source, number.shape)
    result = scattered(trace, flat, value, [number], (-1,), "sum" if accumulate else "set")
    return to_shape(trace, result, input.shape)


# --------------------------------------------------------------------------------------------------------- assignment


@row("index_put", "_unsafe_index_put")
def index_put(trace: Trace, input: Node, indices: Any, values: Any, accumulate: bool = False) -> Node:
    one_dtype(input, values)
    key = tuple(slice(None) if index is None else index for index in indices)
    return _assigned(trace, input, key, values, "sum" if accumulate else "set")


@row("setitem", "__setitem__", inplace=True)
def setitem(trace: Trace, input: Node, key: Any, value: Any) -> Node:
    """Returns the new value of ``input`` after ``input[key] = value``."""
    refuse_nested(key)
    return _assigned(trace, input, key if isinstance(key, tuple) else (key,), value, "set")


def _assigned(trace: Trace, input: Node, key: tuple[Any, ...], value: Any, kind: str) -> Node:
    rounds = is_float(input) and DTYPES[input.dtype].itemsize == 2  # torch makes a float32 of the number first
    value = (operand if rounds else element)(trace, value, input.dtype)
    masks = [item for item in key if isinstance(item, Node) and item.dtype in ("bool", "uint8")]
    if masks:
        return _masked(trace, input, key, masks[0], value, kind)
    viewed, by_dim = viewed_by(trace, input, key)
    if viewed is value and not by_dim and kind == "set":
        return input  # an update of a view has changed it already: x[0] += 1 is x[0] = x[0].__iadd__(1)
    movements = movements_from(input, viewed)
    assert movements is not None
    if by_dim:
        chosen = Chosen(trace, viewed.shape, by_dim)
        shape, coordinates, indices = chosen.shape, chosen.coordinates, chosen.indices
    else:
        shape, coordinates, indices = viewed.shape, tuple(range(len(viewed.shape))), []
    return scattered(trace, input, _fitted(trace, value, shape), indices, coordinates, kind, movements)


def _fitted(trace: Trace, value: Node, shape: Shape) -> Node:
    """Broadcasts ``value`` to ``shape``, without leading dimensions of size 1 that ``shape`` lacks."""
    if value.kind.is_number:
        return filled(trace, value, shape)
    value = _without_leading_ones(trace, value, len(shape))
    if broadcast_shapes(trace, value.shape, shape) != shape and len(value.shape) > len(shape):
        raise ValueError("the value has more dimensions than the part that it is assigned to")
    for size, wanted in zip(reversed(value.shape), reversed(shape), strict=False):
        if trace.guards.hint(size) not in (1, trace.guards.hint(wanted)):
            raise ValueError(
                f"a value of {trace.guards.hint(size)} elements is assigned to {trace.guards.hint(wanted)}"
            )
    return expand(trace, value, shape)


def _without_leading_ones(trace: Trace, value: Node, rank: int) -> Node:
    """Drops leading dimensions of size 1, as long as ``value`` has more than ``rank`` dimensions."""
    while len(value.shape) > rank and trace.guards.equal(value.shape[0], 1):
        value = squeezed(trace, value, 0)
    return value


def movements_from(source: Node, viewed: Node) -> Movements | None:
    """Returns the movements that lead from ``source`` to a view of it; None if it is no such view."""
    movements: list[tuple[Any, ...]] = []
    while viewed is not source:
        if viewed.kind is not VIEW:
            return None
        movements.append((viewed.attrs, viewed.shape))
        viewed = viewed.inputs[0]
    return tuple(reversed(movements))


def _masked(trace: Trace, input: Node, key: tuple[Any, ...], mask: Node, value: Node, kind: str) -> Node:
    """Assigns through a mask, the only tensor of the key, to what the rest of the key is a view of."""
    first = next(number for number, item in enumerate(key) if item is mask)
    key = tuple(item.tolist() if is_numpy(item) else item for item in key)
    before, behind = key[:first], key[first + 1 :]
    if any(isinstance(item, (Node, list, tuple, range, bool, SymbolicBool)) for item in before + behind):
        raise UnsupportedError(
            "assignment through a mask beside other tensors, lists or bools takes an index for each true element, and "
            "how many these are depends on data; make one mask of all, such as rows[:, None] & columns"
        )
    viewed, _ = viewed_by(trace, input, (*before, *(slice(None) for _ in mask.shape), *behind))
    if Ellipsis in before:
        rest = sum(not _is_number(item) for item in behind)
        at = len(viewed.shape) - rest - len(mask.shape)
    else:
        at = sum(not _is_number(item) for item in before)
        rest = len(viewed.shape) - at - len(mask.shape)
    for size, other in zip(mask.shape, viewed.shape[at:], strict=False):
        if not trace.guards.equal(size, other):
            raise IndexError("the mask has another shape than the dimensions that it indexes")
    chosen = compare(trace, "ne", mask, 0) if mask.dtype == "uint8" else mask
    for _ in range(rest):
        chosen = unsqueeze(trace, chosen, len(chosen.shape))
    value = _for_each(trace, value, len(mask.shape), at, rest)
    new = _fitted(trace, value, viewed.shape) if value.shape else value
    new = where(trace, chosen, pointwise(trace, "add", viewed, new) if kind == "sum" else new, viewed)
    if viewed is input:
        return new
    movements = movements_from(input, viewed)
    assert movements is not None
    return scattered(trace, input, new, (), range(len(new.shape)), movements=movements)


def _for_each(trace: Trace, value: Node, masked: int, at: int, rest: int) -> Node:
    """Returns a value for all true elements of a mask, as one that broadcasts to what the mask chooses of.

    Args:
        masked: how many dimensions the mask has, in whose place an assigned value has one.
        at: how many dimensions are before them.
        rest: how many are behind them.
    """
    value = _without_leading_ones(trace, value, max(rest, 0))
    if len(value.shape) <= rest:
        return value
    dim = len(value.shape) - rest - 1
    if dim > at or not trace.guards.equal(value.shape[dim], 1):
        raise UnsupportedError(
            "assignment through a mask takes as many rows of the value as the mask has true elements, which depends on "
            "data; assign a number, or use torch.where with a value of the tensor's shape"
        )
    return to_shape(trace, value, (*value.shape[:dim], *(1,) * masked, *value.shape[dim + 1 :]))


def _is_number(item: Any) -> bool:
    """Returns whether an index that is no tensor selects one element, and so leaves no dimension."""
    return not (item is None or item is Ellipsis or isinstance(item, slice))


@row("slice_scatter")
def slice_scatter(
    trace: Trace, input: Node, src: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Node:
    key = (slice(None),) * dimension(input, dim) + (slice(start, end, step),)
    return _assigned(trace, input, key, src, "set")


@row("select_scatter")
def select_scatter(trace: Trace, input: Node, src: Node, dim: int, index: Any) -> Node:
    return _assigned(trace, input, (slice(None),) * dimension(input, dim) + (index,), src, "set")
