"""At which numbers of rows the schedules of row kernels change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.families.family import RowBuckets
from jitgen.families.reduction.claim import are_columns
from jitgen.families.reduction.row_chunks import SINGLE_BLOCK_ROW, SINGLE_BLOCK_ROWS
from jitgen.families.reduction.schedule import (
    BUSY_ROWS,
    ENOUGH_ROWS,
    FEW_ROWS,
    LONG_ROW,
    MANY_COLUMNS,
    MANY_ROWS,
    PERSISTENT_CLUSTERS,
    PERSISTENT_ROW,
    SHORT_ROW,
    SOME_ROWS,
)
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, topological


def buckets(graph: Graph, environment: Mapping[str, Any]) -> RowBuckets | None:
    """The number of rows of the first reduction of ``graph``, and the ends of the buckets of all its reductions."""
    reductions = [node for node in topological(graph.results) if node.op == "reduce"]
    if not reductions:
        return None
    first, ends = reductions[0], set[int]()
    for node in reductions:
        length = symbols.product(node.inputs[0].shape[dim] for dim in node.attrs[1])
        ends.update(row_buckets(symbols.evaluate(length, environment), are_columns(node)))
    outer = (size for dim, size in enumerate(first.inputs[0].shape) if dim not in first.attrs[1])
    return RowBuckets(symbols.product(outer), tuple(sorted(ends)))


def row_buckets(length: int, columns: bool) -> tuple[int, ...]:
    """Upper ends of the ranges of numbers of rows within which rows of ``length`` elements have one schedule.

    ``columns``: whether neighbouring elements belong to neighbouring rows, as in ``RowLayout``.
    """
    if columns:
        return (MANY_COLUMNS,)
    if length <= SHORT_ROW:
        return (MANY_ROWS,)
    if length <= LONG_ROW:
        return ()
    ends = {SOME_ROWS, FEW_ROWS, BUSY_ROWS, ENOUGH_ROWS}
    if length >= SINGLE_BLOCK_ROW:
        ends.add(SINGLE_BLOCK_ROWS)
    if length >= PERSISTENT_ROW:
        ends.add(PERSISTENT_CLUSTERS)
    return tuple(sorted(ends))
