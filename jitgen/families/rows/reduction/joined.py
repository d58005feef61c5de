"""Computes a row that is joined of equal lengths in one pass over it, such as the rotary embedding of a normalised row.

In ``n * cos + cat([-n2, n1]) * sin``, with ``n`` the row ``x`` over its root mean square, an element needs another one
of its row. So the row is walked along one half, with both halves at once: the sum of ``x * x`` is that of
``x1 * x1 + x2 * x2``, and each step stores one element of either half. Pairs of neighbours, which are a ``stack`` that
is flattened, are walked in steps of two. What is stored holds no ``cat`` then, and every row is read once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.analysis import sliced
from jitgen.ir.graph import Node, topological, walked
from jitgen.ir.nodes import CAT, REDUCE, VIEW
from jitgen.ir.regions import Store
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover
from jitgen.spec import DTYPES

COMBINED = {"sum": "add", "max": "maximum", "min": "minimum"}
"""For each reduction that is divided, the operation that combines two of its elements."""

MOST_LENGTHS = 2
"""Lengths of a row that are walked at once. A thread has elements of each in registers: those of four spill (NVRTC for
sm_90a)."""


@dataclass(frozen=True)
class _Lengths:
    """Describes the lengths that a row is joined of.

    Attributes:
        dim: the dimension of the row; where lengths are neighbours, one that joins them follows it.
        count: of the lengths, which have ``size`` elements each.
        are_neighbours: whether element i of each length are neighbours in the row; else a length is.
    """

    dim: int
    count: int
    size: Size
    are_neighbours: bool

    def cut(self, node: Node, number: int, mover: Mover) -> Node:
        """Returns the elements of length ``number`` of ``node``, a whole row."""
        before, after = node.shape[: self.dim], node.shape[self.dim + 1 :]
        if not self.are_neighbours:
            return mover.slice(node, self.dim, symbols.mul(self.size, number), self.size)  # type: ignore[arg-type]
        flat = mover.move(node, ("squeeze", self.dim + 1), (*before, node.shape[self.dim], *after[1:]))
        every = mover.move(flat, ("slice", self.dim, number, self.count), (*before, self.size, *after[1:]))
        return mover.move(every, ("unsqueeze", self.dim + 1), (*before, self.size, *after))


def stores_of_lengths(store: Store, mover: Mover) -> list[Store]:
    """Returns the stores of the lengths that the value of ``store`` is joined of, with each reduction of the row one of
    its lengths combined; ``store`` alone where its value is joined otherwise, or not."""
    joined = next(_joins(store.value), None)
    if joined is None:
        return [store]
    whole = store
    if joined.kind is VIEW:
        shape = joined.inputs[0].shape
        whole = store.moved(("reshape",), shape, lambda node: mover.move(node, ("reshape",), shape))
    joins = list(_joins(whole.value))
    lengths = _lengths(joins, whole.value, mover)
    if lengths is None:
        return [store]
    combined = _combined_reductions(whole.value, lengths, mover)

    def with_combined(node: Node) -> Node:
        return mover.substituted(node, dict(combined))

    dim, size = joins[0].attrs.dim, joins[0].inputs[0].shape[-1]
    stores = []
    for number in range(lengths.count):
        start: Size = symbols.mul(size, number)  # type: ignore[assignment]
        memo = {id(join): mover.slice(join.inputs[number], dim, 0, size) for join in joins}
        cut = functools.partial(sliced, dim=dim, start=start, length=size, mover=mover, memo=memo)
        one = whole.moved(("slice", dim, start, 1), (*whole.value.shape[:dim], size), cut)
        stores.append(one.with_sources(with_combined))
    return stores


def _joins(root: Node) -> Iterator[Node]:
    """Yields the concatenations, and the reshapes of one, that are computed at the coordinates of ``root``."""

    def is_join(node: Node) -> bool:
        source = node.inputs[0] if node.kind is VIEW and node.attrs.kind == "reshape" else node
        return source.kind is CAT

    return filter(is_join, walked([root], lambda node: node.inputs if node.kind.is_pointwise else ()))


def _lengths(joins: list[Node], value: Node, mover: Mover) -> _Lengths | None:
    """Returns the lengths along which the row of ``value`` is walked: those of all its ``joins``. None where these are
    not equal, have more joins in them, or ``value`` has a reduction that is none of such rows."""
    last = len(value.shape) - 1
    if any(join.kind is not CAT or join.attrs.dim != last for join in joins):
        return None
    count, size = len(joins[0].inputs), joins[0].inputs[0].shape[last]
    pieces = [piece for join in joins for piece in join.inputs]
    if count > MOST_LENGTHS or any(len(join.inputs) != count for join in joins):
        return None
    if any(REDUCE not in piece.kinds or any(_joins(piece)) for piece in pieces):
        return None
    are_neighbours = size == 1
    lengths = _Lengths(last - are_neighbours, count, value.shape[last - 1] if are_neighbours else size, are_neighbours)
    reductions = [node for node in topological([value]) if node.kind is REDUCE]
    if not all(_is_divisible(node, lengths, mover) for node in reductions):
        return None
    same = [symbols.compare("eq", piece.shape[last], size) for piece in pieces]
    return lengths if all(map(mover.decide, same)) else None


def _is_divisible(reduction: Node, lengths: _Lengths, mover: Mover) -> bool:
    """Returns whether ``reduction`` combines the elements of a row of ``lengths`` that are computed by themselves, or
    from other reductions."""
    (operand,), (kind, dims) = reduction.inputs, reduction.attrs
    is_same = operand.dtype == reduction.dtype or DTYPES[operand.dtype].is_floating_point
    if kind not in COMBINED or dims != (lengths.dim,) or not is_same:
        return False
    if any(not (node.kind.is_pointwise or node.kind.is_number) for node in _computed(operand)):
        return False
    whole = symbols.mul(lengths.size, lengths.count)
    return mover.decide(symbols.compare("eq", operand.shape[lengths.dim], whole))


def _computed(root: Node) -> Iterator[Node]:
    """Yields the nodes from which ``root`` is computed, down to tensors and reductions that are spread along a row."""

    def is_computed(node: Node) -> bool:
        return not node.is_in_memory and node.under_expand.kind is not REDUCE

    return walked(filter(is_computed, [root]), lambda node: filter(is_computed, node.inputs))


def _combined_reductions(root: Node, lengths: _Lengths, mover: Mover) -> dict[int, Node]:
    """Returns what each reduction under ``root`` becomes, by its id: one of a length, whose elements combine those of
    all ``lengths``."""
    combined: dict[int, Node] = {}
    for node in topological([root]):
        if node.kind is REDUCE:
            first, *others = (lengths.cut(node.inputs[0], number, mover) for number in range(lengths.count))
            for other in others:
                first = mover.builder.make(COMBINED[node.attrs.kind], (first, other), first.dtype, first.shape)
            combined[id(node)] = mover.builder.like(node, [mover.substituted(first, dict(combined))])
    return combined
