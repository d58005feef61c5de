"""Divides pointwise expressions that are longer than compilers are quick with into several kernels.

There is a *cut* every few hundred operations of a graph, in its order: what is computed before it and read soon behind
it, such as the states of an unrolled loop, is stored, by one kernel where it has most of its text in common. Of the
nodes around, a cut is at one that few values pass, of the operation and line of an earlier cut if there is such a one.
So the kernels of a loop end at the same step of it, are equal, and are compiled once. What is read far behind a cut, as
a backward reads its forward, is computed again from what is stored, and what is too long then has its longest operands
stored.

Neighbour: ``moved.py`` asks for each node of a graph that has such an expression.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from jitgen.families.lengths import LONGEST, Lengths, length, length_of, operands_of
from jitgen.families.temporaries import Temporaries
from jitgen.ir.graph import Node, walked
from jitgen.ir.index import Index

CHUNK = LONGEST // 4
"""Operations between two cuts, at least, and how far behind a cut those are that read soon. A backward's kernel has
room for the operations of a few chunks, and for their gradients."""

OPERATIONS_PER_VALUE = 16
"""How many operations are worth storing a value. Backwards of loops then compute at most 2.5 times what their graphs
do, and 4.1 times with 64, which take an H100 as long as writing and reading a value of float32."""

NAME = f"pointwise expressions of more than {LONGEST} operations are computed by several kernels"


def is_long(index: Index) -> bool:
    """Returns whether a pointwise expression of the graph is longer than ``LONGEST``."""
    lengths = Lengths()
    return length(index.order) > LONGEST and any(lengths.measured(node) > LONGEST for node in index.order)


class LongExpressions:
    """Divides the expressions of one graph, whose nodes are rebuilt in the order ``order``.

    Args:
        index: of the graph.
    """

    def __init__(self, index: Index, temporaries: Temporaries) -> None:
        self._temporaries, self._lengths = temporaries, Lengths()
        self.order = min(_orders(index), key=_waiting)
        operations = _Operations([node for node in self.order if _own(node)])
        self._passing = dict(zip(operations.order, operations.passing, strict=True))
        self._cuts = operations.cuts()
        self._before: Sequence[Node] = ()

    def stores_operand(self, node: Node, rebuilt: Node, memo: dict[int, Node]) -> bool:
        """Stores what would pass a cut before ``node``, or else its longest operand, if it is too long as it is
        ``rebuilt``; returns whether it is to be rebuilt again.

        Args:
            memo: what the nodes before it are rebuilt as, by their ids; those that are stored are changed.
        """
        is_text = node.kind.is_pointwise and rebuilt.kind.is_pointwise
        if not is_text or self._lengths.measured(rebuilt) <= LONGEST:
            return False
        operands = (operand.under_views for operand in operands_of(node))
        longest = max(operands, key=lambda operand: self._lengths.measured(memo[id(operand)]))
        return self._store(self._before, memo) or self._store([longest], memo)

    def cut(self, node: Node, memo: dict[int, Node]) -> None:
        """Stores what passes the cut behind ``node``, if there is one: nodes from here on read it from memory."""
        self._before = self._passing.get(node, self._before)
        self._store(self._cuts.get(node, ()), memo)

    def _store(self, values: Iterable[Node], memo: dict[int, Node]) -> bool:
        values = [value for value in values if self._lengths.measured(memo[id(value)])]
        new = [value for value in values if self._temporaries.get(memo[id(value)]) is None]
        if new:
            self._temporaries.mover.fired[NAME] = None
            self._temporaries.materialize_together([memo[id(value)] for value in new])
        memo |= {id(value): self._temporaries.materialize(memo[id(value)]) for value in values}
        return bool(values)


def _orders(index: Index) -> Iterator[Sequence[Node]]:
    """Yields orders of all nodes: one that goes to the end of each operand, as sums of many values want it, and by the
    operations behind each node, as states of a loop and their gradients do."""
    yield index.order
    behind = dict.fromkeys(index.order, 0)
    for node in reversed(index.order):
        for operand in node.inputs:
            behind[operand] = max(behind[operand], behind[node] + _own(node))
    yield sorted(index.order, key=lambda node: -behind[node])


def _waiting(order: Sequence[Node]) -> int:
    """Returns how many nodes of ``order`` there are between values and the last that read them, in all."""
    numbers = {node: number for number, node in enumerate(order)}
    last = {operand: number for number, node in enumerate(order) for operand in node.inputs}
    return sum(number - numbers[operand] for operand, number in last.items())


class _Operations:
    """Knows which values pass a cut between two operations of a graph.

    Attributes:
        order: the operations.
        times: the length of those before each, and of all.
        readers: the numbers of the operations that read each.
        passing: for each, the values that are read soon behind it, and were computed not long before.
    """

    def __init__(self, order: Sequence[Node]) -> None:
        self.order, self.times = order, [0, *accumulate(map(_own, order))]
        self.readers: dict[Node, list[int]] = {node: [] for node in order}
        for number, node in enumerate(order):
            for value in walked(operands_of(node), lambda operand: () if _own(operand) else operands_of(operand)):
                if value in self.readers:
                    self.readers[value].append(number)
        self.passing: list[list[Node]] = [[] for _ in order]
        for number, value in enumerate(order):
            start, end = number, bisect_left(self.times, self.times[number] + LONGEST)
            for reader in self.readers[value]:
                for cut in range(max(start, bisect_left(self.times, self.times[reader] - CHUNK)), min(reader, end)):
                    self.passing[cut].append(value)
                start = reader

    def cuts(self) -> Mapping[Node, Sequence[Node]]:
        """Maps operations to the values that are stored at the cut behind them."""
        stored: dict[Node, Sequence[Node]] = {}
        ends: set[tuple[str, str | None]] = set()
        first, candidates = 0, list[tuple[int, bool, int]]()
        for number, node in enumerate(self.order):
            end, passing = self.times[number + 1], len(self.passing[number])
            least = min(max(CHUNK, OPERATIONS_PER_VALUE * passing), 2 * CHUNK)
            if end - self.times[first] >= least and self.times[-1] - end >= CHUNK:
                candidates.append((passing, (node.op, node.location) not in ends, number))
            if candidates and end - self.times[candidates[0][2]] > CHUNK:
                *_, cut = min(candidates)
                last = self.order[cut]
                stored[last] = self._stored(first, cut)
                ends.add((last.op, last.location))
                first, candidates = cut + 1, []
        return stored

    def _stored(self, first: int, cut: int) -> Sequence[Node]:
        """Returns what is stored at a cut: what passes it, and what operations from ``first`` on have computed for
        others far behind it, unless these are too many."""
        passing = self.passing[cut]
        read = [value for value in self.order[first : cut + 1] if max(self.readers[value], default=0) > cut]
        is_few = len(read) <= max(2 * len(passing), (self.times[cut + 1] - self.times[first]) // OPERATIONS_PER_VALUE)
        return list(dict.fromkeys([*passing, *read])) if is_few else passing


def _own(node: Node) -> int:
    return length_of(node.op) if node.kind.is_pointwise and not node.kind.is_number else 0
