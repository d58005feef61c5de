"""Divides pointwise expressions that are longer than compilers are quick with into several kernels.

A long expression has a *spine*: of each operation's operands, the one at the end of the longest path. A value of the
spine is stored every few hundred operations, with the few others that what follows soon reads beside it, and where an
operation of the same line was stored before. So the kernels of an unrolled loop end at the same step of it, are equal,
and are compiled once. What a backward reads off the spine of its forward is computed again from what is stored.

Neighbour: ``moved.py`` asks for each node of a graph that has such an expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jitgen.families.lengths import LONGEST, Lengths, length, length_of, operands_of, share_a_text
from jitgen.families.temporaries import Temporaries
from jitgen.ir.graph import Node, walked
from jitgen.ir.index import Index

CHUNK = LONGEST // 4
"""Operations of the spine between two values that are stored, at least. A backward's kernel has room for the operations
of a few, and for their gradients."""

MOST_COMPANIONS = 3
"""Values that are stored with one of the spine, at most: the states of a loop beside it, sums of gradients."""

MOST_COMPUTED = 2
"""How many times the operations of a graph its kernels may compute. Of a loop of 3 states and more a value of the spine
has too many others beside it, and what is not stored is computed again: 21 times the operations for 8 states."""

NAME = f"pointwise expressions of more than {LONGEST} operations are computed by several kernels"


def is_long(index: Index) -> bool:
    """Returns whether a pointwise expression of the graph is longer than ``LONGEST``."""
    lengths = Lengths()
    return length(index.order) > LONGEST and any(lengths.measured(node) > LONGEST for node in index.order)


def is_worth_it(index: Index, stored: Iterable[Node], results: Iterable[Node]) -> bool:
    """Returns whether values that are ``stored``, a kernel each, and ``results``, of which neighbours with most of
    their texts in common are one kernel, are computed by at most ``MOST_COMPUTED`` times the graph's operations."""
    computed, text = sum(length(walked([value], operands_of)) for value in stored), set[Node]()
    for value in results:
        nodes = set(walked([value], operands_of))
        if share_a_text(text, nodes):
            text |= nodes
        else:
            computed, text = computed + length(text), nodes
    return computed + length(text) <= MOST_COMPUTED * length(index.order)


class LongExpressions:
    """Divides the expressions of one graph, whose nodes are rebuilt in their order.

    Args:
        index: of the graph.
    """

    def __init__(self, index: Index, temporaries: Temporaries) -> None:
        self._temporaries, self._lengths = temporaries, Lengths()
        self._before: dict[Node, Node] = {}
        """Of each operation the operand that is on its spine."""
        self._next: dict[Node, Node] = {}
        """The reader on the longest spine that a node is on."""
        self._depths: dict[Node, int] = {}
        """Operations of the longest path to each node."""
        self._behind = dict.fromkeys(index.order, 0)
        """Operations of the spine behind each node."""
        self._since: dict[Node, int] = {}
        """Operations of the spine since a value was stored."""
        self._order: list[Node] = []
        self._places: dict[Node, int] = {}
        """Nodes that were rebuilt, in order, and where each is among them."""
        self._awaited: set[Node] = set()
        """Nodes that are stored when they are rebuilt."""
        self._ends: set[tuple[str, str | None]] = set()
        """Operation and line of values that were stored."""
        for node in index.order:
            operands = operands_of(node)
            if operands:
                self._before[node] = max(operands, key=self._depths.__getitem__)
            self._depths[node] = _own(node) + max((self._depths[operand] for operand in node.inputs), default=0)
        for node, before in reversed(self._before.items()):
            behind = _own(node) + self._behind[node]
            if behind > self._behind[before]:
                self._behind[before], self._next[before] = behind, node

    def shortened(self, node: Node, rebuilt: Node, memo: dict[int, Node]) -> Node:
        """Returns ``rebuilt``, or its expression divided.

        Args:
            node: of the graph, which is rebuilt as ``rebuilt``.
            memo: what the nodes before it are rebuilt as, by their ids; those that read what is stored are changed.
        """
        self._places[node] = len(self._order)
        self._order.append(node)
        memo[id(node)] = rebuilt
        before = self._before.get(node)
        self._since[node] = 0 if before is None else self._since[before] + _own(node)
        if before is None or not (node.kind.is_pointwise and rebuilt.kind.is_pointwise):
            return rebuilt
        while self._lengths.measured(memo[id(node)]) > LONGEST and (end := self._end_before(node, memo)) is not None:
            self._store(end, memo)
        if node in self._awaited or self._is_end(node):
            self._store(node, memo)
        return memo[id(node)]

    def _is_end(self, node: Node) -> bool:
        """Returns whether ``node`` is stored though its expression is not too long."""
        since, is_known = self._since[node], not self._ends or (node.op, node.location) in self._ends
        is_chunk = since >= CHUNK and self._behind[node] >= CHUNK and (is_known or since >= 2 * CHUNK)
        return is_chunk and not self._companions(node)

    def _end_before(self, node: Node, memo: dict[int, Node]) -> Node | None:
        """Returns the value before ``node`` that is stored, since the expression is too long: of the spine the last one
        with the fewest others beside it, or the longest operand where there are too many."""
        ends = [(len(self._companions(end)), place, end) for place, end in enumerate(self._spine(node, memo))]
        others, _, end = min(ends, default=(MOST_COMPANIONS + 1, 0, node))
        if others <= MOST_COMPANIONS:
            return end
        operands = [operand for operand in operands_of(node) if self._lengths.measured(memo[id(operand)])]
        return max(operands, key=lambda operand: self._lengths.measured(memo[id(operand)]), default=None)

    def _spine(self, node: Node, memo: dict[int, Node]) -> Iterator[Node]:
        """Yields the nodes of the spine before ``node``, the last one first, up to one that is stored."""
        while (before := self._before.get(node)) is not None and self._lengths.measured(memo[id(before)]):
            if before.kind.is_pointwise:
                yield before
            node = before

    def _companions(self, node: Node) -> list[Node]:
        """Returns which of the ``CHUNK`` operations before ``node`` the next ``CHUNK`` of the spine read beside it."""
        depth, last = self._depths[node], node
        while last in self._next and self._depths[self._next[last]] <= depth + CHUNK:
            last = self._next[last]
        read = walked([last], lambda other: operands_of(other) if self._depths[other] > depth else ())
        near = (other.under_views for other in read if depth - CHUNK < self._depths[other] <= depth)
        return [other for other in near if other is not node and _own(other)]

    def _store(self, node: Node, memo: dict[int, Node]) -> None:
        """Stores ``node``, which is rebuilt, and its companions; nodes behind them that are rebuilt read what is
        stored."""
        companions = self._companions(node)
        for other in [node, *(companions if len(companions) <= MOST_COMPANIONS else ())]:
            if other in self._places:
                self._store_alone(other, memo)
            else:
                self._awaited.add(other)

    def _store_alone(self, node: Node, memo: dict[int, Node]) -> None:
        mover = self._temporaries.mover
        mover.fired[NAME] = None
        self._ends.add((node.op, node.location))
        stored = {id(memo[id(node)]): self._temporaries.materialize(memo[id(node)])}
        for other in self._order[self._places[node] :]:
            memo[id(other)] = mover.substituted(memo[id(other)], stored)
            before = self._before.get(other)
            is_computed = before is not None and self._lengths.measured(memo[id(other)]) > 0
            self._since[other] = self._since[before] + _own(other) if before is not None and is_computed else 0


def _own(node: Node) -> int:
    return length_of(node.op) if node.kind.is_pointwise and not node.kind.is_number else 0
