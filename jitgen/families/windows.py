"""Prepares convolutions for kernels: which values around them are in memory, and how a GPU multiplies by windows.

Neighbours: ``families/moved.py`` asks while it moves views; ``families/convolution`` claims what is left, on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.temporaries import Temporaries
from jitgen.ir import symbols
from jitgen.ir.convolutions import windows
from jitgen.ir.equations import equation
from jitgen.ir.graph import Node, keeps_all_elements
from jitgen.ir.index import Index
from jitgen.ir.nodes import CONVOLVE


def around_convolutions(index: Index, results: Sequence[Node]) -> frozenset[int]:
    """Returns the ids of computed values that are images or filters of convolutions, and of convolutions that more than
    one kernel would compute: those that are read with more than an epilogue between, or whose epilogue ends in several
    such values."""
    convolutions = [node for node in index.order if node.kind is CONVOLVE]
    operands = {operand.under_views for node in convolutions for operand in node.inputs}
    stored = {id(node) for node in operands if node.inputs}
    returned = set(map(id, results))
    for node in convolutions:
        stack, ends, is_read_elsewhere = [node], set[int](), id(node) in stored
        while stack and not is_read_elsewhere:
            top = stack.pop()
            if id(top) in stored:
                ends.add(id(top))
                continue
            ends |= {0} if id(top) in returned else set()
            is_read_elsewhere = len(ends) > 1 or not all(map(keeps_all_elements, index.users[top]))
            stack += index.users[top]
        if is_read_elsewhere:
            stored.add(id(node))
    return frozenset(stored)


def product_with_windows(node: Node, temporaries: Temporaries) -> Node:
    """Computes the ``convolve`` node ``node`` as a product of filters and windows in memory."""
    mover = temporaries.mover
    columns = temporaries.materialize(windows(node, mover.builder))
    rows, groups, outputs, *pixels = node.shape
    count, length = symbols.product(pixels), symbols.product(node.inputs[1].shape[2:])
    matrix = mover.move(columns, ("reshape",), (rows, groups, count, length))
    filters = mover.move(node.inputs[1], ("reshape",), (groups, outputs, length))
    filters = mover.move(filters, ("unsqueeze", 0), (1, groups, outputs, length))
    if rows != 1:
        filters = mover.move(filters, ("expand",), (rows, groups, outputs, length))
    attrs, shape = (equation(2, 1), *node.attrs[4:]), (rows, groups, outputs, count)
    product = mover.builder.make("contract", (filters, matrix), node.dtype, shape, attrs, node.location)
    return mover.move(product, ("reshape",), node.shape) if len(pixels) > 1 else product
