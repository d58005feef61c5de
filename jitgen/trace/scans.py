"""Defines the rows of torch's cumulative functions: each is a ``scan`` node along one dimension.

Integers and bool are added and multiplied as int64, as in torch. What bool has extrema of are the numbers 0 and 1.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.movement import dimension, narrowed, unsqueeze
from jitgen.trace.table import row
from jitgen.trace.typing import operand, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def scan(trace: Trace, kind: str, input: Node, dim: int, dtype: str | None = None) -> Node:
    """Scans ``input`` by ``kind`` along ``dim``; the results are of ``dtype``."""
    return trace.make("scan", (input,), dtype or input.dtype, input.shape, (kind, dim, False))


def _accumulated(trace: Trace, input: Node, dim: Any = None, *, dtype: Any = None, kind: str) -> Node:
    if dtype is not None:
        to = dtype_name(dtype)
    else:
        to = input.dtype if DTYPES[input.dtype].is_floating_point else "int64"
    if to == "bool" or to.startswith("float8"):
        raise UnsupportedError(f"cum{kind} of {to} is not implemented, in torch neither; convert it, with .float() say")
    along = dimension(input, dim)
    return scan(trace, kind, trace.cast(input, to), along) if input.shape else trace.copy(input, to)


cumsum = row("cumsum")(partial(_accumulated, kind="sum"))
row("cumprod")(partial(_accumulated, kind="prod"))


def _extremum(trace: Trace, input: Node, dim: Any, *, kind: str) -> Any:
    """Finds the running extremum: (values, indices)."""
    result = getattr(torch.return_types, f"cum{kind}")
    if input.dtype.startswith("float8"):
        raise UnsupportedError(
            f"cum{kind} of {input.dtype} is not implemented, in torch neither; convert it, with .float() say"
        )
    along = dimension(input, dim)
    if not input.shape:
        return result((trace.copy(input, input.dtype), operand(trace, 0, "int64")))
    number = trace.cast(input, "uint8" if input.dtype == "bool" else input.dtype)
    values = trace.cast(scan(trace, kind, number, along), input.dtype)
    return result((values, scan(trace, f"arg{kind}", number, along, "int64")))


row("cummax")(partial(_extremum, kind="max"))
row("cummin")(partial(_extremum, kind="min"))


@row("logcumsumexp")
def logcumsumexp(trace: Trace, input: Node, dim: Any) -> Node:
    if not DTYPES[input.dtype].is_floating_point or input.dtype.startswith("float8"):
        raise UnsupportedError(
            f"logcumsumexp of {input.dtype} is not implemented, in torch neither; convert it, with .float() say"
        )
    along = dimension(input, dim)
    return scan(trace, "logsumexp", input, along) if input.shape else trace.copy(input, input.dtype)


@row("cumulative_trapezoid")
def cumulative_trapezoid(trace: Trace, y: Node, x: Any = None, *, dx: Any = None, dim: Any = -1) -> Node:
    along = dimension(y, dim)
    neighbours = pointwise(trace, "add", *_neighbours(trace, y, along))
    if x is None:
        return pointwise(trace, "mul", cumsum(trace, neighbours, along), (1.0 if dx is None else dx) / 2.0)
    if len(x.shape) == 1:
        for _ in range(len(y.shape) - 1 - along):
            x = unsqueeze(trace, x, len(x.shape))
    at = len(x.shape) - (len(y.shape) - along)
    apart = pointwise(trace, "sub", *_neighbours(trace, x, at))
    return pointwise(trace, "div", cumsum(trace, pointwise(trace, "mul", apart, neighbours), along), 2.0)


def _neighbours(trace: Trace, node: Node, dim: int) -> tuple[Node, Node]:
    """Returns all elements along ``dim`` but the first, and all but the last."""
    length = symbols.sub(node.shape[dim], 1)
    return narrowed(trace, node, dim, 1, length), narrowed(trace, node, dim, 0, length)
