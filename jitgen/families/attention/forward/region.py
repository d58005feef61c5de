"""Turns an attention that was recognised into its region: expressions in which it is walked over the keys once.

All is expressed by three values of a row: with S the scores, ``row_max`` = max(S), ``row_sum`` = sum(exp(S - row_max)),
and the product of exp(S - row_max) with the values. What the function subtracts in place of ``row_max``, and what it
multiplies the probabilities with, are factors of a row, by which the sums and the product are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jitgen.families.attention.forward.match import Attention, is_copy, maxima, row_sources, spread_rows, sums
from jitgen.families.attention.rule.heads import shared_heads, split_shape
from jitgen.families.attention.rule.region import RegionBuilder, stops
from jitgen.families.family import Partition
from jitgen.ir import symbols
from jitgen.ir.analysis import one_of, varying_dims
from jitgen.ir.equations import axes
from jitgen.ir.exponentials import linear_operand
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.nodes import CAST, GATHER, INPUT, VIEW
from jitgen.ir.regions import Axis, Region, Stage, Store

STAGES = (Stage("contract", ("d",)), Stage("map"), Stage("reduce", ("n",), 2), Stage("contract", ("n",)), Stage("map"))
"""Scores, what is computed of them, the two reductions of a softmax, the products with values, and an epilogue."""


def region_of(
    attention: Attention, stores: Sequence[Store], row_stores: Sequence[Store], partition: Partition
) -> Region:
    """Makes the region of ``attention``.

    Args:
        stores: results in the shape of its product of probabilities and values.
        beside: results with one element for a row, in the shape (lead..., M, 1).
    """
    return _Builder(attention, partition).region(stores, row_stores)


class _Builder(RegionBuilder):
    """Holds what one region is made of.

    Attributes:
        row_max, row_sum: placeholders of the two values of a row.
        hole, result: placeholders of the two products.
    """

    def __init__(self, attention: Attention, partition: Partition):
        super().__init__(partition, attention.scores.shape[:-2], None)
        self.attention = attention
        self.dtype = attention.result.attrs.accumulator
        column = (*self.lead, attention.scores.shape[-2], 1)
        self.hole = self._placeholder(attention.product.dtype, attention.product.shape, -1)
        self.result = self._placeholder(attention.result.dtype, attention.result.shape, -2)
        self.row_max = self._placeholder(self.dtype, column, -3)
        self.row_sum = self._placeholder(self.dtype, column, -4)
        (self.query, key), (_, value) = self._over_lead(attention.product), self._over_lead(attention.result)
        self.key, self.value = key, value
        self.split = shared_heads([key, value, attention.scores], self.lead, self.mover)

    def _placeholder(self, dtype: str, shape: Shape, number: int) -> Node:
        return self.make("input", (), dtype, shape, (number,))

    def region(self, stores: Sequence[Store], row_stores: Sequence[Store]) -> Region:
        attention, mover = self.attention, self.mover
        *_, rows, keys = attention.scores.shape
        lead, width, depth = split_shape(self.lead, self.split), attention.result.shape[-1], self.query.shape[-1]
        product = self.product(attention.product, self._query(), self._operand(self.key, False), (*lead, rows, keys))
        scores = self._in_place(
            attention.scores, {id(attention.product): self.hole}, {id(self.over_split(self.hole)): product}
        )
        last, column = len(lead) + 1, (*lead, rows, 1)
        row_max = self.make("reduce", (scores,), self.dtype, column, ("max", (last,)))
        spread = mover.move(row_max, ("expand",), scores.shape)
        power = self.make(
            "exp", (self.make("sub", (scores, spread), self.dtype, scores.shape),), self.dtype, scores.shape
        )
        row_sum = self.make("reduce", (power,), self.dtype, column, ("sum", (last,)))
        weighted = self.product(attention.result, power, self._operand(self.value, True), (*lead, rows, width))
        values = {id(self.over_split(self.row_max)): row_max, id(self.over_split(self.row_sum)): row_sum}
        shares = self._with_factors(weighted, values)
        all_stores = []
        for store in stores:
            inner, outer = {id(attention.result): self.result}, {id(self.over_split(self.result)): shares}
            for number, node in enumerate(spread_rows(store.value, attention)):
                inner[id(node)] = self._placeholder(node.dtype, attention.result.shape, -5 - number)
                source = node.inputs[0] if node.kind is VIEW else node
                outer[id(self.over_split(inner[id(node)]))] = self._spread(source, values, weighted)
            value = self._in_place(store.value, inner, outer)
            assert not any(node.kind is INPUT and node.attrs.number < 0 for node in topological([value]))
            all_stores.append(self._store(store, value))
        for store in row_stores:
            value = mover.substituted(self.over_split(self._row(store.value)), dict(values))
            all_stores.append(self._store(store, value))
        axes_ = (
            *(Axis(f"b{dim}", size) for dim, size in enumerate(lead)),
            Axis("m", rows),
            Axis("e", width, "sequential"),
            Axis("n", keys, "sequential", inner=True),
            Axis("d", depth, "sequential", inner=True),
        )
        return Region("attention", axes_, tuple(all_stores), STAGES)

    def _store(self, store: Store, value: Node) -> Store:
        """Gives ``store`` the value ``value``, which is computed for its own, in the dtype of the result."""
        if value.dtype != store.value.dtype:  # a number of a row that the kernel has in its compute dtype
            value = self.make("cast", (value,), store.value.dtype, value.shape)
        if self.split is None:
            return Store(store.result, value, store.movements)
        return Store(store.result, value, (*store.movements, (("reshape",), value.shape)))

    def _in_place(self, root: Node, inner: dict[int, Node], outer: dict[int, Node]) -> Node:
        """Rebuilds ``root`` over the split lead: its products are replaced by ``inner`` before, and these by ``outer``
        after, the split. Whatever no rule computes is read from memory."""
        memo = inner | {id(node): self.partition.materialize(node) for node in stops([root], inner)}
        return self.mover.substituted(self.over_split(self.mover.substituted(root, memo)), dict(outer))

    # ------------------------------------------------------------------------------------------------------ row values

    def _row(self, value: Node) -> Node:
        """Expresses ``value``, of shape (lead..., M, 1), by ``row_max`` and ``row_sum``; other reductions are
        materialized."""
        memo: dict[int, Node] = {}
        for reduction in row_sources([value]):
            others, summed = maxima(reduction, self.attention), sums(reduction, self.attention)
            if others is not None:
                memo[id(reduction)] = self._with_others("maximum", self.row_max, map(self._row, others))
            elif summed is not None:
                base = self._base(summed.base)
                powers = (self._power(self._row(other), base) for other in summed.others)
                memo[id(reduction)] = self._with_others("add", self._row_sum(base), powers)
            else:
                memo[id(reduction)] = self.partition.materialize(reduction)
        memo |= {id(node): self.partition.materialize(node) for node in stops([value], memo)}
        return self.mover.substituted(value, memo)

    def _with_others(self, op: str, value: Node, others: Iterable[Node]) -> Node:
        for other in others:
            value = self.make(op, (value, other), self.dtype, self.row_max.shape)
        return value

    def _base(self, base: Node | None) -> Node | None:
        """Returns what is subtracted from the scores of a row; None for nothing."""
        return None if base is None else self._row(one_of(base, [self.attention.last], self.mover))

    def _power(self, value: Node, base: Node | None) -> Node:
        """Computes exp(value - base)."""
        if base is not None:
            value = self.make("sub", (value, base), self.dtype, self.row_max.shape)
        return self.make("exp", (value,), self.dtype, self.row_max.shape)

    def _row_sum(self, base: Node | None) -> Node:
        """Computes sum(exp(S - base)). Where a score is +inf, ``row_sum`` is NaN, but this sum is infinite unless
        ``base`` is."""
        if base is self.row_max:
            return self.row_sum
        infinite = self.make(
            "eq", (self.row_max, self.mover.builder.const(math.inf, self.dtype)), "bool", self.row_max.shape
        )
        one = self.mover.builder.const(1.0, self.dtype)
        return self._times(self.make("where", (infinite, one, self.row_sum), self.dtype, self.row_max.shape), base)

    def _times(self, value: Node, base: Node | None) -> Node:
        """Rescales ``value``, computed with exp(S - row_max), to exp(S - base): times exp(row_max - base)."""
        if base is self.row_max:
            return value
        return self.make("mul", (value, self._power(self.row_max, base)), self.dtype, self.row_max.shape)

    def _with_factors(self, weighted: Node, values: dict[int, Node]) -> Node:
        """Multiplies ``weighted``, the product of exp(S - row_max) with the values, as the function's probabilities
        are."""
        attention = self.attention
        steps, node = [], attention.probabilities
        while node is not attention.power:
            operand = linear_operand(node)
            assert operand is not None
            if node.kind is not CAST:
                steps.append((node, operand))
            node = operand
        one = self.mover.builder.const(1.0, self.dtype)
        factor = self._times(one, self._base(attention.base))
        result = weighted
        if factor is not one:
            result = self.make(
                "mul", (result, self._spread(factor.inputs[1], values, weighted)), weighted.dtype, weighted.shape
            )
        for node, operand in reversed(steps):
            operands = [result if child is operand else self._spread(child, values, weighted) for child in node.inputs]
            result = self.make(node.op, operands, weighted.dtype, weighted.shape, node.attrs, node.location)
        return result

    def _spread(self, value: Node, values: dict[int, Node], like: Node) -> Node:
        """Spreads ``value``, one of a row, to the shape of ``like``."""
        if value.kind.is_number:
            return value
        if value.shape != self.row_max.shape:
            value = one_of(value, [self.attention.last], self.mover)
            if value.kind.is_number:
                return value
        row = self.mover.substituted(self.over_split(self._row(value)), dict(values))
        return self.mover.move(row, ("expand",), like.shape)

    # -------------------------------------------------------------------------------------------------------- operands

    def _over_lead(self, product: Node) -> tuple[Node, Node]:
        """Returns the operands of ``product`` over (lead..., ...): rows other than the last are a batch that shares the
        right operand."""
        left, right = product.inputs
        equation_axes = axes(product.attrs.equation)
        for dim in range(len(equation_axes.batch), len(equation_axes.batch) + len(equation_axes.rows) - 1):
            right = self.mover.unsqueeze(right, dim)
        shape = (*product.shape[:-2], *right.shape[-2:])
        return left, self.mover.move(right, ("expand",), shape) if right.shape != shape else right

    def _reads(self, computed: Node, inner: int, what: str) -> bool:
        """Returns whether the kernel computes ``computed``, keys or values with their elements along ``inner``."""
        if self.partition.device.dialect not in ("cuda", "triton"):
            return True
        from jitgen.families.attention.forward.reading import Reading, is_widening

        varied = varying_dims(computed)
        sharing = symbols.product([n for dim, n in enumerate(computed.shape[:-2]) if dim not in varied])
        compact = any(node.kind is GATHER or is_widening(node) for node in topological([computed]))
        question = Reading(what, self.attention.scores.shape[-2], sharing, computed.shape[inner], compact)
        return self.partition.decide("attention", question).fused

    def _query(self) -> Node:
        """Returns the query, a tensor or computed pointwise of tensors."""
        query = self.query
        if any(kind.reads_others for kind in query.kinds):
            query = self.partition.materialize(query)
        return self.over_split(query)

    def _operand(self, operand: Node, transposed: bool) -> Node:
        """Returns the keys (lead..., N, D) or values (``transposed``: (lead..., E, N)) as views of a tensor, or as the
        kernel computes them."""
        copies = {id(node): node.inputs[0] for node in topological([operand]) if is_copy(node)}
        operand = self.over_split(self.mover.substituted(operand, copies))
        if operand.is_in_memory:
            return operand
        from jitgen.families.attention.forward.computed import in_kernel

        inner = len(operand.shape) - (2 if transposed else 1)
        computed = in_kernel(operand, inner, self.mover)
        if computed is not None and self._reads(computed, inner, "values" if transposed else "keys"):
            return computed
        return self.in_memory(operand, transposed)
