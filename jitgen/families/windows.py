"""Prepares convolutions for kernels: which values around them are in memory, and how a GPU multiplies by windows.

Neighbours: ``families/moved.py`` asks while it moves views; ``families/convolution`` claims what is left, on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.families.temporaries import Temporaries
from jitgen.ir import symbols
from jitgen.ir.convolutions import windows
from jitgen.ir.equations import equation
from jitgen.ir.graph import Node, keeps_all_elements
from jitgen.ir.index import Index
from jitgen.ir.nodes import CONVOLVE
from jitgen.ir.symbols import Size


def around_convolutions(index: Index, results: Sequence[Node]) -> frozenset[int]:
    """Returns the ids of computed values to store around convolutions: images and filters, and convolutions that
    several kernels would compute, because they are read through more than an epilogue or their epilogue ends in several
    values."""
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


FEW_PIXELS = 64
"""Pixels of an image up to which those of all images are columns of one product: filters as large are the pixels where
gradients of filters are computed, and a product of each image by itself would have few columns."""


def product_with_windows(node: Node, temporaries: Temporaries) -> Node:
    """Computes the ``convolve`` node ``node`` as a product of filters and windows in memory."""
    mover = temporaries.mover

    def view(source: Node, attrs: tuple[Any, ...], shape: Sequence[Size]) -> Node:
        return mover.move(source, attrs, tuple(shape)) if tuple(shape) != source.shape else source

    def multiplied(filters: Node, matrix: Node, batch: int) -> Node:
        shape, attrs = (*filters.shape[:-1], matrix.shape[-2]), (equation(batch, 1), *node.attrs[4:])
        return mover.builder.make("contract", (filters, matrix), node.dtype, shape, attrs, node.location)

    columns = windows(node, mover.builder)
    columns = temporaries.materialize(mover.permute(columns, (1, 0, *range(2, len(columns.shape)))))
    rows, groups, outputs, *pixels = node.shape
    count, length = symbols.product(pixels), symbols.product(node.inputs[1].shape[2:])
    filters = view(node.inputs[1], ("reshape",), (groups, outputs, length))
    if isinstance(count, int) and count <= FEW_PIXELS:
        all_columns = symbols.product((rows, count))
        matrix = view(columns, ("reshape",), (groups, all_columns, length))
        product = multiplied(filters, matrix, 1)
        product = view(product, ("reshape",), (groups, outputs, rows, *pixels))
        return mover.permute(product, (2, 0, 1, *range(3, len(node.shape))))
    matrix = mover.permute(view(columns, ("reshape",), (groups, rows, count, length)), (1, 0, 2, 3))
    filters = mover.unsqueeze(filters, 0)
    filters = view(filters, ("expand",), (rows, groups, outputs, length))
    return view(multiplied(filters, matrix, 2), ("reshape",), node.shape)
