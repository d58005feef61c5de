"""Reduces rows that are made of other rows, which the elements depend on, in two steps.

The sum of all elements of a softmax's entropy, ``-(p * p.log()).sum()``, is over rows whose elements need reductions of
shorter rows. One kernel that goes along the shorter rows reduces each of them, and a second one what is left. The
elements themselves are stored nowhere, and computed once.

Neighbours: ``row_chunks.py`` divides what is still a long row.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.family import Partition
from jitgen.ir.analysis import nearest, rewritten
from jitgen.ir.graph import Node, one_along
from jitgen.ir.nodes import REDUCE

KINDS = ("sum", "prod", "max", "min", "any", "all")
"""Reductions of which a reduction of reductions is one."""


def inner_rows_first(values: Sequence[Node], partition: Partition) -> list[Node]:
    """Returns ``values`` with reductions over several dimensions reduced along those first that their elements'
    reductions have."""
    builder = partition.mover.builder

    def change(node: Node, rebuilt: Node) -> Node:
        dims = _inner_dims(node)
        if not dims:
            return rebuilt
        (operand,) = rebuilt.inputs
        dtype = "float32" if node.dtype in ("float16", "bfloat16") else node.dtype
        if dtype != node.dtype:  # of which an inner result would be rounded
            operand = builder.make("cast", (operand,), dtype, operand.shape, (), node.location)
        shape = one_along(operand.shape, dims)
        inner = builder.make("reduce", (operand,), dtype, shape, (node.attrs.kind, dims), node.location)
        outer = tuple(dim for dim in node.attrs.dims if dim not in dims)
        whole = builder.make("reduce", (inner,), dtype, node.shape, (node.attrs.kind, outer), node.location)
        return whole if dtype == node.dtype else builder.make("cast", (whole,), node.dtype, node.shape)

    return [rewritten(value, partition.mover, change) if REDUCE in value.kinds else value for value in values]


def _inner_dims(node: Node) -> tuple[int, ...]:
    """Returns the dimensions that all reductions which elements of the reduction ``node`` need have in common with it;
    empty where these are not some of its own."""
    if node.kind is not REDUCE or node.attrs.kind not in KINDS:
        return ()
    (operand,) = node.inputs
    needed = list(nearest(operand, [REDUCE], lambda between: between.kind.is_pointwise or _is_spread(between)))
    dims = {reduction.attrs.dims for reduction in needed}
    if len(dims) != 1 or any(reduction.inputs[0].shape != operand.shape for reduction in needed):
        return ()
    (inner,) = dims
    return inner if set(inner) < set(node.attrs.dims) else ()


def _is_spread(node: Node) -> bool:
    return node.under_expand is not node
