"""Tells which rows of a quantised weight a view of it has.

Layouts store tiles of ``ROW_TILE`` rows, so that a kernel reads a slice that begins at one. Of other rows, the product
with the tiles that they are in is computed, and its columns are cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.ir.nodes import DEQUANTIZE
from jitgen.ir.views import ROW_TILE, at_tile
from jitgen.trace.location import quote, user_location
from jitgen.trace.movement import view

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def with_whole_tiles(trace: Trace, weight: Node) -> tuple[Node, tuple[Any, ...] | None]:
    """Returns the weight (N, K) to multiply by in place of ``weight``, and the slice of the product's columns that are
    those of ``weight``: None where these are all.

    Raises:
        UnsupportedError: ``weight`` is another view than rows of a weight of two dimensions.
    """
    rows = _rows(weight)
    if rows is None:
        return weight, None
    base, start, step = rows
    count, length = weight.shape
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


def _rows(weight: Node) -> tuple[Node, Any, int] | None:
    """Returns the weight of which ``weight`` (N, K) has rows, the first and their distance; None for one that is no
    view of a weight of two dimensions, or the whole of one."""
    base = weight.under_views
    if base.kind is not DEQUANTIZE or all(attrs[0] != "slice" for attrs, _ in weight.movements):
        return None
    start: Any = 0
    step, dims, has_left, shape = 1, ["rows", "columns"], False, base.shape
    for attrs, moved in weight.movements:
        kind, before, shape = attrs[0], shape, moved
        if kind == "slice" and dims[attrs[1]] == "rows":
            start, step = symbols.add(start, symbols.mul(attrs[2], step)), step * attrs[3]
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
    return base, start, step


def _refuse() -> NoReturn:
    raise UnsupportedError(
        f"of a quantised weight, rows are multiplied by, and no other part{quote(user_location())}\n"
        "  cut it outside of the decorated function, where whole groups of columns are weights too"
    )
