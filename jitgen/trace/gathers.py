"""Defines the rows of functions that read a tensor at computed indices: ``embedding``, ``gather``, ``take``, and for
``trace/indexing.py`` ``index_select`` and indexing by tensors (``indexed``).

Each becomes one ``gather`` node (``ir/gathers.py``). Where torch counts a negative index from the end, the size is
added to it before. What has a shape that depends on data (indexing by a mask) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape, one_along
from jitgen.trace.movement import dimension, flatten, narrowed, squeezed, unsqueeze, view
from jitgen.trace.numbers import unwrap
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import broadcast_shapes, compare, expand, filled, is_float, operand, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

INDEX_DTYPES = ("int32", "int64")
MASKED = (
    "indexing by a mask has a result whose size depends on data; keep the shape with torch.where(mask, a, 0), assign "
    "with a[mask] = number, or index outside the decorated function"
)


def gathered(trace: Trace, source: Node, indices: Sequence[Node], coordinates: Sequence[int], shape: Shape) -> Node:
    """Reads the elements of ``source`` at ``coordinates`` (``ir/gathers.py``); the integer ``indices`` are broadcast to
    ``shape``.

    Raises:
        IndexError: a gathered dimension has no elements, and the result has.
    """
    for dim, coordinate in enumerate(coordinates):
        if coordinate < 0 and not trace.guards.at_least(source.shape[dim], 1):
            if trace.guards.equal(symbols.product(shape), 0):
                return filled(trace, _sum_of_none(trace, source), tuple(shape))
            raise IndexError(f"dimension {dim} has no elements to index")
    operands = [expand(trace, trace.cast(index, "int64"), shape) for index in indices]
    return trace.make("gather", (source, *operands), source.dtype, shape, tuple(coordinates))


def _sum_of_none(trace: Trace, source: Node) -> Node:
    """Returns 0, as the sum of ``source``, which has no elements, where a gradient is to reach it."""
    if not (trace.differentiable and is_float(source)):
        return operand(trace, 0, source.dtype)
    dims = tuple(range(len(source.shape)))
    total = trace.make("reduce", (source,), source.dtype, one_along(source.shape, dims), ("sum", dims))
    return view(trace, total, ("reshape",), ())


def from_end(trace: Trace, index: Node, size: Any) -> Node:
    """Converts ``index`` to int64, and adds ``size`` where it is negative."""
    number = trace.cast(index, "int64")
    wrapped = pointwise(trace, "add", number, trace.builder.scalar(size, "int64"))
    negative = compare(trace, "lt", number, 0)
    return trace.make("where", (negative, wrapped, number), "int64", number.shape)


def along(trace: Trace, index: Node, dim: int, rank: int) -> Node:
    """Reshapes a vector to ``rank`` dimensions, with its elements along ``dim``."""
    for _ in range(dim):
        index = unsqueeze(trace, index, 0)
    while len(index.shape) < rank:
        index = unsqueeze(trace, index, len(index.shape))
    return index


def require_index(index: Node, *dtypes: str) -> None:
    """Refuses an index of another dtype, as torch does."""
    if index.dtype not in (dtypes or INDEX_DTYPES):
        raise TypeError(
            f"an index is {' or '.join(dtypes or INDEX_DTYPES)}, not {index.dtype}; convert it, with .long() say"
        )


def at_least_1d(trace: Trace, node: Node) -> Node:
    return node if node.shape else unsqueeze(trace, node, 0)


@row("torch.embedding", weights=True)
def embedding(
    trace: Trace,
    weight: Node,
    indices: Node,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    """Looks rows up; the other arguments concern the gradient alone, of which the row ``padding_idx`` gets none."""
    require_index(indices)
    if indices.is_weight:
        raise UnsupportedError("a quantised weight is no index; pass a tensor of integers")
    if weight.is_weight:
        return trace.quantized.rows(weight, indices)
    if len(weight.shape) != 2:
        raise ValueError("'weight' must be 2-D")
    rank = len(indices.shape)
    shape = (*indices.shape, weight.shape[1])
    result = gathered(trace, weight, [unsqueeze(trace, indices, rank)], (-1, rank), shape)
    if not trace.differentiable:
        return result
    if scale_grad_by_freq or sparse:
        raise UnsupportedError("gradients are dense and not scaled; leave out scale_grad_by_freq and sparse")
    if int(padding_idx) < 0:
        return result
    is_padding = compare(trace, "eq", unsqueeze(trace, indices, rank), int(padding_idx))
    return where(trace, is_padding, trace.detached(result), result)


@row("gather")
def gather(trace: Trace, input: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> Node:
    require_index(index)
    return _gather(trace, input, dimension(input, dim), index)


def _gather(trace: Trace, input: Node, dim: int, index: Node) -> Node:
    shape = index.shape
    source, index = at_least_1d(trace, input), at_least_1d(trace, index)
    source = first_elements(trace, source, index.shape, dim, "input")
    coordinates = [-1 if other == dim else other for other in range(len(source.shape))]
    result = gathered(trace, source, [index], coordinates, index.shape)
    return result if shape else squeezed(trace, result, 0)


def first_elements(trace: Trace, node: Node, shape: Shape, dim: int, what: str) -> Node:
    """Cuts ``node`` to the first elements of ``shape`` along all dimensions but ``dim``.

    Raises:
        ValueError: it has other dimensions, or fewer elements.
    """
    if len(node.shape) != len(shape):
        raise ValueError(f"the index has {len(shape)} dimensions, {what} has {len(node.shape)}")
    for other, (size, wanted) in enumerate(zip(node.shape, shape, strict=True)):
        if other == dim or trace.guards.equal(size, wanted):
            continue
        if not trace.guards.at_least(size, wanted):
            raise ValueError(f"the index has more elements than {what} along dimension {other}")
        node = narrowed(trace, node, other, 0, wanted)
    return node


def index_select(trace: Trace, input: Node, dim: int, index: Node) -> Node:
    """Selects elements along ``dim``; the row of ``torch.index_select`` is in ``trace/indexing.py``."""
    require_index(index)
    if len(index.shape) > 1:
        raise IndexError("the index of index_select must have at most one dimension")
    dim, index = dimension(input, dim), at_least_1d(trace, index)
    if not input.shape:
        if not trace.guards.equal(index.shape[0], 1):
            raise IndexError("the index of index_select of a 0-d tensor must have one element")
        return squeezed(trace, gathered(trace, unsqueeze(trace, input, 0), [index], (-1,), (1,)), 0)
    rank = len(input.shape)
    shape = (*input.shape[:dim], index.shape[0], *input.shape[dim + 1 :])
    coordinates = [-1 if other == dim else other for other in range(rank)]
    return gathered(trace, input, [along(trace, index, dim, rank)], coordinates, shape)


@row("take")
def take(trace: Trace, input: Node, index: Node) -> Node:
    require_index(index, "int64")
    flat = flatten(trace, input)
    return gathered(trace, flat, [from_end(trace, index, flat.shape[0])], (-1,), index.shape)


@row("take_along_dim")
def take_along_dim(trace: Trace, input: Node, indices: Node, dim: Any = None) -> Node:
    require_index(indices, "int64")
    if dim is None:
        return _gather(trace, flatten(trace, input), 0, flatten(trace, indices))
    if len(input.shape) != len(indices.shape):
        raise ValueError(f"input has {len(input.shape)} dimensions, indices have {len(indices.shape)}")
    at = dimension(input, dim)
    common = broadcast_shapes(trace, *((*node.shape[:at], 1, *node.shape[at + 1 :]) for node in (input, indices)))
    source = expand(trace, input, (*common[:at], input.shape[at], *common[at + 1 :]))
    index = expand(trace, indices, (*common[:at], indices.shape[at], *common[at + 1 :]))
    size = trace.builder.scalar(input.shape[at], "int64")  # by which torch wraps every index
    return _gather(trace, source, at, pointwise(trace, "remainder", index, size))


@row("one_hot")
def one_hot(trace: Trace, tensor: Node, num_classes: Any = -1) -> Node:
    require_index(tensor, "int64")
    count = unwrap(num_classes)
    if not trace.guards.at_least(count, 1):
        raise UnsupportedError("one_hot without num_classes has a result whose size depends on data; give num_classes")
    classes = trace.make("iota", (), "int64", (count,), (0,))
    shape = (*tensor.shape, count)
    # The class itself, read from the table of classes, so that one out of range is reported as any index is.
    chosen = gathered(trace, classes, [tensor], (-1,), tensor.shape)
    equal = compare(trace, "eq", expand(trace, classes, shape), unsqueeze(trace, chosen, len(tensor.shape)))
    return trace.cast(equal, "int64")


# ------------------------------------------------------------------------------------------------ indexing by tensors


class Chosen:
    """Locates the elements that tensors choose, in a tensor with dimensions of its own and indexed ones.

    Attributes:
        shape: of the result.
        coordinates: the coordinate of every dimension of the tensor (``ir/gathers.py``).
        indices: int64, of ``shape``.
    """

    def __init__(self, trace: Trace, sizes: Shape, by_dim: Mapping[int, Node]):
        """Computes the coordinates.

        Args:
            sizes: of the tensor.
            by_dim: the indices, by dimension; those of 0 dimensions remove it, as a number does.
        """
        vectors = [dim for dim, index in by_dim.items() if index.shape]
        common = broadcast_shapes(trace, *(index.shape for index in by_dim.values()))
        kept = [dim for dim in range(len(sizes)) if dim not in by_dim]
        # What numbers select is gone before torch asks whether the indices are neighbours.
        left = [dim for dim in range(len(sizes)) if dim in vectors or dim in kept]
        positions = [left.index(dim) for dim in sorted(vectors)]
        together = positions == list(range(positions[0], positions[0] + len(vectors))) if vectors else True
        first = sum(dim < min(vectors) for dim in kept) if vectors and together else 0
        self.shape: Shape = (*(sizes[d] for d in kept[:first]), *common, *(sizes[d] for d in kept[first:]))
        at = {dim: n if n < first else n + len(common) for n, dim in enumerate(kept)}
        numbers = {dim: -1 - n for n, dim in enumerate(by_dim)}
        self.coordinates = tuple(at.get(dim, numbers.get(dim, 0)) for dim in range(len(sizes)))
        self.indices = []
        for dim, index in by_dim.items():
            node = from_end(trace, index, sizes[dim])
            for _ in range(len(kept) - first if node.shape else 0):
                node = unsqueeze(trace, node, len(node.shape))
            self.indices.append(expand(trace, node, self.shape))


def indexed(trace: Trace, input: Node, by_dim: Mapping[int, Node]) -> Node:
    """Indexes ``input`` by integer tensors, by dimension."""
    chosen = Chosen(trace, input.shape, by_dim)
    return gathered(trace, input, chosen.indices, chosen.coordinates, chosen.shape)
