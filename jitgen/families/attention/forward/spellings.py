"""Rewrites spellings of attention to the one that ``match.py`` knows: named rewrites of values before they are claimed.

``SPELLINGS`` lists them, each with the formula of what it takes the place of. Nothing else of a graph changes, and a
graph without a product of exponentials stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jitgen.families.attention.forward.reading import is_widening
from jitgen.families.attention.rule.heads import same_sizes
from jitgen.ir.analysis import one_of, varies
from jitgen.ir.equations import axes, equation
from jitgen.ir.exponentials import exponential_behind, linear_operand
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAT
from jitgen.ir.patterns import (
    ZERO,
    Rewrite,
    Rewriter,
    Rewrites,
    contract,
    exp,
    exp2,
    log,
    maybe_view,
    number,
    operation,
    reciprocal,
    row_max,
    row_reduction,
    row_sum,
    select,
    spread,
    view,
    wildcards,
)
from jitgen.ir.views import Mover

LN2 = math.log(2)
"""What turns powers of two into exponentials."""


def respelt(values: Sequence[Node], mover: Mover) -> Mapping[int, Node]:
    """Rewrites attention in ``values`` to the spelling that ``match.py`` knows; returns the values, and all that they
    are computed from, by the ids of what they were."""
    return Rewriter(SPELLINGS, mover).images(values)


def _last(node: Node) -> tuple[int]:
    return (len(node.shape) - 1,)


# -------------------------------------------------------------------------------------------------------------- results


def _product_of_reshaped(rewriter: Rewriter, node: Node, product: Node) -> Node:
    x, weight = product.inputs
    batch, move = len(axes(product.attrs.equation).batch), rewriter.mover.move
    rows = move(x, ("reshape",), (*node.shape[:-1], x.shape[-1]))
    columns = move(weight, ("reshape",), (*node.shape[:batch], node.shape[-1], weight.shape[-1]))
    return rewriter.like(product, (rows, columns), node.shape)


def _reduction_of_regrouped(rewriter: Rewriter, node: Node, combined: Node, x: Node) -> Node:
    lead = node.shape[:-1]
    regrouped = rewriter.again(rewriter.mover.move(x, ("reshape",), (*lead, x.shape[-1])))
    attrs = combined.attrs._replace(dims=(len(lead),))
    one = rewriter.make("reduce", (regrouped,), combined.dtype, (*lead, 1), attrs, combined.location)
    return rewriter.mover.move(one, ("expand",), node.shape)


def _maximum_less_row_value(rewriter: Rewriter, node: Node, x: Node, y: Node) -> Node:
    maximum = rewriter.make("reduce", (x,), node.dtype, node.shape, node.attrs, node.location)
    row = y if y.kind.is_number else one_of(y, _last(y), rewriter.mover)
    return rewriter.step(rewriter.make("sub", (maximum, row), node.dtype, node.shape))


def _zeros(rewriter: Rewriter, node: Node) -> Node:
    return rewriter.make("view", (rewriter.number(0.0, node.dtype),), node.dtype, node.shape, ("expand",))


def _quotient(rewriter: Rewriter, node: Node, exponent: Node, row_sum: Node) -> Node:
    power = rewriter.like(node, (exponent,))
    return rewriter.make("div", (power, row_sum), node.dtype, node.shape, (), node.location)


def _exponential(rewriter: Rewriter, node: Node, difference: Node, scores: Node, maximum: Node) -> Node:
    scaled = rewriter.make("mul", (scores, rewriter.number(LN2, node.dtype)), scores.dtype, scores.shape)
    spread_maximum = rewriter.mover.move(rewriter.like(maximum, (scaled,)), ("expand",), scores.shape)
    exponent = rewriter.like(difference, (scaled, spread_maximum))
    return rewriter.make("exp", (exponent,), node.dtype, node.shape, (), node.location)


def _selected_by_sum(rewriter: Rewriter, node: Node, probabilities: Node, row_sum: Node, zero: Node) -> Node:
    """Selects ``probabilities`` where ``row_sum`` is a sum: it is 1 at least, and 0 in a kernel where a row has no
    scores."""
    is_sum = rewriter.make("gt", (row_sum, rewriter.number(0.0, row_sum.dtype)), "bool", node.shape)
    return rewriter.like(node, (is_sum, probabilities, zero))


def _product_of_one_row(rewriter: Rewriter, node: Node, probabilities: Node, values: Node) -> Node:
    batch = len(axes(node.attrs.equation).batch)
    row = rewriter.mover.move(
        probabilities, ("unsqueeze", batch), (*probabilities.shape[:-1], 1, probabilities.shape[-1])
    )
    attrs = node.attrs._replace(equation=equation(batch, 1))
    shape = (*node.shape[:-1], 1, node.shape[-1])
    product = rewriter.step(rewriter.make("contract", (row, values), node.dtype, shape, attrs, node.location))
    return rewriter.make("view", (product,), node.dtype, node.shape, ("squeeze", batch))


def _with_weighted_values(rewriter: Rewriter, node: Node, probabilities: Node, values: Node) -> Node | None:
    """Moves factors that are the same for all rows from ``probabilities`` to ``values`` in the product ``node``."""
    chain: list[tuple[Node, Node]] = []
    factors: list[tuple[Node, Node]] = []
    step, last, row = probabilities, _last(probabilities), len(axes(node.attrs.equation).batch)
    while step.op != "exp":
        operand = linear_operand(step)
        steps = factors if operand is None else chain
        operand = KEY_FACTORS.result(step, row) if operand is None else operand
        if operand is None:
            return None
        steps.append((step, operand))
        step = operand
    if not factors or not _takes_factors(values):
        return None
    exponent = step.inputs[0]
    if exponent.shape[-1] == 1 or (exponent.op == "sub" and varies(exponent.inputs[1], last)):
        return None  # of other rows each: where one has no keys, its NaN is to meet its own factor
    for link, operand in reversed(chain):
        step = rewriter.like(link, [step if child is operand else child for child in link.inputs])
    if step.dtype != probabilities.dtype:  # the step that rounded them was one of the factors
        step = rewriter.make("cast", (step,), probabilities.dtype, step.shape)
    for factor, operand in reversed(factors):
        operands = [
            values if input_ is operand else _of_key(input_, row, values, rewriter.mover) for input_ in factor.inputs
        ]
        values = rewriter.make(factor.op, operands, values.dtype, values.shape, factor.attrs, factor.location)
    return rewriter.like(node, (step, values))


def _of_key(value: Node, row: int, like: Node, mover: Mover) -> Node:
    """Spreads ``value``, the same for all rows, to the shape of ``like``: (lead..., E, N)."""
    return value if value.kind.is_number else mover.move(one_of(value, [row], mover), ("expand",), like.shape)


def _takes_factors(values: Node) -> bool:
    """Returns whether ``values`` may be rounded to their dtype after factors: it has the exponents of float32, or
    ``values`` are codes of fewer bits."""
    return values.dtype != "float16" or is_widening(values.under_views)


# ----------------------------------------------------------------------------------------------------------- conditions


def _regroups_rows(rewriter: Rewriter, node: Node, combined: Node, rows: Node) -> bool:
    return node.shape[-1:] == rows.shape[-1:] and combined.shape[:-1] == rows.shape[:-1]


def _sums_its_powers(rewriter: Rewriter, exponent: Node, logarithm: Node, scores: Node, keys: Node) -> bool:
    """Returns whether ``keys``, whose powers are summed, are ``scores``, or these and others."""
    last = _last(exponent)
    together = keys.kind is CAT and keys.attrs == last and any(piece is scores for piece in keys.inputs)
    return (keys is scores or together) and not varies(logarithm, last) and varies(exponent, last)


def _weighs(product: Node, rows: int) -> bool:
    """Returns whether ``product`` sums exponentials times values over one axis, and has so many axes of ``rows``."""
    named = axes(product.attrs.equation)
    return len(named.rows) == rows and len(named.contracted) == 1 and exponential_behind(product.inputs[0])


# ------------------------------------------------------------------------------------------------------------- the list

x, y, scores, keys, power, probabilities, values = wildcards("x y scores keys power probabilities values")
maximum = row_max(scores).named("maximum")
maximum_of_keys = row_max(keys).named("maximum")
zero = ZERO.named("zero")
softmax = operation(
    "mul", exp(scores - spread(maximum)).named("power"), reciprocal(spread(row_sum(power)).named("row_sum"))
).named("probabilities")

KEY_FACTORS = Rewrites(
    Rewrite(
        "a factor of each key",
        x * y,
        x,
        lambda row, x, y: exponential_behind(x) and not exponential_behind(y) and not varies(y, (row,)),
    ),
    Rewrite("a divisor of each key", x / y, x, lambda row, x, y: x is not y and not varies(y, (row,))),
)
"""Of what x is multiplied with, the same for all rows (along the dimension ``row``), x alone. A selection of keys is no
factor: it takes away the NaN of a row without scores, which values that are 0 would not."""

SPELLINGS = Rewrites(
    Rewrite(
        "a reshape of a product to its own sizes is a product of reshaped operands",
        view(contract(x, y).named("product"), "reshape"),
        _product_of_reshaped,
        lambda rewriter, node, product: same_sizes(node.shape, product.shape, rewriter.mover),
    ),
    Rewrite(
        "rows are regrouped before they are reduced",
        view(spread(row_reduction(x).named("combined")).named("rows"), "reshape"),
        _reduction_of_regrouped,
        _regroups_rows,
    ),
    Rewrite(  # so that a softmax of scores that are relative to their maximum is one of the scores
        "max(x - y) is max(x) - y, with y one value for a row",
        row_max(x - y),
        _maximum_less_row_value,
        lambda rewriter, node, y: not varies(y, _last(node)),
    ),
    Rewrite(  # be the one of another dtype: neither is rounded between operations
        "a reduction less itself is 0",
        operation("reduce", x).named("left") - operation("reduce", x).named("right"),
        _zeros,
        lambda rewriter, left, right: left.attrs == right.attrs,
    ),
    Rewrite("x - 0 is x", x - maybe_view(ZERO), x),
    Rewrite(  # with x - m for the exponent no power is greater than 1, and the sum is 1 at least
        "exp(x - log(sum(exp(x)))) is exp(x) / sum(exp(x))",
        exp(
            (scores - maybe_view(maximum_of_keys)).named("exponent")
            - log(spread(row_sum(exp(keys - spread(maximum_of_keys)))).named("row_sum")).named("logarithm")
        ),
        _quotient,
        _sums_its_powers,
    ),
    Rewrite(
        "exp2(x - max(x)) is exp(ln2 x - max(ln2 x))",
        exp2((scores - spread(maximum)).named("difference")),
        _exponential,
    ),
    Rewrite(
        "nan_to_num of a softmax is a selection by whether its sum is NaN",
        select(operation("isnan", softmax), zero, probabilities),
        _selected_by_sum,
    ),
    Rewrite("a softmax is not infinite", select(operation("eq", softmax, number(math.isinf)), x, y), y),
    Rewrite(
        "a product without rows has one row",
        contract(probabilities, values),
        _product_of_one_row,
        lambda rewriter, node: _weighs(node, rows=0),
    ),
    Rewrite(  # scales of quantised values, and masks of keys that probabilities are multiplied with: numbers, not bools
        "(e * w) @ v is e @ (w * v), with w one value for a key",
        contract(probabilities, values),
        _with_weighted_values,
        lambda rewriter, node: _weighs(node, rows=1),
    ),
)
