"""Holds the temporaries of a partition, and rebuilds values so that they read from them.

A value that is *materialized* is computed into a temporary, and whoever reads it reads the ``input`` node of that. The
value is partitioned later, in the same way as a result (``families/steps.py``), which may add temporaries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jitgen.ir import symbols
from jitgen.ir.analysis import at_own_coordinates, one_of, rewritten, varying_dims
from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import DEQUANTIZE, GATHER, INPUT, PRODUCTS, REDUCE, Kind
from jitgen.ir.views import Mover


class Temporaries:
    """Holds the temporaries of one partition.

    Attributes:
        first: the buffer number of the first of them, which is how many inputs the graph has.
        values: what each of them holds.
        nodes: the ``input`` node of each of them.
        joined: the numbers of temporaries that are partitioned as one.
    """

    def __init__(self, mover: Mover, first: int) -> None:
        self.mover, self.first = mover, first
        self.values: list[Node] = []
        self.nodes: list[Node] = []
        self.joined: list[tuple[int, ...]] = []
        self._by_value: dict[Node, Node] = {}
        self._by_matrix: dict[Node, Node] = {}

    def materialize(self, node: Node) -> Node:
        """Stores ``node`` in a temporary and returns its ``input`` node; there is one temporary for each node."""
        if node in self._by_value or (node.kind is INPUT and node.attrs.number >= self.first):
            return self._by_value.get(node, node)
        repeated = self._repeated_dims(node)
        if repeated:
            return self.mover.move(self.materialize(one_of(node, repeated, self.mover)), ("expand",), node.shape)
        matrix = self._as_matrix(node)
        if matrix in self._by_matrix:
            return self.mover.move(self._by_matrix[matrix], ("reshape",), node.shape)
        number = self.first + len(self.values)
        temporary = self.mover.builder.make("input", (), node.dtype, node.shape, (number,), node.location)
        self.values.append(node)
        self.nodes.append(temporary)
        self._by_matrix[matrix] = self._by_value[node] = temporary
        return temporary

    def _repeated_dims(self, node: Node) -> list[int]:
        """Returns the dimensions along which all elements of the gather ``node`` are equal; empty for other nodes."""
        if node.kind is not GATHER:
            return []
        varied = varying_dims(node)
        return [dim for dim, size in enumerate(node.shape) if size not in (0, 1) and dim not in varied]

    def get(self, node: Node) -> Node | None:
        """Returns the ``input`` node of the temporary that holds ``node`` already; None if none does."""
        return self._by_value.get(node)

    def exchange(self, temporary: Node, value: Node) -> Node:
        """Holds ``value`` in ``temporary``, whose own value nothing reads any more, and returns its new ``input``
        node."""
        number = temporary.attrs.number - self.first
        for known in (self._by_value, self._by_matrix):
            for before in [node for node, kept in known.items() if kept is temporary]:
                del known[before]
        node = self.mover.builder.make("input", (), value.dtype, value.shape, temporary.attrs, value.location)
        self.values[number], self.nodes[number] = value, node
        self._by_matrix[self._as_matrix(value)] = self._by_value[value] = node
        return node

    def replace_values(self, values: Iterable[Node]) -> None:
        """Computes the first temporaries by other ``values``, equal to what they hold. A value that is the temporary's
        own node says that it stays: a family has asked to store it."""
        before = zip(values, self.nodes, self.values, strict=False)
        replaced = [current if value is node else value for value, node, current in before]
        self.values[: len(replaced)] = replaced
        self._by_value |= zip(replaced, self.nodes, strict=False)

    def forget_from(self, count: int, joined: int) -> None:
        """Forgets the temporaries from number ``count`` on, and which are partitioned as one behind the first
        ``joined`` entries."""
        end = self.first + count
        del self.values[count:], self.nodes[count:], self.joined[joined:]
        self._by_value = {value: node for value, node in self._by_value.items() if node.attrs.number < end}
        self._by_matrix = {matrix: node for matrix, node in self._by_matrix.items() if node.attrs.number < end}

    # ------------------------------------------------------------------------------------------ computed as one

    def materialize_together(self, nodes: Sequence[Node]) -> list[Node]:
        """Stores ``nodes`` in temporaries, which one step computes, so that a region may hold all."""
        inputs = [self.materialize(node) for node in nodes]
        self.compute_together(inputs)
        return inputs

    def compute_together(self, temporaries: Sequence[Node]) -> None:
        """Partitions the values of ``temporaries``, ``input`` nodes or views of them, as one."""
        numbers = sorted({temporary.under_views.attrs.number - self.first for temporary in temporaries})
        self.joined.append(tuple(numbers))

    # ------------------------------------------------------------------------ values that read from temporaries

    def without(self, kind: Kind, root: Node) -> Node:
        """Returns ``root`` with every node of ``kind`` materialized."""
        memo: dict[int, Node] = {}
        for node in topological([root] if kind in root.kinds else []):
            if node.kind is kind and id(node) not in memo:
                memo[id(node)] = self.materialize(self.mover.substituted(node, dict(memo)))
        return self.mover.substituted(root, memo)

    def pointwise(self, root: Node, kept: Collection[int] = ()) -> Node:
        """Returns ``root`` with all that reads other elements of its operands materialized, but for the nodes whose ids
        are ``kept``."""

        def change(node: Node, rebuilt: Node) -> Node:
            if not node.kind.reads_others or id(node) in kept:
                return rebuilt
            # A reduction of what another one gave, as the sum behind a softmax's maximum, is one kernel with that.
            return self.materialize(node if node.kind is REDUCE else rebuilt)

        return rewritten(root, self.mover, change)

    def from_operands(self, value: Node) -> Node:
        """Computes ``value`` from temporaries: by its own operation, or by its pointwise operations and the views they
        read. Each temporary holds strictly less than ``value``, so such values always have an order."""
        memo: dict[int, Node] = {}
        stack, seen = list(value.inputs), set()
        while stack:
            node = stack.pop().under_views
            if id(node) in seen or not node.inputs or node.kind is DEQUANTIZE:
                continue
            seen.add(id(node))
            if value.kind.is_pointwise and node.kind.is_pointwise:
                stack.extend(node.inputs)
            else:
                memo[id(node)] = self.materialize(node)
        return self.mover.substituted(value, memo)

    def with_stored_products(self, number: int) -> Node | None:
        """Reads products in the value of temporary ``number`` from other temporaries that hold them; None if none does,
        or one is of a quantised weight."""
        value, own = self.values[number], self.nodes[number]
        products = at_own_coordinates(value, *PRODUCTS)
        stored = {
            node: self._by_matrix[matrix] for node in products if (matrix := self._as_matrix(node)) in self._by_matrix
        }
        others = {node: temporary for node, temporary in stored.items() if temporary is not own}
        if not others or any(node.is_weight for product in stored for node in product.inputs):
            return None
        memo = {id(node): self.mover.move(temporary, ("reshape",), node.shape) for node, temporary in others.items()}
        return self.mover.substituted(value, memo)

    def _as_matrix(self, node: Node) -> Node:
        """Returns ``node`` as a matrix if it is computed from products: one value for all its shapes, and their
        memory."""
        if len(node.shape) <= 2 or not any(at_own_coordinates(node, *PRODUCTS)):
            return node
        return self.mover.move(node, ("reshape",), (symbols.product(node.shape[:-1]), node.shape[-1]))
