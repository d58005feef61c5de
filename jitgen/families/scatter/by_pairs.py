"""Stores updates whose values may choose one element by a pointwise kernel: comparing the indices of every pair of
values finds the last value of each element before.

An append of tokens to pages has no proof that pages are distinct, and a walk in order leaves a GPU's threads waiting
for memory at each token. Tokens of a step are few, so that all pairs of them are compared in less time; keys and values
share the answer. A value that another one replaces gets the index ``LEFT_OUT``, which no kernel reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Partition, Question, SizeBuckets
from jitgen.families.scatter import by_element
from jitgen.ir import symbols
from jitgen.ir.analysis import one_of, varying_dims
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import GATHER, SCATTER
from jitgen.ir.program import Decision
from jitgen.ir.scatters import LEFT_OUT

MOST_PAIRS = {True: 2**26, False: 2**14}
"""Pairs of values, on a GPU and on a CPU, that are compared in less time than a walk in their order takes (estimates:
an H200 compares 2**26 in about 0.1 ms; a CPU walks values as fast as it copies them)."""


@dataclass(frozen=True)
class Pairs(Question):
    """Asks whether the last value of each element is found by comparing ``pairs`` of values."""

    placements = ("beside other results, after the last value of each element is found", "a kernel of its own")
    pairs: Any

    def __str__(self) -> str:
        return f"scatter whose values make {self.pairs} pairs"

    def decide(self, device: Device) -> Decision:
        """Returns whether they are compared."""
        if self.pairs <= MOST_PAIRS[device.is_gpu]:
            return Decision(True, "the indices of each pair are compared, and the last value of an element stays")
        return Decision(False, "there are too many pairs to compare")


def decide(question: Any, device: Device) -> Decision:
    """Returns the answer to a question of this family; see ``Family.decide``."""
    return question.decide(device) if isinstance(question, Pairs) else by_element.decide(question, device)


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns how many values of each scatter of ``graph`` may choose one element, such as the tokens of an
    ``index_add``, and up to how many they are walked, or compared in pairs."""
    buckets_ = []
    for node in topological(graph.results):
        if node.kind is SCATTER:
            value = node.inputs[1]
            walked = [dim for dim in range(len(value.shape)) if dim not in node.attrs.coordinates]
            ends = {by_element.SHORT_WALK} if device.is_gpu else set()
            if node.attrs.kind == "set":
                others = frozenset().union(*map(varying_dims, node.inputs[2:])).difference(walked)
                rest = symbols.evaluate(symbols.product(value.shape[dim] for dim in others), environment)
                ends.add(math.isqrt(MOST_PAIRS[device.is_gpu] // max(rest, 1)))
            # The last of several dimensions is the length of a row, and not how many there are.
            rows = [dim for dim in walked if dim < len(value.shape) - 1 or dim == 0]
            buckets_.append(SizeBuckets(symbols.product(value.shape[dim] for dim in rows), tuple(sorted(ends))))
    return buckets_


def with_last_values(node: Node, partition: Partition, family: str) -> Node | None:
    """Returns the scatter ``node``, which replaces elements of an argument, with distinct elements: values that a later
    one replaces are left out. None where there are too many pairs of values."""
    base, value, *indices = node.inputs
    walked = [dim for dim, size in enumerate(value.shape) if dim not in node.attrs.coordinates and size != 1]
    kept = sorted(frozenset(walked).union(*map(varying_dims, indices)))
    sizes = [value.shape[dim] for dim in kept]
    pairs = symbols.product([*sizes, *(value.shape[dim] for dim in walked)])
    if not partition.decide(family, Pairs(pairs)).fused:
        return None
    mover, make = partition.mover, partition.mover.builder.make
    others = [dim for dim in range(len(value.shape)) if dim not in kept]
    rank, count = len(kept), len(walked)
    shape = (*sizes, *(value.shape[dim] for dim in walked))

    def of_pairs(index: Node, order: Sequence[int]) -> Node:
        """Returns an index of one value of each pair; ``order`` are the pairs' dimensions as that value has them."""
        index = _squeezed(one_of(index, others, mover), others, mover)
        if GATHER in index.kinds:
            index = partition.materialize(index)  # which is looked up once for each value, and not for each pair
        for number in range(count):
            index = mover.unsqueeze(index, rank + number)
        index = mover.move(index, ("expand",), tuple(shape[dim] for dim in order))
        return mover.move(index, ("permute", tuple(order)), shape)

    first_order = list(range(rank + count))
    second_order = list(first_order)
    for number, dim in enumerate(walked):
        at = kept.index(dim)
        second_order[at], second_order[rank + number] = rank + number, at

    def position(dims: Sequence[int]) -> Node:
        last: Node = mover.builder.const(0, "int64")
        step: Any = 1
        for dim in reversed(dims):
            along = make("iota", (), "int64", shape, (dim,))
            steps = make("mul", (along, mover.builder.scalar(step, "int64")), "int64", shape)
            last = make("add", (last, steps), "int64", shape)
            step = symbols.mul(step, shape[dim])
        return last

    later = make("gt", (position(range(rank, rank + count)), position([kept.index(d) for d in walked])), "bool", shape)
    for index in indices:
        if not index.kind.is_number:
            same = make("eq", (of_pairs(index, first_order), of_pairs(index, second_order)), "bool", shape)
            later = make("bitwise_and", (later, same), "bool", shape)
    dims = tuple(range(rank, rank + count))
    replaced = make("reduce", (later,), "bool", (*sizes, *[1] * count), ("any", dims), node.location)
    replaced = partition.materialize(replaced)
    for dim in reversed(dims):
        replaced = mover.move(replaced, ("squeeze", dim), replaced.shape[:-1])
    for dim in others:
        replaced = mover.unsqueeze(replaced, dim)
    replaced = mover.move(replaced, ("expand",), value.shape)
    first = make("where", (replaced, mover.builder.const(LEFT_OUT, "int64"), indices[0]), "int64", value.shape)
    return mover.builder.like(node, (base, value, first, *indices[1:]))


def _squeezed(node: Node, dims: Sequence[int], mover: Any) -> Node:
    for dim in reversed(dims):
        node = mover.move(node, ("squeeze", dim), (*node.shape[:dim], *node.shape[dim + 1 :]))
    return node
