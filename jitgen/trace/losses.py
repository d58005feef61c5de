"""Rows of torch's losses, composed of pointwise operations and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES
from jitgen.trace.activations import logsigmoid
from jitgen.trace.movement import unsqueeze
from jitgen.trace.reductions import average, reduce, squeeze_reduced
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import expand, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


combine = reduce
"""``reduce``, for rows where torch's argument of that name hides it."""


def reduced(trace: Trace, loss: Node, reduction: str) -> Node:
    """``loss`` reduced over all dimensions, as ``reduction`` (``"none"``, ``"sum"`` or ``"mean"``) says.

    torch's deprecated ``size_average`` and ``reduce`` are parameters of no row (``trace/binding.py``).
    """
    dims = tuple(range(len(loss.shape)))
    if reduction == "none":
        return loss
    if reduction == "sum":
        return squeeze_reduced(trace, reduce(trace, "sum", loss, dims), dims)
    if reduction != "mean":
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', not {reduction!r}")
    return squeeze_reduced(trace, average(trace, loss, dims), dims)


def _target_minus(trace: Trace, input: Node, target: Node, subtrahend: Node) -> Node:
    """For each row, its element at index ``target`` minus ``subtrahend``; 0 where the index is out of range.

    The element is found by a masked sum, which a kernel computes while it reads the row for other reductions.

    Args:
        input: (..., classes).
        target: (..., 1).
        subtrahend: (..., 1).
    """
    dim = len(input.shape) - 1
    classes = input.shape[dim]
    least, most = (pointwise(trace, op, target, end, result="bool") for op, end in (("ge", 0), ("lt", classes)))
    in_range = pointwise(trace, "bitwise_and", least, most, result="bool")
    # Every element of the row compares its index; a comparison of 32 bits is half the work of one of 64.
    narrow = trace.guards.decide(symbols.compare("le", classes, torch.iinfo(torch.int32).max))
    index_dtype = "int32" if narrow else "int64"
    index = trace.cast(where(trace, in_range, target, -1), index_dtype)
    column = trace.make("iota", (), index_dtype, (classes,), (0,))
    mask = pointwise(trace, "eq", expand(trace, column, input.shape), expand(trace, index, input.shape), result="bool")
    picked = combine(trace, "sum", where(trace, mask, input, 0.0), (dim,))
    return where(trace, in_range, pointwise(trace, "sub", picked, subtrahend), 0.0)


@row("cross_entropy")
def cross_entropy(
    trace: Trace,
    input: Node,
    target: Node,
    weight: Node | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Node:
    """For logits of shape (rows, classes) or (classes,), and a target of class indices."""
    if weight is not None or len(input.shape) > 2 or DTYPES[target.dtype].is_floating_point:
        raise UnsupportedError("cross_entropy takes (rows, classes) logits and class indices, without weights")
    dim = len(input.shape) - 1
    label = unsqueeze(trace, trace.cast(target, "int64"), len(target.shape))
    top = combine(trace, "max", input, (dim,))
    shifted = pointwise(trace, "sub", input, expand(trace, top, input.shape))
    total = pointwise(trace, "log", combine(trace, "sum", pointwise(trace, "exp", shifted), (dim,)))
    loss = pointwise(trace, "sub", total, _target_minus(trace, input, label, top))
    if label_smoothing:
        uniform = pointwise(trace, "sub", total, average(trace, shifted, (dim,)))
        scaled = pointwise(trace, "mul", loss, 1.0 - label_smoothing)
        loss = pointwise(trace, "add", scaled, pointwise(trace, "mul", uniform, label_smoothing))
    counted = pointwise(trace, "ne", label, ignore_index, result="bool")
    loss = squeeze_reduced(trace, where(trace, counted, loss, 0.0), (dim,))
    if reduction != "mean":
        return reduced(trace, loss, reduction, (size_average, reduce))
    total_loss = reduced(trace, loss, "sum", (size_average, reduce))
    rows = trace.cast(squeeze_reduced(trace, counted, (dim,)), loss.dtype)
    return pointwise(trace, "div", total_loss, reduced(trace, rows, "sum"))


# ------------------------------------------------------------------------------------------------------- differences


def _difference(trace: Trace, input: Node, target: Node, weight: Node | None = None) -> Node:
    if weight is not None:
        raise UnsupportedError("a loss with weights is not supported; take reduction='none' and multiply")
    return pointwise(trace, "sub", input, target)


def _huber(trace: Trace, difference: Node, delta: float) -> Node:
    """Half the square of a difference up to ``delta``, and beyond it a line of slope ``delta``."""
    size = pointwise(trace, "abs", difference)
    near = pointwise(trace, "mul", pointwise(trace, "mul", difference, difference), 0.5)
    far = pointwise(trace, "mul", pointwise(trace, "sub", size, 0.5 * delta), delta)
    return where(trace, pointwise(trace, "lt", size, delta, result="bool"), near, far)


@row("mse_loss")
def mse_loss(
    trace: Trace,
    input: Node,
    target: Node,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Node | None = None,
) -> Node:
    difference = _difference(trace, input, target, weight)
    return reduced(trace, pointwise(trace, "mul", difference, difference), reduction, (size_average, reduce))


@row("l1_loss")
def l1_loss(
    trace: Trace,
    input: Node,
    target: Node,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Node | None = None,
) -> Node:
    size = pointwise(trace, "abs", _difference(trace, input, target, weight))
    return reduced(trace, size, reduction, (size_average, reduce))


@row("huber_loss")
def huber_loss(
    trace: Trace, input: Node, target: Node, reduction: str = "mean", delta: float = 1.0, weight: Node | None = None
) -> Node:
    return reduced(trace, _huber(trace, _difference(trace, input, target, weight), delta), reduction)


@row("smooth_l1_loss")
def smooth_l1_loss(
    trace: Trace,
    input: Node,
    target: Node,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Node:
    """The Huber loss divided by ``beta``; the absolute difference where ``beta`` is 0."""
    if beta == 0:
        return l1_loss(trace, input, target, size_average, reduce, reduction)
    smooth = pointwise(trace, "div", _huber(trace, _difference(trace, input, target), beta), beta)
    return reduced(trace, smooth, reduction, (size_average, reduce))


@row("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    trace: Trace,
    input: Node,
    target: Node,
    weight: Node | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Node | None = None,
) -> Node:
    """``(1 - target) * input - logsigmoid(input)``, a form that does not overflow."""
    if weight is not None or pos_weight is not None:
        raise UnsupportedError("a loss with weights is not supported; take reduction='none' and multiply")
    missed = pointwise(trace, "mul", pointwise(trace, "sub", 1, target), input)
    loss = pointwise(trace, "sub", missed, logsigmoid(trace, input))
    return reduced(trace, loss, reduction, (size_average, reduce))
