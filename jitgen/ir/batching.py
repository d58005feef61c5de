"""Batches nodes: a rule for each kind, as in JAX's and PyTorch's own ``vmap``.

A rule takes the batch, the node, its attributes and its operands, of which at least one has the batch as its first
dimension. It returns the operands and the attributes of the node that takes its place, or that node, or None where
there is none. An attribute that names a dimension counts one more.

Neighbours: the rows of ``ir/nodes.py`` name these rules, ``ir/batched.py`` applies them to a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from jitgen.ir import symbols
from jitgen.ir.attributes import CHANNELS_LAST
from jitgen.ir.equations import axes, equation
from jitgen.ir.symbols import Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Builder, Node

Operand = tuple["Node", bool]
"""A node, and whether its first dimension is the batch."""
Replacement: TypeAlias = "tuple[Sequence[Node], tuple[Any, ...]] | Node | None"
"""Operands and attributes of the node that takes a node's place, or that node."""


class Batch(Protocol):
    """Tells a rule what it must know of the batch."""

    size: Size
    builder: Builder

    def renamed(self, value: Any) -> Any:
        """Returns a size or an attribute in the sizes of the batched graph."""

    def whole(self, operand: Operand) -> Node:
        """Returns an operand with the batch as its first dimension."""

    def whole_or_number(self, operand: Operand) -> Node:
        """Returns an operand with the batch as its first dimension; a number stays one."""


def batch_pointwise(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    return [batch.whole_or_number(operand) for operand in operands], () if attrs == CHANNELS_LAST else attrs


def batch_stated(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    """Batches ``custom_gradient`` nodes."""
    return [batch.whole(operand) for operand in operands], attrs


def moved(attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the attributes of a movement (``ir/views.py``) after a dimension is put in front of those that it
    moves."""
    if attrs[0] == "permute":
        return "permute", (0, *(dim + 1 for dim in attrs[1]))
    if attrs[0] in ("slice", "squeeze", "unsqueeze"):
        return attrs[0], attrs[1] + 1, *attrs[2:]
    return attrs


def batch_view(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    return [operands[0][0]], moved(attrs)


def batch_cat(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    return [batch.whole(operand) for operand in operands], (attrs.dim + 1,)


def batch_reduce(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    return [operands[0][0]], attrs._replace(dims=tuple(dim + 1 for dim in attrs.dims))


def batch_along(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    """Batches scans and sorts."""
    return [operands[0][0]], attrs._replace(dim=attrs.dim + 1)


def batch_contract(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    """Batches products; one whose weight is not batched stays one product with more rows."""
    named, (x, weight) = axes(attrs.equation), operands
    if not weight[1] and not named.batch:
        return [x[0], weight[0]], attrs._replace(equation=equation(0, len(named.rows) + 1))
    if node.inputs[1].is_weight:
        return None
    batches = len(named.batch) + 1
    return [batch.whole(x), batch.whole(weight)], attrs._replace(equation=equation(batches, len(named.rows)))


def batch_convolve(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    """Batches convolutions: the batch is more rows of images, or more groups where it has filters of its own."""
    images, filters = batch.whole(operands[0]), operands[1][0]
    own_filters = operands[1][1]

    def view(source: Node, attrs: tuple[Any, ...], shape: Sequence[Size]) -> Node:
        return batch.builder.make("view", (source,), source.dtype, shape, attrs)

    def permuted(source: Node, order: tuple[int, ...]) -> Node:
        return view(source, ("permute", order), [source.shape[dim] for dim in order])

    _, rows, groups, *image = images.shape
    spatial = tuple(range(4, len(images.shape)))
    if own_filters:
        images = permuted(images, (1, 0, 2, 3, *spatial))
        rows, groups = rows, symbols.mul(batch.size, groups)  # type: ignore[assignment]
        filters = view(filters, ("reshape",), [groups, *filters.shape[2:]])
    else:
        rows = symbols.mul(batch.size, rows)  # type: ignore[assignment]
    images = view(images, ("reshape",), [rows, groups, *image])
    outputs, pixels = filters.shape[1], [batch.renamed(size) for size in node.shape[3:]]
    result = batch.builder.make(node.op, (images, filters), node.dtype, [rows, groups, outputs, *pixels], attrs)
    whole = [batch.size, *map(batch.renamed, node.shape)]
    if not own_filters:
        return view(result, ("reshape",), whole)
    apart = [whole[1], whole[0], *whole[2:]]
    return permuted(view(result, ("reshape",), apart), (1, 0, 2, 3, *spatial))


def batch_gather(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    source, *indices = operands
    coordinates = tuple(coordinate + (coordinate >= 0) for coordinate in attrs)
    if source[1]:
        coordinates = (0, *coordinates)
    return [source[0], *map(batch.whole_or_number, indices)], coordinates


def batch_scatter(batch: Batch, node: Node, attrs: Any, operands: Sequence[Operand]) -> Replacement:
    base, value, *indices = operands
    movements = tuple((moved(movement), (batch.size, *shape)) for movement, shape in attrs.movements)
    coordinates = (0, *(coordinate + (coordinate >= 0) for coordinate in attrs.coordinates))
    inputs = [batch.whole(base), batch.whole(value), *map(batch.whole_or_number, indices)]
    return inputs, (attrs.kind, coordinates, movements)
