"""Splits a dimension of heads that was repeated from fewer heads in two: the heads that have keys, and those that share
them.

``k.repeat_interleave(g, 1)`` and ``k[:, :, None].expand(...).reshape(...)`` are a reshape that merges a broadcast
dimension with another one. No strides describe it. Where everything else of an attention is reshaped the other way, its
keys are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.ir import symbols
from jitgen.ir.analysis import varies
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.nodes import GATHER, VIEW
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover

Split = tuple[int, tuple[Size, Size]]
"""A dimension, and the sizes of the two that take its place."""


def shared_heads(operands: Sequence[Node], lead: Shape, mover: Mover) -> Split | None:
    """Returns the dimension of ``lead`` that merges repeated heads with others; ``lead`` has the first sizes of all
    ``operands``."""
    for view in topological(operands):
        source = view.inputs[0] if view.kind is VIEW and view.attrs.kind == "reshape" else None
        if source is None or source.kind not in (VIEW, GATHER) or len(view.shape) != len(lead) + 2:
            continue
        if source.kind is VIEW and source.attrs.kind != "expand":
            continue
        for dim in range(len(lead)):
            if source.kind is GATHER and varies(source, (dim,)) and varies(source, (dim + 1,)):
                continue
            sizes = source.shape[dim : dim + 2]
            whole = (*view.shape[:dim], *sizes, *view.shape[dim + 1 :])
            if whole == source.shape and same_sizes(
                (symbols.product(sizes), *view.shape[:dim]), (lead[dim], *lead[:dim]), mover
            ):
                return dim, (sizes[0], sizes[1])
    return None


def same_sizes(left: Shape, right: Shape, mover: Mover) -> bool:
    """Returns whether two shapes are equal; if their expressions differ, that becomes a guard."""
    return len(left) == len(right) and all(
        a == b or mover.decide(symbols.compare("eq", a, b)) for a, b in zip(left, right, strict=True)
    )


def split_shape(shape: Shape, split: Split | None) -> Shape:
    """Returns ``shape`` with the sizes of ``split`` in place of the one at its dimension."""
    return shape if split is None else (*shape[: split[0]], *split[1], *shape[split[0] + 1 :])


def with_split(node: Node, split: Split | None, mover: Mover) -> Node:
    """Returns ``node`` in the shape ``split_shape`` gives, without a reshape wherever a view can be seen through."""
    if split is None or node.kind.is_number:
        return node
    dim, _ = split
    shape = split_shape(node.shape, split)
    if node.kind is VIEW:
        (source,), (kind, *parameters) = node.inputs, node.attrs
        if kind == "reshape" and same_sizes(source.shape, shape, mover):
            return source
        if kind == "permute":
            (order,) = parameters
            inner = order[dim]
            moved = [old + (old > inner) for old in order]
            moved[dim : dim + 1] = [inner, inner + 1]
            return mover.move(with_split(source, (inner, split[1]), mover), ("permute", tuple(moved)), shape)
        if kind == "expand" and len(source.shape) == len(node.shape):
            if source.shape[dim] == 1:
                ones = (*source.shape[:dim], 1, *source.shape[dim:])
                return mover.move(mover.move(source, ("unsqueeze", dim), ones), ("expand",), shape)
            return mover.move(with_split(source, split, mover), ("expand",), shape)
        if kind == "unsqueeze" and parameters[0] != dim:
            inner, outer = dim - (parameters[0] < dim), parameters[0] + (parameters[0] > dim)
            return mover.move(with_split(source, (inner, split[1]), mover), ("unsqueeze", outer), shape)
    elif node.inputs and node.kind.commutes:
        return mover.builder.like(node, [with_split(child, split, mover) for child in node.inputs], shape)
    return mover.move(node, ("reshape",), shape)
