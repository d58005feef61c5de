"""Tells at which numbers of rows the schedules of row kernels change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Problem, SizeBuckets
from jitgen.families.rows.reduction.claim import are_columns
from jitgen.families.rows.reduction.row_chunks import (
    CHUNKED_COLUMN,
    CHUNKED_COLUMN_BYTES,
    CHUNKED_COLUMNS,
    CHUNKED_ROW,
    CHUNKED_ROWS,
    CPU_CHUNKED_ROW,
    SINGLE_BLOCK_ROW,
    SINGLE_BLOCK_ROWS,
    widest_bytes,
)
from jitgen.families.rows.reduction.schedule import (
    CPU_ROW_ENDS,
    LONG_ROW,
    MANY_COLUMNS,
    MANY_ROWS,
    PERSISTENT_ROW,
    SHORT_ROW,
    Occupancy,
    blocks_per_row,
    occupancy,
)
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import REDUCE
from jitgen.ir.program import plain
from jitgen.spec import digest


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the number of rows of each reduction of ``graph``, and where a schedule on a GPU changes with it; on a
    CPU also the length of a row. What is reduced before the last dimension, such as the tokens of a bias' gradient,
    varies too."""
    buckets_ = []
    for node in topological(graph.results):
        if node.kind is REDUCE:
            shape, reduced = node.inputs[0].shape, node.attrs.dims
            elements = symbols.product(shape[dim] for dim in reduced)
            length = symbols.evaluate(elements, environment)
            rows = symbols.product(size for dim, size in enumerate(shape) if dim not in reduced)
            ends = row_buckets(length, are_columns(node), occupancy(device.model)) if device.is_gpu else ()
            ends = tuple(sorted({*ends, *_chunk_ends(node, length, blocks_per_row(device))}))
            buckets_.append(SizeBuckets(rows, ends, node=node))
            if leading := [shape[dim] for dim in reduced if dim < len(shape) - 1]:
                buckets_.append(SizeBuckets(symbols.product(leading), node=node))
            if not device.is_gpu:
                buckets_.append(SizeBuckets(elements, CPU_ROW_ENDS, varies=False, node=node))
    return buckets_


def row_buckets(length: int, columns: bool, occupancy: Occupancy) -> tuple[int, ...]:
    """Returns the upper ends of the ranges of numbers of rows within which rows of ``length`` elements have one
    schedule.

    ``columns``: whether neighbouring elements belong to neighbouring rows, as in ``RowLayout``.
    """
    if columns:
        return (MANY_COLUMNS,)
    if length <= SHORT_ROW:
        return (MANY_ROWS,)
    if length <= LONG_ROW:
        return ()
    ends = {occupancy.quarter, occupancy.half, occupancy.full, occupancy.several}
    if length >= SINGLE_BLOCK_ROW:
        ends.add(SINGLE_BLOCK_ROWS)
    if length >= PERSISTENT_ROW:
        ends.add(occupancy.clusters)
    return tuple(sorted(ends))


def facts(problem: Problem, device: Device) -> dict[str, Any] | None:
    """Returns the facts by which measured choices tell kernels along rows apart: what is computed, where its operands
    lie, the elements of a row, and the upper end of the bucket of rows (0 beyond the last). None where sums have the
    same bits for every number of rows."""
    if device.batch_invariant:
        return None
    (layout,), (geometry,) = problem.layouts, problem.geometries
    ends = row_buckets(geometry.length, layout.columns, occupancy(device.model))
    return {
        "kernel": problem.kernel.identity,
        "layout": digest(plain(layout)),
        "length": geometry.length,
        "rows": next((end for end in ends if geometry.rows <= end), 0),
    }


def _chunk_ends(node: Node, length: int, blocks: int) -> set[int]:
    """Returns the numbers of rows beyond which rows of ``length`` elements, reduced by ``node``, are no longer divided
    into chunks (``row_chunks.py``). ``blocks``: the most blocks that can share a row; 0 on a CPU."""
    columns = are_columns(node)
    if not blocks:
        return {CHUNKED_ROWS} if length >= CPU_CHUNKED_ROW and not columns else set()
    ends = {CHUNKED_ROWS} if length >= CHUNKED_ROW else set()
    if columns and length >= CHUNKED_COLUMN * blocks:
        ends |= {CHUNKED_COLUMNS - 1, CHUNKED_COLUMN_BYTES // (blocks * widest_bytes(node)) - 1}
    return ends
