"""Gives rows one stride: operands of a row region are copied if their rows have none.

A row of a region may be several dimensions. Kernels walk it as one, so along these dimensions together each operand and
each result must have one stride. What counts is the order of the dimensions in memory: the sum of a transposed matrix
walks its elements as they lie. All operands have to agree on the order, though, and the results decide where they have
elements along the row; otherwise the order is that of the most operands.

Operands that do not agree are computed into temporaries, which lie in that order. Where a whole expression is computed
of such operands, the temporary holds its value: in ``a.tril().sum()`` it is the mask, not the two indices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from jitgen.families.family import Partition
from jitgen.ir.analysis import one_of, varies
from jitgen.ir.graph import Node, topological, walked
from jitgen.ir.nodes import INPUT, IOTA
from jitgen.ir.regions import Region, Store
from jitgen.ir.views import Strided

Order = tuple[int, ...]
"""The dimensions of a row, the outermost in memory first, without those of size 1."""


def legalize(region: Region, partition: Partition, memories: Sequence[Strided]) -> Region:
    """Makes all operands and stores of ``region`` have one stride along the row; see the module."""
    if region.row_rank < 2:
        return region
    written = {
        id(store): partition.memory.located(store.movements, memories[store.result])
        for store in region.stores
        if any(size != 1 for size in store.value.shape[-region.row_rank :])
    }
    read = {id(node): partition.memory.strides(node) for store in region.stores for node in _leaves(store.value)}
    orders = (_common_order(by_id.values(), region.row_rank) for by_id in (written, read))
    natural = tuple(range(len(region.shape)))[-region.row_rank :]
    order = next((order for order in orders if order is not None), natural)
    stores = [s for s in region.stores if id(s) not in written or _is_even(written[id(s)], order, region.row_rank)]
    uneven = {key for key, memory in read.items() if not _is_even(memory, order, region.row_rank)}
    if uneven or len(stores) < len(region.stores):
        partition.memory.depends_on_strides()
    if uneven:
        stores = [_with_copies(store, uneven, order, partition) for store in stores]
    return replace(region, stores=tuple(stores))


def has_even_rows(root: Node, row_rank: int, partition: Partition) -> bool:
    """Returns whether every operand of ``root``, whose last ``row_rank`` dimensions are a row, has one stride along
    it."""
    natural = tuple(range(len(root.shape)))[-row_rank:]
    return all(_is_even(partition.memory.strides(leaf), natural, row_rank) for leaf in _leaves(root))


def _leaves(root: Node) -> Iterator[Node]:
    """Yields the tensors and indices, seen through their views, that ``root`` is computed from."""

    def is_leaf(node: Node) -> bool:
        return node.under_views.kind in (INPUT, IOTA)

    return filter(is_leaf, walked([root], lambda node: () if is_leaf(node) else node.inputs))


def _row(memory: Strided, row_rank: int) -> list[tuple[int, int, int]]:
    """Lists (dimension, size, stride) of the dimensions of a row that have more than one element; empty for an empty
    row."""
    rank = len(memory.sizes)
    row = [(dim, memory.sizes[dim], memory.strides[dim]) for dim in range(rank - row_rank, rank)]
    return [] if any(size == 0 for _, size, _ in row) else [dimension for dimension in row if dimension[1] != 1]


def _order(memory: Strided | None, row_rank: int) -> Order | None:
    """Returns the order in which the elements of a row have one stride; None if there is none, or if the row is one
    element."""
    row = sorted(_row(memory, row_rank), key=lambda dimension: -abs(dimension[2])) if memory is not None else []
    if not row or not any(stride for _, _, stride in row):
        return None
    order = tuple(dim for dim, _, _ in row)
    return order if _is_even(memory, order, row_rank) else None


def _is_even(memory: Strided | None, order: Order, row_rank: int) -> bool:
    """Returns whether a row in ``memory`` has one stride, which may be 0, if its dimensions are walked in ``order``."""
    if memory is None:
        return False
    sizes_and_strides = {dim: (size, stride) for dim, size, stride in _row(memory, row_rank)}
    row = [sizes_and_strides[dim] for dim in order if dim in sizes_and_strides]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(row))


def _common_order(memories: Iterable[Strided | None], row_rank: int) -> Order | None:
    """Returns the order that most of ``memories`` have, of equals the first; None if none has an order."""
    counts = Counter(order for memory in memories if (order := _order(memory, row_rank)) is not None)
    return max(counts, key=lambda order: counts[order], default=None)


def _with_copies(store: Store, uneven: Collection[int], order: Order, partition: Partition) -> Store:
    """Reads from temporaries the leaves of ``store`` in ``uneven``, and what is computed of nothing else."""
    builder = partition.mover.builder
    leaves = {id(leaf) for leaf in _leaves(store.value)}
    memo: dict[int, Node] = {}
    copied: dict[int, bool | None] = {}  # None: the same for all elements
    for node in topological([store.value]):
        known = {copied[id(child)] for child in node.inputs}
        if id(node) in leaves:
            memo[id(node)], copied[id(node)] = node, id(node) in uneven
        elif node.under_views.kind.is_number:
            memo[id(node)], copied[id(node)] = node, None
        elif node.kind.commutes and False not in known:
            memo[id(node)], copied[id(node)] = node, True if True in known else None
        else:
            children = [_copy(c, order, partition) if copied[id(c)] else memo[id(c)] for c in node.inputs]
            memo[id(node)], copied[id(node)] = builder.rebuilt(node, children), False
    value = memo[id(store.value)]
    return replace(store, value=_copy(value, order, partition) if copied[id(store.value)] else value)


def _copy(node: Node, order: Order, partition: Partition) -> Node:
    """Reads ``node`` from a temporary in which the dimensions of a row lie in ``order``; it has one element along
    dimensions that ``node`` does not vary along."""
    mover, dims = partition.mover, range(len(node.shape))
    one = one_of(node, [dim for dim in dims if dim not in order and not varies(node, [dim])], mover)
    permutation = (*(dim for dim in dims if dim not in order), *order)
    back = tuple(permutation.index(dim) for dim in dims)
    copied = mover.permute(partition.materialize(mover.permute(one, permutation)), back)
    return mover.move(copied, ("expand",), node.shape)
