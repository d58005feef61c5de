"""A graph over a batch: what ``torch.func.vmap`` makes of a call, one graph whose tensors have one dimension more.

Every operation has a rule, as in JAX's and PyTorch's own ``vmap``: what depends on no batched input stays as it is, and
is repeated where an operation also has a batched operand. A product whose weight is not batched stays one product with
more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.custom_gradients import CUSTOM_GRADIENT
from jitgen.ir.equations import axes, equation
from jitgen.ir.graph import CHANNELS_LAST, Builder, Graph, Guard, InputSpec, Node, Shape, is_weight, topological
from jitgen.ir.ops import OPS
from jitgen.ir.symbols import Scalar, Size, size_symbol

_NUMBERS = ("const", "scalar")


def batched(graph: Graph, is_batched: Sequence[bool], single: bool) -> tuple[Graph, tuple[bool, ...]] | None:
    """``graph`` where some inputs have a first dimension of their own, and which of its results have it.

    Args:
        is_batched: of each input, at least one of them.
        single: whether there is one element in the batch. A size of 1 is static in a graph.

    Returns:
        None if an operation has no rule: a quantised weight that is batched. Elements of the batch draw the same
        random numbers.
    """
    first = next(index for index, each in enumerate(is_batched) if each)
    size: Size = 1 if single else size_symbol(first, 0)
    of = _Batch(graph, is_batched, size, single)
    nodes = topological(graph.outputs)
    if not all(of.add(node) for node in nodes):
        return None
    inputs = tuple(of.spec(index, spec) for index, spec in enumerate(graph.inputs))
    guards = [replace(guard, expr=of.renamed(guard.expr)) for guard in graph.guards]
    others = [index for index, each in enumerate(is_batched) if each and index != first]
    if not single:
        sizes = (symbols.compare("eq", size, size_symbol(index, 0)) for index in others)
        guards += [Guard(condition, True) for condition in sizes if isinstance(condition, symbols.Expr)]
    found = [of.made[id(node)] for node in graph.outputs]
    outputs = tuple(node for node, _ in found)
    return replace(graph, inputs=inputs, outputs=outputs, guards=tuple(guards)), tuple(each for _, each in found)


class _Batch:
    """The batched nodes of a graph.

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
        """A size or an attribute, with the sizes of batched inputs counted from their second dimension."""
        if isinstance(value, tuple):
            return tuple(map(self.renamed, value))
        return symbols.substitute(value, self._names) if isinstance(value, symbols.Expr) else value

    def spec(self, index: int, spec: InputSpec) -> InputSpec:
        lead: Shape = (1 if self.single else size_symbol(index, 0),) if self.is_batched[index] else ()
        return InputSpec(spec.dtype, (*lead, *self.renamed(spec.shape)))

    def add(self, node: Node) -> bool:
        """Make what takes the place of ``node``, whose operands are made; False if there is no rule for it."""
        attrs, shape = self.renamed(node.attrs), self.renamed(node.shape)
        if node.op == "input":
            self.made[id(node)] = self._input(node, shape)
            return True
        operands = [self.made[id(child)] for child in node.inputs]
        if not any(batch for _, batch in operands):
            inputs = [child for child, _ in operands]
            self.made[id(node)] = self.builder.make(node.op, inputs, node.dtype, shape, attrs, node.location), False
            return True
        rule = _pointwise if node.op in OPS or node.op == "cast" else _RULES.get(node.op)
        found = rule(self, node, attrs, operands) if rule else None
        if found is None:
            return False
        inputs, attrs = found
        whole = (self.size, *shape)
        self.made[id(node)] = self.builder.make(node.op, inputs, node.dtype, whole, attrs, node.location), True
        return True

    def _input(self, node: Node, shape: Shape) -> tuple[Node, bool]:
        index = node.attrs[0]
        if not self.is_batched[index]:
            return self.builder.make("input", (), node.dtype, shape, node.attrs), False
        own: Size = 1 if self.single else size_symbol(index, 0)
        found = self.builder.make("input", (), node.dtype, (own, *shape), node.attrs)
        return self._viewed(found, (self.size, *shape), ("expand",)), True

    def _viewed(self, node: Node, shape: Shape, attrs: tuple[Any, ...]) -> Node:
        return node if shape == node.shape else self.builder.make("view", (node,), node.dtype, shape, attrs)

    def whole(self, operand: tuple[Node, bool]) -> Node:
        """An operand with the batch as its first dimension."""
        node, is_batched = operand
        if is_batched:
            return node
        shape = (self.size, *node.shape)
        if node.op not in _NUMBERS:
            node = self.builder.make("view", (node,), node.dtype, (1, *node.shape), ("unsqueeze", 0))
        return self._viewed(node, shape, ("expand",))

    def whole_or_number(self, operand: tuple[Node, bool]) -> Node:
        return operand[0] if operand[0].op in _NUMBERS else self.whole(operand)


Found = tuple[list[Node], tuple[Any, ...]] | None
"""The operands and the attributes of a node over a batch; None if it has no rule."""
_Operands = Sequence[tuple[Node, bool]]


def _pointwise(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    return [of.whole_or_number(each) for each in operands], () if attrs == CHANNELS_LAST else attrs


def _custom_gradient(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    return [of.whole(each) for each in operands], attrs


def moved(attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A movement (``ir/views.py``) of what has a dimension before those that it moves."""
    if attrs[0] == "permute":
        return "permute", (0, *(dim + 1 for dim in attrs[1]))
    if attrs[0] in ("slice", "squeeze", "unsqueeze"):
        return attrs[0], attrs[1] + 1, *attrs[2:]
    return attrs


def _view(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    return [operands[0][0]], moved(attrs)


def _cat(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    return [of.whole(each) for each in operands], (attrs[0] + 1,)


def _reduce(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    return [operands[0][0]], (attrs[0], tuple(dim + 1 for dim in attrs[1]))


def _along(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    """Scans and sorts, along the dimension that is their second attribute."""
    return [operands[0][0]], (attrs[0], attrs[1] + 1, *attrs[2:])


def _contract(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    found, (x, weight) = axes(attrs[0]), operands
    batch, rows = len(found.batch), len(found.rows)
    if not weight[1] and not batch:
        return [x[0], weight[0]], (equation(0, rows + 1), *attrs[1:])
    if is_weight(node.inputs[1]):
        return None
    return [of.whole(x), of.whole(weight)], (equation(batch + 1, rows), *attrs[1:])


def _gather(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    source, *indices = operands
    coordinates = tuple(each + (each >= 0) for each in attrs)
    if source[1]:
        coordinates = (0, *coordinates)
    return [source[0], *map(of.whole_or_number, indices)], coordinates


def _scatter(of: _Batch, node: Node, attrs: tuple[Any, ...], operands: _Operands) -> Found:
    kind, coordinates, movements = attrs
    base, value, *indices = operands
    through = tuple((moved(movement), (of.size, *shape)) for movement, shape in movements)
    shifted = (0, *(each + (each >= 0) for each in coordinates))
    return [of.whole(base), of.whole(value), *map(of.whole_or_number, indices)], (kind, shifted, through)


_RULES: dict[str, Callable[[_Batch, Node, tuple[Any, ...], _Operands], Found]] = {
    "view": _view,
    CUSTOM_GRADIENT: _custom_gradient,
    "cat": _cat,
    "reduce": _reduce,
    "scan": _along,
    "sort": _along,
    "contract": _contract,
    "gather": _gather,
    "scatter": _scatter,
}
