"""Differentiates products of the probabilities of rows with values, as attention has them, without keeping anything of
M x N.

In ``O = P V`` let P be proportional to ``e = exp(S - b)`` along its last dimension: e times, or divided by, values of a
row, as a softmax is. Two facts make its backward one that walks the keys of a row, as its forward does (Dao et al.,
"FlashAttention", 2022, appendix B):

* S and P are *computed again* from the operands of the product that S is made of, where other products are saved;
* what a row's values get is a sum over the row of the gradient of P times P, which is the sum over E of the gradient of
  O times O (``delta``): nothing of M x N is summed. For a factor r that is delta / r, and for b it is minus delta,
  minus the gradients of the sums of e times these sums. Where b changes nothing (``shifts.py``), it has no gradient.

A maximum that is subtracted, sinks in the sum, and the logarithm of the sum as a result are differentiated by these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.gradients.shifts import changes_nothing
from jitgen.ir.analysis import nearest, varies
from jitgen.ir.equations import axes
from jitgen.ir.exponentials import SELECTION, linear_operand, x
from jitgen.ir.graph import Graph, Node
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAST, CONTRACT, CUSTOM_GRADIENT, REDUCE, VIEW
from jitgen.ir.patterns import Rewrite, Rewrites, cast, number, reciprocal, view
from jitgen.spec import DTYPES

Users = Mapping[int, Sequence[Node]]
_RATES = {"exp": 1.0, "exp2": math.log(2.0)}
"""The derivative of an exponential over itself."""
_RECIPROCAL = reciprocal(x) | number(lambda value: value != 0) / x
_OF_ONE_VALUE = Rewrites(
    Rewrite("a cast", cast(x), x), Rewrite("a view", view(x), x), Rewrite("a selection", SELECTION, x)
)
"""What is x or 0, in another dtype or order."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Describes a product that was recognised.

    Attributes:
        result: O.
        chain: from P, its left operand, down to e, each node proportional to the next.
        rows: of each node of the chain that combines the next with values of a row: the node that these are, before
            they are spread along the row; by the id of the node in the chain.
        power: e. ``exponent`` is what it is the exponential of.
        sums: reductions, which add up the elements of e of a row.
        base: the node of b, before it is spread along the row; None where no gradient flows to it.
        cancels: whether all gradients of b add up to zero; see ``shifts.py``.
        product: the product that S is computed from.
    """

    result: Node
    chain: tuple[Node, ...]
    rows: Mapping[int, Node]
    power: Node
    sums: tuple[Node, ...]
    base: Node | None
    cancels: bool
    product: Node

    @property
    def exponent(self) -> Node:
        return self.power.inputs[0]

    def read(self) -> Iterator[Node]:
        """Yields what the backward reads of the forward besides what the rules of its operations read."""
        yield self.result
        yield from self.sums
        yield from self.rows.values()


def recognised(graph: Graph, active: Collection[int], seeds: Sequence[Node]) -> list[Weighted]:
    """Recognises the products of probabilities and values in ``graph``.

    Args:
        active: the ids of nodes that gradients flow through.
        seeds: the nodes that gradients come from.
    """
    index = Index(graph.outputs)
    users = {id(node): list(readers) for node, readers in index.users.items()}
    for node in {*graph.outputs, *seeds}:
        users.setdefault(id(node), []).append(node)  # a result is used by the caller
    roots = set(map(id, seeds))
    products = (node for node in index.order if node.kind is CONTRACT and id(node) in active)
    candidates = (_weighted(node, users, active, roots) for node in products)
    return [product for product in candidates if product is not None]


def _weighted(result: Node, users: Users, active: Collection[int], roots: Collection[int]) -> Weighted | None:
    """Recognises the weighted product ``result``; None if it is none, or if a value of its rows has another
    gradient."""
    if len(axes(result.attrs.equation).contracted) != 1 or id(result.inputs[0]) not in active:
        return None
    chain: list[Node] = []
    rows: dict[int, Node] = {}
    node, user = result.inputs[0], result
    while node.op not in _RATES:
        operand = _next_of(node)
        if operand is None or any(reader is not user for reader in users[id(node)]):
            return None
        others = [child for child in node.inputs if child is not operand and id(child) in active]
        if others:
            (factor,) = others
            row = _row_of(factor)
            if row is None or (node.op == "mul" and not _is_reciprocal(row)):
                return None
            rows[id(node)] = row
        chain.append(node)
        node, user = operand, node
    sums = _sums_of(node, user, users)
    if sums is None:
        return None
    scores, base = node.inputs[0], None
    if scores.op == "sub" and not varies(scores.inputs[1], (len(scores.shape) - 1,)):
        if len(users[id(scores)]) != 1:
            return None
        scores, spread = scores.inputs
        base = _row_of(spread) if id(spread) in active else None
        if id(spread) in active and base is None:
            return None
    product = _product_of(scores)
    if product is None:
        return None
    cancels = base is not None and changes_nothing(base, node, users, active, roots)
    return Weighted(result, tuple(chain), rows, node, sums, base, cancels, product)


def _next_of(node: Node) -> Node | None:
    """Returns the operand to which ``node``, of a chain of probabilities, is proportional; None without one."""
    if node.kind is VIEW:
        (kind, *_), (source,) = node.attrs, node.inputs
        last = len(node.shape) - 1
        of_rows = kind in ("unsqueeze", "squeeze") and node.shape[-1] == source.shape[-1] and node.attrs.dim != last
        of_rows |= kind == "permute" and node.attrs.order[-1] == last
        of_rows |= kind == "reshape" and bool(node.shape and source.shape) and node.shape[-1] == source.shape[-1]
        return source if of_rows else None
    return linear_operand(node)


def _row_of(spread: Node) -> Node | None:
    """Returns the values of rows that ``spread`` repeats along its last dimension, with one element there; None if it
    is none."""
    if spread.kind is not VIEW or spread.attrs != ("expand",):
        return None
    (row,) = spread.inputs
    return row if row.shape == (*spread.shape[:-1], 1) else None


def _is_reciprocal(row: Node) -> bool:
    """Returns whether ``row`` is a quotient, or 0 where a condition says so: nothing is lost where one divides by
    it."""
    value: Node | None = row
    while value is not None and _RECIPROCAL.match(value) is None:
        value = _OF_ONE_VALUE.result(value)
    return value is not None


def _sums_of(power: Node, user: Node, users: Users) -> tuple[Node, ...] | None:
    """Returns the sums over rows of ``power``; None if anything but these and ``user`` reads it."""
    sums, stack = [], [power]
    while stack:
        node = stack.pop()
        for reader in users[id(node)]:
            if reader is user:
                continue
            if reader.kind is REDUCE and reader.attrs == ("sum", (len(power.shape) - 1,)):
                sums.append(reader)
            elif reader.kind is CAST and DTYPES[reader.dtype].is_floating_point:
                stack.append(reader)
            else:
                return None
    return tuple(sums)


def _product_of(scores: Node) -> Node | None:
    """Returns the product from which ``scores`` are computed by pointwise operations and views, the nearest first."""
    products = nearest(scores, (CONTRACT,), lambda node: node.kind.is_pointwise or node.kind in (VIEW, CUSTOM_GRADIENT))
    return next((node for node in products if len(axes(node.attrs.equation).contracted) == 1), None)


class RowGradients:
    """Computes the gradients of the row values of weighted products, as a backward meets their nodes.

    Args:
        products: which are recognised.
        value: gives the value of a node of the forward.
        shape: gives the sizes of a node.
    """

    def __init__(
        self, products: Sequence[Weighted], value: Callable[[Node], Any], shape: Callable[[Node], tuple[Any, ...]]
    ):
        self._value, self._shape = value, shape
        self._results = {id(product.result): product for product in products}
        self._steps = {id(node): product for product in products for node in product.chain}
        self._exponents = {id(product.exponent): product for product in products if product.base is not None}
        self._zero = {id(product.base) for product in products if product.cancels}
        self._sums = {id(node) for product in products for node in product.sums}
        self._deltas: dict[int, Any] = {}
        self._of_sums: dict[int, Any] = {}

    def is_zero(self, node: Node) -> bool:
        """Returns whether the gradients of ``node`` are known to add up to zero."""
        return id(node) in self._zero

    def meet(self, node: Node, g: Any) -> None:
        """Notes the gradient ``g`` of ``node``, before those of its operands are asked for."""
        if id(node) in self._sums:
            self._of_sums[id(node)] = g
        product = self._results.get(id(node))
        if product is None:
            return
        named = axes(node.attrs.equation)
        first = len(named.batch) + len(named.rows)
        delta = (g * self._value(node).to(g.dtype)).sum(tuple(range(first, len(node.shape)))).unsqueeze(-1)
        for step in product.chain:
            self._deltas[id(step)] = delta
            if step.kind is VIEW:
                delta = self._before(step, delta)
        self._deltas[id(product.power)] = delta

    def _before(self, view: Node, delta: Any) -> Any:
        """Returns ``delta`` of a view of probabilities as that of what is viewed."""
        kind, source = view.attrs.kind, view.inputs[0]
        if kind == "permute":
            return delta.permute([view.attrs.order.index(dim) for dim in range(len(source.shape))])
        if kind == "reshape":
            return delta.reshape((*self._shape(source)[:-1], 1))
        return delta.squeeze(view.attrs.dim) if kind == "unsqueeze" else delta.unsqueeze(view.attrs.dim)

    def of_operands(self, node: Node) -> dict[int, tuple[Node, Any]]:
        """Returns for each operand of ``node`` that is a value of its rows: the node before it is spread, and its
        gradient, or None where that is zero."""
        if id(node) in self._steps and id(node) in self._deltas:
            return self._of_factor(node, self._steps[id(node)])
        if id(node) in self._exponents:
            product = self._exponents[id(node)]
            return {
                1: (node.inputs[1].under_expand, None if id(product.base) in self._zero else self._of_base(product))
            }
        return {}

    def _of_factor(self, node: Node, product: Weighted) -> dict[int, tuple[Node, Any]]:
        row = product.rows.get(id(node))
        if row is None:
            return {}
        (position,) = (number for number, child in enumerate(node.inputs) if child.under_expand is row)
        delta = self._deltas[id(node)]
        quotient = delta / self._value(row).to(delta.dtype)
        return {position: (row, quotient if node.op == "mul" else -quotient)}

    def _of_base(self, product: Weighted) -> Any:
        shares = [self._deltas[id(product.power)]] if id(product.power) in self._deltas else []
        of_sums = [(node, self._of_sums[id(node)]) for node in product.sums if id(node) in self._of_sums]
        shares += [g * self._value(node).to(g.dtype) for node, g in of_sums]
        return sum(shares) * -_RATES[product.power.op]
