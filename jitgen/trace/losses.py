"""Rows of torch's losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES
from jitgen.trace.activations import logsigmoid
from jitgen.trace.movement import unsqueeze
from jitgen.trace.reductions import average, kept, reduce
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import expand, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


combine = reduce
"""``reduce``, where torch has an argument of that name."""


def reduced(trace: Trace, loss: Node, reduction: str, legacy: tuple[Any, Any] = (None, None)) -> Node:
    """``loss`` as ``reduction`` asks: ``"none"``, ``"sum"`` or ``"mean"``.

    ``legacy`` are torch's deprecated ``size_average`` and ``reduce``, which are refused.
    """
    if any(option is not None for option in legacy):
        raise UnsupportedError("size_average and reduce are not supported; use reduction='none', 'sum' or 'mean'")
    dims = tuple(range(len(loss.shape)))
    if reduction == "none":
        return loss
    if reduction == "sum":
        return kept(trace, combine(trace, "sum", loss, dims), dims, False)
    if reduction != "mean":
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', not {reduction!r}")
    return kept(trace, average(trace, loss, dims), dims, False)


def _chosen_less(trace: Trace, input: Node, chosen: Node, less: Node) -> Node:
    """The element at ``chosen``, (rows, 1), of each row less ``less``; 0 where the row has none there.

    It is picked as a masked sum over the row, beside what else the row is read for.
    """
    dim = len(input.shape) - 1
    classes = input.shape[dim]
    least, most = (pointwise(trace, op, chosen, end, result="bool") for op, end in (("ge", 0), ("lt", classes)))
    known = pointwise(trace, "bitwise_and", least, most, result="bool")
    # Places are compared as often as a row has elements: in 32 bits that is half the work.
    narrow = trace.guards.decide(symbols.compare("le", classes, torch.iinfo(torch.int32).max))
    index = "int32" if narrow else "int64"
    place = trace.cast(where(trace, known, chosen, -1), index)
    column = trace.make("iota", (), index, (classes,), (0,))
    here = pointwise(trace, "eq", expand(trace, column, input.shape), expand(trace, place, input.shape), result="bool")
    picked = combine(trace, "sum", where(trace, here, input, 0.0), (dim,))
    return where(trace, known, pointwise(trace, "sub", picked, less), 0.0)


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
    """Class indices over the last of (rows, classes), or (classes,)."""
    if weight is not None or len(input.shape) > 2 or DTYPES[target.dtype].is_floating_point:
        raise UnsupportedError("cross_entropy takes (rows, classes) logits and class indices, without weights")
    dim = len(input.shape) - 1
    chosen = unsqueeze(trace, trace.cast(target, "int64"), len(target.shape))
    top = combine(trace, "max", input, (dim,))
    apart = pointwise(trace, "sub", input, expand(trace, top, input.shape))
    total = pointwise(trace, "log", combine(trace, "sum", pointwise(trace, "exp", apart), (dim,)))
    loss = pointwise(trace, "sub", total, _chosen_less(trace, input, chosen, top))
    if label_smoothing:
        even = pointwise(trace, "sub", total, average(trace, apart, (dim,)))
        kept_part = pointwise(trace, "mul", loss, 1.0 - label_smoothing)
        loss = pointwise(trace, "add", kept_part, pointwise(trace, "mul", even, label_smoothing))
    counted = pointwise(trace, "ne", chosen, ignore_index, result="bool")
    loss = kept(trace, where(trace, counted, loss, 0.0), (dim,), False)
    if reduction != "mean":
        return reduced(trace, loss, reduction, (size_average, reduce))
    total_loss = reduced(trace, loss, "sum", (size_average, reduce))
    rows = trace.cast(kept(trace, counted, (dim,), False), loss.dtype)
    return pointwise(trace, "div", total_loss, reduced(trace, rows, "sum"))


# ------------------------------------------------------------------------------------------------------- differences


def _apart(trace: Trace, input: Node, target: Node, weight: Node | None = None) -> Node:
    if weight is not None:
        raise UnsupportedError("a loss with weights is not supported; take reduction='none' and multiply")
    return pointwise(trace, "sub", input, target)


def _huber(trace: Trace, apart: Node, delta: float) -> Node:
    """Half the square up to ``delta``, a line of slope ``delta`` beyond."""
    size = pointwise(trace, "abs", apart)
    near = pointwise(trace, "mul", pointwise(trace, "mul", apart, apart), 0.5)
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
    apart = _apart(trace, input, target, weight)
    return reduced(trace, pointwise(trace, "mul", apart, apart), reduction, (size_average, reduce))


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
    size = pointwise(trace, "abs", _apart(trace, input, target, weight))
    return reduced(trace, size, reduction, (size_average, reduce))


@row("huber_loss")
def huber_loss(
    trace: Trace, input: Node, target: Node, reduction: str = "mean", delta: float = 1.0, weight: Node | None = None
) -> Node:
    return reduced(trace, _huber(trace, _apart(trace, input, target, weight), delta), reduction)


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
    """Huber's loss over ``beta``; the absolute difference where ``beta`` is 0."""
    if beta == 0:
        return l1_loss(trace, input, target, size_average, reduce, reduction)
    smooth = pointwise(trace, "div", _huber(trace, _apart(trace, input, target), beta), beta)
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
    """``(1 - target) * input - logsigmoid(input)``, the form that overflows nowhere."""
    if weight is not None or pos_weight is not None:
        raise UnsupportedError("a loss with weights is not supported; take reduction='none' and multiply")
    missed = pointwise(trace, "mul", pointwise(trace, "sub", 1, target), input)
    loss = pointwise(trace, "sub", missed, logsigmoid(trace, input))
    return reduced(trace, loss, reduction, (size_average, reduce))
