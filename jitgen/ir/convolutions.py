"""Defines convolutions: sums of products of filters and the windows of images.

A ``convolve`` node has the inputs images ``(rows, groups, channels, image...)`` and filters ``(groups, outputs,
channels, kernel...)``, and the shape ``(rows, groups, outputs, pixels...)``. In each dimension of an image, pixel ``p``
and element ``k`` of a filter meet at the index

    (p * stride + k * dilation + offset) / spread

of the image. Where that is not whole, or is none of the image's indices, the product counts as zero: so a negative
offset is padding, and a spread puts zeros between the elements of an image, as transposed convolutions do. Dilations
may be negative.

Such nodes are closed under derivatives. The gradient of the images is the convolution of the result's gradient with
the filters whose outputs and channels are exchanged, with the equation above solved for ``p``; that of the filters is
the convolution of the images, whose rows and channels are exchanged, with the result's gradient as filters.
``convolve`` is the function of traced tensors by which compositions and derivatives make nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Node
from jitgen.ir.symbols import Size


def convolve(
    images: Any,
    filters: Any,
    stride: Sequence[int],
    dilation: Sequence[int],
    offset: Sequence[int],
    spread: Sequence[int],
    pixels: Sequence[Any],
) -> Any:
    """Convolves ``images`` with ``filters``, in a trace, into as many ``pixels`` in each dimension."""
    tensors = images, filters
    assert has_torch_function(tensors), "convolve is a function of traced tensors"
    return handle_torch_function(convolve, tensors, *tensors, stride, dilation, offset, spread, pixels)


def windows(node: Node, builder: Builder) -> Node:
    """Makes the windows of the images of the ``convolve`` node ``node``: (rows, groups, pixels..., channels,
    kernel...)."""
    images, filters = node.inputs
    stride, dilation, offset, spread = node.attrs[:4]
    rank = len(stride)
    rows, groups, channels, *sizes = images.shape
    shape = (rows, groups, *node.shape[3:], channels, *filters.shape[3:])

    def pointwise(op: str, *operands: Node, dtype: str = "int64") -> Node:
        return builder.make(op, operands, dtype, shape, (), node.location)

    def number(value: Size) -> Node:
        return builder.scalar(value, "int64")

    def times(dim: int, factor: int) -> Node:
        return pointwise("mul", builder.make("iota", (), "int64", shape, (dim,)), number(factor))

    indices, inside = [], None
    for dim in range(rank):
        at = pointwise("add", times(2 + dim, stride[dim]), times(3 + rank + dim, dilation[dim]))
        at = pointwise("add", at, number(offset[dim]))
        conditions = [pointwise("ge", at, number(0), dtype="bool")]
        limit = symbols.mul(sizes[dim], spread[dim])
        conditions.append(pointwise("lt", at, number(limit), dtype="bool"))  # type: ignore[arg-type]
        if spread[dim] != 1:
            rest = pointwise("remainder", at, number(spread[dim]))
            conditions.append(pointwise("eq", rest, number(0), dtype="bool"))
            at = pointwise("floor_divide", at, number(spread[dim]))
        for condition in conditions:
            inside = condition if inside is None else pointwise("bitwise_and", inside, condition, dtype="bool")
        indices.append(at)
    assert inside is not None
    indices = [pointwise("where", inside, at, number(0)) for at in indices]
    coordinates = (0, 1, 2 + rank, *(-1 - dim for dim in range(rank)))
    elements = builder.make("gather", (images, *indices), images.dtype, shape, coordinates, node.location)
    zero = builder.const(0.0 if images.dtype.startswith(("float", "bfloat")) else 0, images.dtype)
    return pointwise("where", inside, elements, zero, dtype=images.dtype)
