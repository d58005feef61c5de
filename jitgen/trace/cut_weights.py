"""Tells which rows and columns of a quantised weight a view of it has.

Layouts store tiles of ``ROW_TILE`` rows, so that a kernel reads a slice that begins at one. Of other rows, the product
with the tiles that they are in is computed, and its columns are cut. Of some columns, the product with all is, of an
activation with zeros for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.ir.nodes import DEQUANTIZE
from jitgen.ir.views import ROW_TILE, at_tile
from jitgen.trace.location import quote, user_location
from jitgen.trace.movement import view
from jitgen.trace.numbers import wrap
from jitgen.trace.proxy import TensorProxy

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def with_whole_tiles(trace: Trace, x: Node, weight: Node) -> tuple[Node, Node, tuple[Any, ...] | None]:
    """Returns what to multiply in place of ``x`` (..., K) and ``weight`` (N, K), and the slice of the product's columns
    that are those of ``weight``: None where these are all.

    Raises:
        UnsupportedError: ``weight`` is another view than rows and columns of a weight of two dimensions.
    """
    selection = _selection(weight)
    if selection is None:
        return x, weight, None
    base, start, step, first_column = selection
    tiles, cut = _of_rows(trace, base, start, step, weight.shape[0])
    return _padded(trace, x, first_column, base.shape[1]), tiles, cut


def _padded(trace: Trace, x: Node, first: Any, length: Any) -> Node:
    """Returns ``x`` with zeros around its last dimension, whose elements are those from ``first`` on of ``length``
    then."""
    behind = symbols.sub(length, symbols.add(first, x.shape[-1]))
    if first == 0 == behind:
        return x
    amounts = wrap(first, trace.guards), wrap(behind, trace.guards)
    return trace.composed(lambda x: torch.nn.functional.pad(x, amounts), [TensorProxy(x, trace)])


def _of_rows(trace: Trace, base: Node, start: Any, step: int, count: Any) -> tuple[Node, tuple[Any, ...] | None]:
    """Returns the tiles of ``base`` that have ``count`` rows from ``start`` on, and which of their rows these are."""
    length = base.shape[1]
    if trace.guards.decide(at_tile(start, step)):
        return _slice(trace, base, start, count, length), None
    if not isinstance(start, int) or not isinstance(count, int) or step < 1 or count == 0:
        return base, (start, step)
    first = start // ROW_TILE * ROW_TILE
    tiles = _slice(trace, base, first, start - first + (count - 1) * step + 1, length)
    return tiles, (start - first, step)


def _slice(trace: Trace, base: Node, start: Any, count: Any, length: Any) -> Node:
    whole = start == 0 and count == base.shape[0]
    return base if whole else view(trace, base, ("slice", 0, start, 1), (count, length))


def _selection(weight: Node) -> tuple[Node, Any, int, Any] | None:
    """Returns the weight of which ``weight`` (N, K) has a part, its first row, the distance of its rows, and its first
    column; None for one that is no view of a weight of two dimensions, or the whole of one."""
    base = weight.under_views
    if base.kind is not DEQUANTIZE or all(attrs[0] != "slice" for attrs, _ in weight.movements):
        return None
    start: Any = 0
    first_column: Any = 0
    step, dims, has_left, shape = 1, ["rows", "columns"], False, base.shape
    for attrs, moved in weight.movements:
        kind, before, shape = attrs[0], shape, moved
        if kind == "slice" and dims[attrs[1]] == "rows":
            start, step = symbols.add(start, symbols.mul(attrs[2], step)), step * attrs[3]
        elif kind == "slice" and dims[attrs[1]] == "columns" and attrs[3] == 1:
            first_column = symbols.add(first_column, attrs[2])
        elif kind == "permute":
            dims = [dims[dim] for dim in attrs[1]]
        elif kind == "squeeze":
            has_left |= dims.pop(attrs[1]) == "rows"
        elif kind == "unsqueeze":  # a row that was a vector is a matrix of one row
            dims.insert(attrs[1], "rows" if has_left else "one")
            has_left = False
        elif before != shape:
            _refuse()
    if dims != ["rows", "columns"]:
        _refuse()
    return base, start, step, first_column


def _refuse() -> NoReturn:
    raise UnsupportedError(
        "of a quantised weight, rows and neighbouring columns are multiplied by, and of several matrices (E, N, K) one "
        f"or some, x @ w[i:j].mT, and no other part{quote(user_location())}\n  take these and cut the product, or "
        "dequantise the weight outside of the decorated function"
    )
