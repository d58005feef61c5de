"""Decides which arguments are changed where they are, because a function replaces some of their elements.

Each scatter into such an argument is a *change*, so that it has *states*: what it was, and what it is after each
change. Whoever reads the last state reads the argument when all is done. A value that is computed of an earlier state
is stored before the change that ends the state. The values of a change itself need no temporary where each is computed
of the element that it replaces, as in ``x[5].add_(1)``.

A state is an ``input`` node of its own with the argument's number; the last one is the argument's usual node. So values
of two states are never one.

Neighbours: ``families/moved.py`` makes the states, ``families/steps.py`` orders who reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jitgen.families.updates import is_input, is_scatter_into
from jitgen.ir.analysis import rewritten_graph
from jitgen.ir.graph import Graph, Node, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import INPUT, SCATTER, VIEW
from jitgen.ir.views import Mover


class State(NamedTuple):
    """Identifies what an argument is after some changes.

    Attributes:
        argument: the number of the input.
        changes: how many changes it has had.
    """

    argument: int
    changes: int


@dataclass(frozen=True)
class Changes:
    """Describes how arguments are changed where they are.

    Attributes:
        chains: the scatters into each argument, in order, by its number.
        states: the nodes of the graph that are states.
        stored: the nodes that are computed of an earlier state, and stored before it ends.
        early: the arguments that are changed before others are computed, which read the last state.
    """

    chains: Mapping[int, Sequence[Node]]
    states: Mapping[Node, State]
    stored: frozenset[Node]
    early: frozenset[int]


def with_written_reshapes(graph: Graph, mover: Mover) -> Graph:
    """Returns ``graph`` with elements of a reshaped argument replaced in the argument, as those of a diagonal are: a
    reshape of such a scatter into a reshape is one scatter, whose movements have the reshape first."""
    joined = {node for number, value in graph.mutated for node in _reshaped_scatters(value, number)}
    if not joined:
        return graph

    def change(node: Node, rebuilt: Node) -> Node:
        if node not in joined:
            return rebuilt
        (scatter,) = rebuilt.inputs
        reshape, *others = scatter.inputs
        movements = ((reshape.attrs, reshape.shape), *scatter.attrs.movements)
        attrs = scatter.attrs._replace(movements=movements)
        return mover.builder.like(scatter, (reshape.inputs[0], *others), node.shape, attrs)

    return rewritten_graph(graph, mover, change)


def _reshaped_scatters(value: Node, number: int) -> list[Node]:
    """Returns the reshapes of scatters into reshapes by which ``value`` is a new value of input ``number``."""
    reshaped: list[Node] = []
    while value.kind is SCATTER or (_is_reshape(value) and value.inputs[0].kind is SCATTER):
        base = value.inputs[0]
        if value.kind is VIEW:
            reshape = base.inputs[0]
            if not _is_reshape(reshape) or reshape.inputs[0].shape != value.shape:
                return []
            reshaped.append(value)
            base = reshape.inputs[0]
        value = base
    return reshaped if is_input(value, number) else []


def _is_reshape(node: Node) -> bool:
    return node.kind is VIEW and node.attrs.kind == "reshape"


def changes_of(graph: Graph, index: Index) -> Changes:
    """Returns the changes of the arguments that ``graph`` updates; others are computed anew.

    Args:
        index: of the graph's results.
    """
    chains = {number: _chain(node, number) for number, node in graph.mutated}
    chains = {number: chain for number, chain in chains.items() if chain}
    inputs = {node.attrs.number: node for node in index.order if node.kind is INPUT}
    while True:
        states = {inputs[number]: State(number, 0) for number in chains}
        for number, chain in chains.items():
            states |= {change: State(number, count) for count, change in enumerate(chain, 1)}
        stored = _stored(graph, index, chains, states)
        refused = {states[node].argument for node in stored if node in states}
        if not refused:
            of_stored = {state.argument for node in stored for state in stored[node]}
            several = {number for number, chain in chains.items() if len(chain) > 1 or index.users[chain[-1]]}
            return Changes(chains, states, frozenset(stored), frozenset(several | of_stored))
        chains = {number: chain for number, chain in chains.items() if number not in refused}


def _chain(value: Node, number: int) -> list[Node]:
    """Returns the scatters, in their order, that make ``value`` of input ``number``; empty where it is computed
    otherwise."""
    chain = [value]
    while chain[0].kind is SCATTER and chain[0].inputs[0].kind is SCATTER:
        chain.insert(0, chain[0].inputs[0])
    return chain if is_scatter_into(chain[0], number) else []


def _stored(
    graph: Graph, index: Index, chains: Mapping[int, Sequence[Node]], states: Mapping[Node, State]
) -> dict[Node, frozenset[State]]:
    """Returns the nodes to store, each with its state: those that are computed from one earlier state alone and are
    read by something that is not. A state among them would be copied as a whole."""
    reads: dict[Node, frozenset[State]] = {}
    for node in index.order:
        of_others = (reads[child] for child in node.inputs)
        reads[node] = frozenset([states[node]]) if node in states else frozenset().union(*of_others)

    def is_early(node: Node) -> bool:
        return len(reads[node]) == 1 and all(state.changes < len(chains[state.argument]) for state in reads[node])

    stored: dict[Node, frozenset[State]] = {}
    for user in index.order:
        for node in user.inputs[user in states :]:  # a change writes into the memory of the state before it
            ends = is_early(node) and (user in states or reads[user] != reads[node])
            if ends and not (user in states and _is_own(node, user, reads)):
                stored[node] = reads[node]
    changed = {chain[-1] for chain in chains.values()}
    return stored | {root: reads[root] for root in graph.results if root not in changed and is_early(root)}


def _is_own(value: Node, change: Node, reads: Mapping[Node, Collection[State]]) -> bool:
    """Returns whether each element of ``value`` depends, of the state before ``change``, on no element but the one that
    it replaces, and on no other earlier state."""
    kind, coordinates, movements = change.attrs
    if kind != "set" or len(change.inputs) != 2 or coordinates != tuple(range(len(value.shape))):
        return False
    before = change.inputs[0]
    for node in walked([value], lambda node: node.inputs if node.kind.is_pointwise else ()):
        if node.kind.is_pointwise or not reads[node]:
            continue
        if node.under_views is not before or node.movements != movements:
            return False
    return True
