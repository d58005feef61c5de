"""Recognises attention in a graph: a product whose left operand is a softmax of another product, in any spelling.

The pattern, from the result back to the operands, over (lead..., M, N) scores and (lead..., M, E) results::

    S = rule(contract(q, k))                 any pointwise expression of the product, of indices and of tensors
    e = exp(S - b)                           b: one value for a row
    P = e * r * ...                          products and quotients by values of a row, selections by a row's condition
    O = contract(P, v)

A softmax is such a P, with b the maximum of S and r the reciprocal of the sum of e. So are a softmax with a sink, one
written with ``max``, ``exp`` and ``sum``, and one that gives zeros where every score is -inf. ``b`` and ``r`` are
computed from ``max(S)`` and from sums of such exponentials over a row, which a kernel that walks the keys once can
give: with m the maximum, exp(S - b) is exp(S - m) exp(m - b).

Rounding P to a 16-bit dtype is left out: a value between operations keeps its compute dtype (``ir/body.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jitgen.ir.analysis import at_own_coordinates, runs_along
from jitgen.ir.attributes import ROUNDED
from jitgen.ir.body import compute_dtype
from jitgen.ir.equations import axes
from jitgen.ir.exponentials import exponential_behind, linear_in, linear_operand
from jitgen.ir.graph import Node, topological, walked
from jitgen.ir.index import Index, Reach
from jitgen.ir.nodes import CAST, CAT, CONTRACT, REDUCE
from jitgen.ir.patterns import Pattern, Through, exp, row_max, row_sum
from jitgen.spec import DTYPES


def _is_rounding(node: Node) -> bool:
    """Returns whether ``node`` is a cast between floating dtypes, in whose place a kernel keeps the compute dtype."""
    return node.kind is CAST and node.attrs != ROUNDED and DTYPES[node.inputs[0].dtype].is_floating_point


scores = Pattern("scores")
base = Pattern("base").where(lambda node: not runs_along(node, len(node.shape) - 1))
POWER = exp(scores - base) | exp(scores)
"""e, with b one value for a row."""
MAXIMUM = row_max(scores)
SUM = row_sum(Through(inner=POWER, skip=_is_rounding))
_IN_SUMS = ("cat", "sub", "exp", "cast")
"""Operations between the scores and a sum of their exponentials."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Describes an attention that was recognised.

    Attributes:
        result: O, the product of probabilities and values.
        probabilities: P, its left operand.
        power: e, the exponential.
        scores: S, and ``base`` b; None where nothing is subtracted.
        product: the product of queries and keys that ``scores`` is computed from.
    """

    result: Node
    probabilities: Node
    power: Node
    scores: Node
    base: Node | None
    product: Node

    @property
    def last(self) -> int:
        """Returns the dimension of the scores that counts keys."""
        return len(self.scores.shape) - 1

    def is_row_reduction(self, node: Node) -> bool:
        """Returns whether ``node`` is the maximum of the scores of a row, or a sum of their exponentials."""
        return maxima(node, self) is not None or sums(node, self) is not None


def is_copy(node: Node) -> bool:
    """Returns whether ``node`` is a copy of its operand."""
    return node.kind is CAST and node.dtype == node.inputs[0].dtype and node.attrs != ROUNDED


def matched(result: Node) -> Attention | None:
    """Matches the attention whose last step is the product ``result``; None if there is none."""
    if result.kind is not CONTRACT or len(axes(result.attrs.equation).contracted) != 1:
        return None
    probabilities = result.inputs[0]
    power = linear_in(probabilities) if exponential_behind(probabilities) else None
    if power is None:
        return None
    for nodes in POWER.matches(power, {}):
        scores, base = nodes["scores"], nodes.get("base")
        products = [node for node in at_own_coordinates(scores, CONTRACT) if node.shape == scores.shape]
        return Attention(result, probabilities, power, scores, base, products[0]) if products else None
    return None


def row_sources(roots: Sequence[Node]) -> list[Node]:
    """Returns the reductions from which ``roots``, values of a row, are computed without another one between."""
    nodes = walked(roots, lambda node: () if node.kind is REDUCE else node.inputs)
    return [node for node in nodes if node.kind is REDUCE]


def spread_rows(root: Node, attention: Attention) -> list[Node]:
    """Returns the maxima and sums of rows, spread along the result, from which ``root`` is computed pointwise."""

    def is_spread(node: Node) -> bool:
        source = node.under_expand
        return node.shape == attention.result.shape and source.kind is REDUCE and attention.is_row_reduction(source)

    def below(node: Node) -> Sequence[Node]:
        return node.inputs if node.kind.is_pointwise and node is not attention.result else ()

    return [node for node in walked([root], below) if node is not attention.result and is_spread(node)]


def row_reductions(attention: Attention, index: Index) -> list[Node]:
    """Lists the maxima and sums of rows (``is_row_reduction``) in ``index``."""
    between = index.reached([attention.scores], lambda node: node is not attention.scores and node.op not in _IN_SUMS)
    users = {user for node in between for user in index.users[node]}
    return [user for user in users if user.kind is REDUCE and attention.is_row_reduction(user)]


def other_scores(node: Node, attention: Attention) -> list[Node] | None:
    """Returns what ``node`` concatenates to the scores, one score of each row; None if it is not the scores and such
    ones.

    A softmax over scores and a learned sink is over their concatenation.
    """
    if node is attention.scores:
        return []
    if (
        node.kind is not CAT
        or node.attrs != (attention.last,)
        or sum(input_ is attention.scores for input_ in node.inputs) != 1
    ):
        return None
    others = [input_ for input_ in node.inputs if input_ is not attention.scores]
    single = all(input_.shape[-1] == 1 and attention.product not in topological([input_]) for input_ in others)
    return others if single else None


def maxima(reduction: Node, attention: Attention) -> list[Node] | None:
    """Returns what ``reduction``, the maximum of the scores of a row, has besides them; None for anything else."""
    nodes = MAXIMUM.match(reduction)
    return None if nodes is None else other_scores(nodes["scores"], attention)


@dataclass(frozen=True, eq=False)
class Sum:
    """Describes the sum of exp(S - base) over a row (``base`` None for 0), with that of the scores ``others`` besides
    S."""

    base: Node | None
    others: Sequence[Node]


def sums(reduction: Node, attention: Attention) -> Sum | None:
    """Matches ``reduction`` as such a sum; None if it is something else."""
    for nodes in SUM.matches(reduction, {}):
        others = other_scores(nodes["scores"], attention)
        if others is not None:
            return Sum(nodes.get("base"), others)
    return None


def row_values(attention: Attention) -> list[Node]:
    """Returns the operands of ``attention`` that are one value for a row: its base, and the factors of its
    probabilities."""
    values = [] if attention.base is None else [attention.base]
    node = attention.probabilities
    while node is not attention.power:
        operand = linear_operand(node)
        assert operand is not None
        values += [child for child in node.inputs if child is not operand]
        node = operand
    return values


def obstacle(attention: Attention, index: Index, ends: Sequence[Node], stops: Collection[Node]) -> str | None:
    """Explains why ``attention`` cannot be one kernel; None if it can.

    Args:
        index: of the results that are computed together with it.
        ends: what it ends in.
        stops: those of the results behind which nothing is looked for, because what they end in is in ``ends``.
    """
    product, accumulator = attention.product, attention.result.attrs.accumulator
    if len(axes(product.attrs.equation).contracted) != 1:
        return "the product of queries and keys sums over several dimensions"
    if accumulator != product.attrs.accumulator or compute_dtype(attention.scores.dtype) != accumulator:
        return f"the scores are {attention.scores.dtype}, the values are summed in {accumulator}"
    for reduction in row_sources(row_values(attention)):
        if not index.depends(reduction, attention.product):
            continue
        if not attention.is_row_reduction(reduction):
            return f"a {reduction.attrs.kind} over a row of something else than the scores' exponentials"
    if is_needed_elsewhere(attention, index, ends, stops):
        return "the scores or the probabilities are also needed in memory"
    return None


def is_needed_elsewhere(attention: Attention, index: Index, ends: Sequence[Node], stops: Collection[Node]) -> bool:
    """Returns whether the roots of ``index`` or ``ends`` need the product of queries and keys otherwise than for the
    result, for a row's value or through the nodes ``stops``."""
    reach = Reach(
        index,
        [attention.product],
        lambda node: node is attention.product,
        lambda node: node is attention.result or node in stops or attention.is_row_reduction(node),
    )
    return any(value in reach for value in (*index.roots, *ends))
