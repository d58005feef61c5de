"""Maps a graph over a batch, as ``torch.func.vmap`` asks: one graph whose tensors have one dimension more.

Every kind of node has a rule (``ir/batching.py``). What depends on no batched input stays as it is, and is repeated
where a node also has a batched operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, Guard, InputSpec, Node, Shape, topological
from jitgen.ir.nodes import INPUT
from jitgen.ir.symbols import Scalar, Size, size_symbol


def batched(graph: Graph, is_batched: Sequence[bool], single: bool) -> tuple[Graph, tuple[bool, ...]] | None:
    """Returns ``graph`` with a batch as the first dimension of some inputs, and which of its results have it.

    Args:
        is_batched: of each input, at least one of them.
        single: whether there is one element in the batch. A size of 1 is static in a graph.

    Returns:
        None if an operation has no rule: a quantised weight that is batched. Elements of the batch draw the same
        random numbers.
    """
    first = next(index for index, has_batch in enumerate(is_batched) if has_batch)
    size: Size = 1 if single else size_symbol(first, 0)
    batch = _Batch(graph, is_batched, size, single)
    nodes = topological(graph.outputs)
    if not all(batch.add(node) for node in nodes):
        return None
    inputs = tuple(batch.spec(index, spec) for index, spec in enumerate(graph.inputs))
    guards = [replace(guard, expr=batch.renamed(guard.expr)) for guard in graph.guards]
    others = [index for index, has_batch in enumerate(is_batched) if has_batch and index != first]
    if not single:
        sizes = (symbols.compare("eq", size, size_symbol(index, 0)) for index in others)
        guards += [Guard(condition, True) for condition in sizes if isinstance(condition, symbols.Expr)]
    results = [batch.made[id(node)] for node in graph.outputs]
    outputs = tuple(node for node, _ in results)
    return replace(graph, inputs=inputs, outputs=outputs, guards=tuple(guards)), tuple(
        has_batch for _, has_batch in results
    )


class _Batch:
    """Holds the batched nodes of a graph.

    Attributes:
        made: by the id of a node, the node that takes its place and whether that is batched.
        size: of the batch.
    """

    def __init__(self, graph: Graph, is_batched: Sequence[bool], size: Size, single: bool):
        self.builder = Builder()
        self.made: dict[int, tuple[Node, bool]] = {}
        self.size, self.single, self.is_batched = size, single, is_batched
        self._names: dict[str, Scalar] = {
            f"s{index}_{dim}": size_symbol(index, dim + 1)
            for index, spec in enumerate(graph.inputs)
            if is_batched[index]
            for dim in range(len(spec.shape))
        }

    def renamed(self, value: Any) -> Any:
        """Returns a size or an attribute, with the sizes of batched inputs counted from their second dimension."""
        if isinstance(value, tuple):
            return tuple(map(self.renamed, value))
        return symbols.substitute(value, self._names) if isinstance(value, symbols.Expr) else value

    def spec(self, index: int, spec: InputSpec) -> InputSpec:
        lead: Shape = (1 if self.single else size_symbol(index, 0),) if self.is_batched[index] else ()
        return InputSpec(spec.dtype, (*lead, *self.renamed(spec.shape)))

    def add(self, node: Node) -> bool:
        """Makes the node that takes the place of ``node``, whose operands are made; False if there is no rule for
        it."""
        attrs, shape = node.kind.attributes(*self.renamed(node.attrs)), self.renamed(node.shape)
        if node.kind is INPUT:
            self.made[id(node)] = self._input(node, shape)
            return True
        operands = [self.made[id(child)] for child in node.inputs]
        if not any(batch for _, batch in operands):
            inputs = [child for child, _ in operands]
            self.made[id(node)] = self.builder.like(node, inputs, shape, attrs), False
            return True
        replacement = node.kind.batch(self, node, attrs, operands) if node.kind.batch else None
        if replacement is None:
            return False
        if isinstance(replacement, Node):
            self.made[id(node)] = replacement, True
            return True
        self.made[id(node)] = self.builder.like(node, replacement[0], (self.size, *shape), replacement[1]), True
        return True

    def _input(self, node: Node, shape: Shape) -> tuple[Node, bool]:
        index = node.attrs.number
        if not self.is_batched[index]:
            return self.builder.make("input", (), node.dtype, shape, node.attrs), False
        own: Size = 1 if self.single else size_symbol(index, 0)
        input_ = self.builder.make("input", (), node.dtype, (own, *shape), node.attrs)
        return self._viewed(input_, (self.size, *shape), ("expand",)), True

    def _viewed(self, node: Node, shape: Shape, attrs: tuple[Any, ...]) -> Node:
        return node if shape == node.shape else self.builder.make("view", (node,), node.dtype, shape, attrs)

    def whole(self, operand: tuple[Node, bool]) -> Node:
        """Returns an operand with the batch as its first dimension."""
        node, is_batched = operand
        if is_batched:
            return node
        shape = (self.size, *node.shape)
        if not node.kind.is_number:
            node = self.builder.make("view", (node,), node.dtype, (1, *node.shape), ("unsqueeze", 0))
        return self._viewed(node, shape, ("expand",))

    def whole_or_number(self, operand: tuple[Node, bool]) -> Node:
        return operand[0] if operand[0].kind.is_number else self.whole(operand)
