"""Defines the rows of torch's functions of sorted rows: ``sort`` and ``topk``. What is composed of them:
``quantiles.py``.

They make ``sort`` nodes (``ir/sorts.py``) and slices of them. A slice of the ranks becomes part of the sort, so that a
kernel finds no more ranks than are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.ir.symbols import Size
from jitgen.trace.movement import dimension, narrowed, sizes_of
from jitgen.trace.table import row
from jitgen.trace.typing import operand

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def sorted_(trace: Trace, input: Node, dim: Any, descending: bool) -> tuple[Node, Node]:
    """Sorts ``input`` along ``dim``: (values, indices); one that is a single element is sorted already."""
    if input.dtype.startswith("float8"):
        raise UnsupportedError(f"sorting {input.dtype} is not implemented, in torch neither; convert it to float16")
    along = dimension(input, dim)
    if not input.shape:
        return trace.copy(input, input.dtype), operand(trace, 0, "int64")
    attrs = along, bool(descending), 0
    values = trace.make("sort", (input,), input.dtype, input.shape, ("values", *attrs))
    return values, trace.make("sort", (input,), "int64", input.shape, ("indices", *attrs))


def ranks(trace: Trace, node: Node, dim: int, start: Size, count: Size) -> Node:
    """Selects ``count`` elements along ``dim`` of a sorted ``node``, from rank ``start`` on; a 0-d node stays as it
    is."""
    return narrowed(trace, node, dim, start, count) if node.shape else node


@row("sort")
def sort(trace: Trace, input: Node, dim: Any = -1, descending: Any = False, stable: Any = False) -> Any:
    pair: Any = sorted_(trace, input, dim, descending)
    return torch.return_types.sort(pair)


@row("argsort")
def argsort(trace: Trace, input: Node, dim: Any = -1, descending: Any = False, stable: Any = False) -> Node:
    return sorted_(trace, input, dim, descending)[1]


row("msort")(lambda trace, input: sorted_(trace, input, 0, False)[0])


@row("topk")
def topk(trace: Trace, input: Node, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True) -> Any:
    along = dimension(input, dim)
    (count,) = sizes_of(trace, (k,))
    size = input.shape[along] if input.shape else 1
    fits = symbols.compare("ge", count, 0), symbols.compare("le", count, size)
    if not all(map(trace.guards.decide, fits)):
        raise ValueError(f"topk: k is {trace.guards.hint(count)}, of {trace.guards.hint(size)} elements")
    values, indices = sorted_(trace, input, dim, largest)
    pair: Any = ranks(trace, values, along, 0, count), ranks(trace, indices, along, 0, count)
    return torch.return_types.topk(pair)
