"""Indexes a graph: in which order its nodes are computed, who reads a node, and which nodes stand behind another.

A pass makes one index of the values it looks at, and hands it to the functions that ask. Nodes are frozen, so an index
stays true; a pass that rewrites its values makes another one of what it has then. ``Node.kinds`` says of a single node
which kinds of nodes it is computed by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jitgen.ir.graph import Node, postorder, topological, walked


class Index:
    """Indexes ``roots`` and all nodes that they depend on.

    Attributes:
        roots: the values that it is made of.
        order: the nodes, each after its inputs.
    """

    def __init__(self, roots: Iterable[Node]):
        self.roots = tuple(roots)
        self.order: Sequence[Node] = topological(self.roots)
        self._number: dict[Node, int] = {}
        self._behind: list[int] = []

    @functools.cached_property
    def users(self) -> Mapping[Node, Sequence[Node]]:
        """Returns the nodes that read a node, in their order; one that reads it twice is there twice."""
        users: dict[Node, list[Node]] = {node: [] for node in self.order}
        for node in self.order:
            for child in node.inputs:
                users[child].append(node)
        return users

    def depends(self, node: Node, on: Node) -> bool:
        """Returns whether ``node`` is ``on`` or is computed from it. ``node`` may be one that no root depends on."""
        behind, number = self.behind(node), self._number.get(on)
        return number is not None and bool(behind >> number & 1)

    def set_of(self, nodes: Iterable[Node]) -> int:
        """Returns ``nodes`` as a set of numbers, a bit for each."""
        numbers = 0
        for node in nodes:
            self.behind(node)
            numbers |= 1 << self._number[node]
        return numbers

    def behind_several(self, nodes: Iterable[Node]) -> Callable[[Node, Node], bool]:
        """Returns whether, given one of ``nodes`` and another node, one of the other ``nodes`` is computed from the
        second; ``nodes`` may have one node twice."""
        once = twice = 0
        for node in nodes:
            behind = self.behind(node)
            once, twice = once | behind, twice | once & behind

        def is_behind_another(node: Node, on: Node) -> bool:
            number = self._number.get(on)
            return number is not None and bool((once & ~self.behind(node) | twice) >> number & 1)

        return is_behind_another

    def reached(self, sources: Iterable[Node], stops: Callable[[Node], bool] = lambda _: False) -> set[Node]:
        """Returns ``sources`` and the nodes that are computed from them on paths without a node for which ``stops``
        holds."""

        def readers(node: Node) -> Iterator[Node]:
            return (user for user in self.users[node] if not stops(user))

        return set(walked((source for source in sources if not stops(source)), readers))

    def behind(self, node: Node) -> int:
        """Returns ``node`` and the nodes that it is computed from, as ``set_of`` does."""
        for one in postorder([node], lambda one: () if one in self._number else one.inputs):
            if one not in self._number:
                self._number[one] = number = len(self._behind)
                behind = 1 << number
                for child in one.inputs:
                    behind |= self._behind[self._number[child]]
                self._behind.append(behind)
        return self._behind[self._number[node]]


class Reach:
    """Tells what is computed from some nodes, the sources, on paths without others, the stops.

    It can be asked about nodes that no root of the index depends on, such as those that a movement makes: ``is_source``
    says which of them are sources.
    """

    def __init__(
        self, index: Index, sources: Iterable[Node], is_source: Callable[[Node], bool], stops: Callable[[Node], bool]
    ):
        self._index, self._is_source, self._stops = index, is_source, stops
        self._reached = index.reached(sources, stops)

    def __contains__(self, node: Node) -> bool:
        def below(node: Node) -> Iterator[Node]:
            return (child for child in node.inputs if not self._stops(child)) if self._is_new(node) else iter(())

        nodes = walked(() if self._stops(node) else (node,), below)
        return any(top in self._reached or (self._is_new(top) and self._is_source(top)) for top in nodes)

    def _is_new(self, node: Node) -> bool:
        return node not in self._index.users
