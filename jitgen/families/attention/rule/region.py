"""Builds regions of attention and of its gradients: products of matrices in memory, one for each head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jitgen.families.attention.rule.heads import Split, with_split
from jitgen.families.attention.rule.views import last_two
from jitgen.families.family import Partition
from jitgen.ir.analysis import one_of, varying_dims
from jitgen.ir.equations import equation
from jitgen.ir.graph import Node, Shape, walked
from jitgen.ir.nodes import CAT, VIEW


def stops(roots: Sequence[Node], known: Collection[int]) -> list[Node]:
    """Returns the nodes at which the rules of ``roots`` end, since their elements depend on other elements. All are in
    memory before the kernel but the products of a tile and the values of rows.

    Args:
        known: the ids of nodes that are left out, with what is behind them.
    """

    def unknown(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if id(node) not in known]

    nodes = walked(unknown(roots), lambda node: () if node.kind.reads_others else unknown(node.inputs))
    return [node for node in nodes if node.kind.reads_others]


class RegionBuilder:
    """Holds what one region is made of.

    Attributes:
        lead: the sizes before the tile: batch and heads.
        split: the dimension of heads that is split, because operands are shared by neighbouring ones.
    """

    def __init__(self, partition: Partition, lead: Shape, split: Split | None):
        self.partition, self.mover = partition, partition.mover
        self.make = partition.mover.builder.make
        self.lead, self.split = lead, split

    def over_split(self, node: Node) -> Node:
        """Rebuilds ``node`` over the split lead."""
        return with_split(node, self.split, self.mover)

    def product(self, like: Node, left: Node, right: Node, shape: Shape) -> Node:
        """Multiplies the matrices ``left`` and ``right``, summing as ``like`` does."""
        attrs = like.attrs._replace(equation=equation(len(shape) - 2, 1))
        return self.make("contract", (left, right), like.dtype, shape, attrs, like.location)

    def in_memory(self, operand: Node, transposed: bool = False) -> Node:
        """Returns ``operand`` (lead..., rows, elements), over the split lead, as views of a tensor. What is the same
        for several heads is materialized once, and so is what is joined before views of it, such as pairs that were
        rotated. ``transposed``: its rows are the last dimension."""
        joined = operand.under_views
        if operand.kind is VIEW and joined.kind is CAT:
            operand = self.mover.substituted(operand, {id(joined): self.partition.materialize(joined)})
        if operand.is_in_memory:
            return operand
        rank = len(operand.shape)
        swap, rows = last_two(rank), (*operand.shape[:-2], operand.shape[-1], operand.shape[-2])
        node = self.mover.move(operand, swap, rows) if transposed else operand
        varied = varying_dims(node)
        once = [dim for dim in range(rank - 2) if dim not in varied and node.shape[dim] != 1]
        stored = self.partition.materialize(one_of(node, once, self.mover) if once else node)
        whole = self.mover.move(stored, ("expand",), node.shape)
        return self.mover.move(whole, swap, operand.shape) if transposed else whole
