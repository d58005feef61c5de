"""Computes the least that a graph needs of memory and arithmetic: each input read once, each result written once, and
each value computed once, as far as something needs it.

It is a lower bound, which ``explain()`` compares a plan with (``jitgen/balance.py``). Where a node needs a share of its
elements, as a slice of a product does, its operands are needed by the same share. Pointwise operations that only say
which elements are read or written, such as the wrap of a negative index, count as addresses do: not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import GATHER, INPUT, SCATTER, SORT, VIEW, Reads
from jitgen.spec import DTYPES

_VALUES = {GATHER.name: 1, SCATTER.name: 2}
"""How many operands of a node are values; the further ones are indices."""


@dataclass(frozen=True)
class Least:
    """Counts what no plan of a graph can do without.

    Attributes:
        moved: bytes read and written.
        flops: operations, by the node table.
    """

    moved: int
    flops: int


def least(graph: Graph, environment: Mapping[str, Any]) -> Least:
    """Returns the least that ``graph`` needs, where ``environment`` has a value for every symbol of its shapes."""

    def size(node: Node) -> int:
        return math.prod(symbols.evaluate(length, environment) for length in node.shape)

    needed: dict[int, int] = defaultdict(int)
    written: dict[int, tuple[Node, int]] = {}

    def write(node: Node, copied: bool = False) -> None:
        """Notes that ``node`` is stored; a view of it is not stored again, one of an input only if ``copied``."""
        base = node if copied else node.under_views
        if copied or base.kind is not INPUT:
            needed[id(node)] += size(node)
            _, before = written.get(id(base), (base, 0))
            written[id(base)] = base, min(size(base), before + size(node))

    updates = {id(node) for _, node in graph.mutated}
    for output in graph.outputs:
        if id(output.under_views) not in updates:
            write(output)
    for number, value in graph.mutated:
        for node in _stored(value, number):
            write(node, copied=True)
    moved = sum(count * DTYPES[node.dtype].itemsize for node, count in written.values())
    flops = 0
    valued = {id(node) for node in graph.results}
    for node in reversed(topological(graph.results)):
        elements = min(size(node), needed[id(node)])
        if node.kind is INPUT:
            moved += elements * DTYPES[node.dtype].itemsize
        if id(node) in valued or node.kind.reads not in (Reads.OWN, Reads.MOVED):
            flops += elements * symbols.evaluate(node.kind.flops(node), environment)
            valued.update(map(id, node.inputs[: _VALUES.get(node.kind.name, len(node.inputs))]))
        if node.kind is SORT:  # an element of a rank needs its whole row
            elements = min(size(node), elements * symbols.evaluate(node.shape[node.attrs.dim], environment))
        if elements:
            for position, operand in enumerate(node.inputs):
                needed[id(operand)] += _share(node, position, elements, size(node), size(operand))
    return Least(moved, flops)


def _share(node: Node, position: int, elements: int, size: int, operand: int) -> int:
    """Returns how many elements of an operand, of ``operand`` in all, ``elements`` of ``node`` need, of ``size``."""
    if node.kind.reads is Reads.FIRST:
        return elements if position == 0 else 0
    if node.kind.reads in (Reads.OWN, Reads.MOVED) or (node.kind is GATHER and position == 0):
        return elements
    return math.ceil(operand * elements / size)


def _stored(value: Node, number: int) -> Iterator[Node]:
    """Yields what an update of input ``number`` to ``value`` stores: of scatters into it, or into a reshape of it, only
    what they scatter."""
    while value.kind is SCATTER or (value.kind is VIEW and value.attrs.kind == "reshape"):
        yield from value.inputs[1:2]
        value = value.inputs[0]
    if not (value.kind is INPUT and value.attrs.number == number):
        yield value
