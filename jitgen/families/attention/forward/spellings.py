"""Spellings of attention as the one that ``match.py`` knows: rewrites of values before they are claimed.

With x scores, y and z values of a row, w a value of a key, e exponentials of scores, and v values of keys:

* ``max(x - y)`` is ``max(x) - y``, so that a softmax of scores that are relative to their maximum is one of the scores;
* ``exp(x - log(z))`` is ``exp(x) / z`` where z is the sum of such exponentials and x is relative to their maximum, so
  that no power is greater than 1 and z is at least 1: ``log_softmax(x).exp()`` is a softmax;
* ``exp2(x - max(x))`` is ``exp(ln2 x - max(ln2 x))``;
* ``nan_to_num`` of a softmax, or a selection by ``isnan`` of it, is a selection by whether its sum is NaN;
* ``(e * w) @ v`` is ``e @ (w * v)``: scales of quantised values, and masks of keys that weights are multiplied with.
  Kernels round w v to the dtype of v, which must not overflow: values of float16 take masks, and codes their scales;
* a product without rows has one row: ``einsum("bhn,bhne->bhe", p, v)``;
* a reshape of a product to its own sizes is the product of operands reshaped so, and one that regroups rows comes
  before what is reduced over them.

Nothing else of a graph changes, and a graph without a product of exponentials stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jitgen.families.attention.forward.match import is_maximum
from jitgen.families.attention.forward.reading import is_widening
from jitgen.families.attention.rule.heads import same_sizes
from jitgen.ir.analysis import one_of, rewritten, varies
from jitgen.ir.equations import axes, equation
from jitgen.ir.exponentials import exponential_behind, linear_operand
from jitgen.ir.graph import Node, under_views
from jitgen.ir.views import Mover

LN2 = math.log(2)
"""What turns powers of two into exponentials."""


def respelt(values: Sequence[Node], mover: Mover) -> dict[int, Node]:
    """``values`` and all that they are computed from, by the ids of what they were, with their attention spelt as
    ``match.py`` knows it."""
    spelling = _Spelling(mover)
    found: dict[int, Node] = {}
    for value in values:
        rewritten(value, mover, spelling.rewrite, found)
    return found


class _Spelling:
    """The rewrites, as a change of one node whose operands are rewritten."""

    def __init__(self, mover: Mover):
        self.mover, self.make = mover, mover.builder.make
        self.rows = {
            "view": self._view,
            "reduce": self._reduce,
            "sub": self._sub,
            "exp": self._exp,
            "exp2": self._exp2,
            "where": self._where,
            "contract": self._contract,
        }

    def rewrite(self, node: Node, rebuilt: Node) -> Node:
        """What takes the place of ``rebuilt``, which is ``node`` over rewritten operands."""
        return self.rows[rebuilt.op](rebuilt) if rebuilt.op in self.rows else rebuilt

    def _view(self, node: Node) -> Node:
        (source,) = node.inputs
        if node.attrs[0] == "reshape":
            if source.op == "contract" and same_sizes(node.shape, source.shape, self.mover):
                return self._reshaped(source, node)
            inner = source.inputs[0] if source.op == "view" and source.attrs[0] == "expand" else source
            of_rows = inner.op == "reduce" and inner.attrs[1] == (len(inner.shape) - 1,)
            if of_rows and node.shape[-1:] == source.shape[-1:] and inner.shape[:-1] == source.shape[:-1]:
                return self._of_rows(inner, node)
        return self.mover.move(source, node.attrs, node.shape)

    def _of_rows(self, reduction: Node, view: Node) -> Node:
        """A reduction of rows that ``view`` regroups, as a reduction of regrouped rows."""
        (operand,) = reduction.inputs
        lead = view.shape[:-1]
        regrouped = rewritten(
            self.mover.move(operand, ("reshape",), (*lead, operand.shape[-1])), self.mover, self.rewrite
        )
        attrs = (reduction.attrs[0], (len(lead),))
        one = self.make("reduce", (regrouped,), reduction.dtype, (*lead, 1), attrs, reduction.location)
        return self.mover.move(one, ("expand",), view.shape)

    def _reshaped(self, product: Node, view: Node) -> Node:
        """``product``, whose sizes are those of ``view`` in other words, in the words of ``view``."""
        x, weight = product.inputs
        batch = len(axes(product.attrs[0]).batch)
        rows = self.mover.move(x, ("reshape",), (*view.shape[:-1], x.shape[-1]))
        columns = self.mover.move(weight, ("reshape",), (*view.shape[:batch], view.shape[-1], weight.shape[-1]))
        return self.mover.builder.like(product, (rows, columns), view.shape)

    def _reduce(self, node: Node) -> Node:
        (operand,) = node.inputs
        last = (len(node.shape) - 1,)
        if node.attrs != ("max", last) or operand.op != "sub" or varies(operand.inputs[1], last):
            return node
        most = self.make("reduce", (operand.inputs[0],), node.dtype, node.shape, node.attrs, node.location)
        return self._sub(self.make("sub", (most, self._of_row(operand.inputs[1])), node.dtype, node.shape))

    def _of_row(self, value: Node) -> Node:
        """``value``, the same for all elements of a row, with one element for it."""
        return value if value.op in ("const", "scalar") else one_of(value, [len(value.shape) - 1], self.mover)

    def _sub(self, node: Node) -> Node:
        left, right = node.inputs
        # Relative to itself a maximum is zero, be the one of another dtype: neither is rounded between operations.
        if left.op == right.op == "reduce" and (left.inputs, left.attrs) == (right.inputs, right.attrs):
            zero = self.mover.builder.const(0.0, node.dtype)
            return self.make("view", (zero,), node.dtype, node.shape, ("expand",))
        source = right.inputs[0] if right.op == "view" else right
        return left if source.op == "const" and source.attrs[0] == 0 else node

    def _exp(self, node: Node) -> Node:
        (operand,) = node.inputs
        last = (len(node.shape) - 1,)
        if (
            operand.op != "sub"
            or operand.inputs[1].op != "log"
            or varies(operand.inputs[1], last)
            or not varies(operand, last)
        ):
            return node
        if not _is_sum_of_such_powers(operand.inputs[1].inputs[0], operand.inputs[0]):
            return node
        power = self.mover.builder.like(node, (operand.inputs[0],))
        return self.make("div", (power, operand.inputs[1].inputs[0]), node.dtype, node.shape, (), node.location)

    def _exp2(self, node: Node) -> Node:
        (operand,) = node.inputs
        if operand.op != "sub" or not is_maximum(operand.inputs[1], operand.inputs[0]):
            return node
        scores, most = operand.inputs
        factor = self.mover.builder.const(LN2, node.dtype)
        scaled = self.make("mul", (scores, factor), scores.dtype, scores.shape)
        maximum = most if most.op == "reduce" else most.inputs[0]  # of one key it is not spread
        row_max = self.mover.builder.like(maximum, (scaled,))
        difference = self.mover.builder.like(operand, (scaled, self.mover.move(row_max, ("expand",), scores.shape)))
        return self.make("exp", (difference,), node.dtype, node.shape, (), node.location)

    def _where(self, node: Node) -> Node:
        condition, chosen, otherwise = node.inputs
        if condition.op not in ("isnan", "eq") or not _is_softmax(condition.inputs[0]):
            return node
        probabilities = condition.inputs[0]
        if condition.op == "eq":  # a share of a sum is no infinity
            infinite = condition.inputs[1].op == "const" and math.isinf(condition.inputs[1].attrs[0])
            return otherwise if infinite else node
        if otherwise is not probabilities or chosen.op != "const" or chosen.attrs[0] != 0:
            return node
        row_sum = probabilities.inputs[1].inputs[0]  # 1 at least; of a row without scores a kernel has 0
        zero = self.mover.builder.const(0.0, row_sum.dtype)
        is_sum = self.make("gt", (row_sum, zero), "bool", node.shape)
        return self.mover.builder.like(node, (is_sum, probabilities, chosen))

    def _contract(self, node: Node) -> Node:
        probabilities, values = node.inputs
        found = axes(node.attrs[0])
        if len(found.contracted) != 1 or not exponential_behind(probabilities):
            return node
        batch = len(found.batch)
        if not found.rows:
            left = self.mover.move(
                probabilities, ("unsqueeze", batch), (*probabilities.shape[:-1], 1, probabilities.shape[-1])
            )
            attrs = (equation(batch, 1), *node.attrs[1:])
            shape = (*node.shape[:-1], 1, node.shape[-1])
            one = self._contract(self.make("contract", (left, values), node.dtype, shape, attrs, node.location))
            return self.make("view", (one,), node.dtype, node.shape, ("squeeze", batch))
        if len(found.rows) != 1:
            return node
        left, right = self._without_key_factors(probabilities, values, batch)
        return node if left is probabilities else self.mover.builder.like(node, (left, right))

    def _without_key_factors(self, probabilities: Node, values: Node, row: int) -> tuple[Node, Node]:
        """``probabilities`` without factors that are the same for all rows (dimension ``row``), and ``values`` with
        them."""
        chain: list[tuple[Node, int]] = []
        factors: list[tuple[Node, int]] = []
        node, last = probabilities, (len(probabilities.shape) - 1,)
        while node.op != "exp":
            position = linear_operand(node, last)
            if position is not None:
                chain.append((node, position))
            else:
                position = _beside_key_factor(node, row)
                if position is None:
                    return probabilities, values
                factors.append((node, position))
            node = node.inputs[position]
        if not factors or not _takes_factors(values, [step for step, _ in factors]):
            return probabilities, values
        exponent = node.inputs[0]
        if exponent.shape[-1] == 1 or (exponent.op == "sub" and varies(exponent.inputs[1], last)):
            return probabilities, values  # of other rows each: where one has no keys, its NaN is to meet its own factor
        for step, position in reversed(chain):
            operands = [node if number == position else child for number, child in enumerate(step.inputs)]
            node = self.mover.builder.like(step, operands)
        if node.dtype != probabilities.dtype:  # the step that rounded them was one of the factors
            node = self.make("cast", (node,), probabilities.dtype, node.shape)
        for step, position in reversed(factors):
            operands = [
                values if number == position else self._of_key(child, row, values)
                for number, child in enumerate(step.inputs)
            ]
            values = self.make(step.op, operands, values.dtype, values.shape, step.attrs, step.location)
        return node, values

    def _of_key(self, value: Node, row: int, like: Node) -> Node:
        """``value``, the same for all rows, as an operand of what has the shape of ``like``: (lead..., E, N)."""
        if value.op in ("const", "scalar"):
            return value
        return self.mover.move(one_of(value, [row], self.mover), ("expand",), like.shape)


def _beside_key_factor(node: Node, row: int) -> int | None:
    """The operand of ``node`` that leads to an exponential, where the others are the same for all rows; else None."""
    if node.op == "mul":
        found = [number for number in (0, 1) if exponential_behind(node.inputs[number])]
    elif node.op == "div":
        found = [0]
    elif node.op == "where":
        zero = [n for n in (1, 2) if node.inputs[n].op == "const" and not node.inputs[n].attrs[0]]
        found = [3 - number for number in zero]
    else:
        return None
    others = [child for number, child in enumerate(node.inputs) if [number] != found]
    return found[0] if len(found) == 1 and not any(varies(child, (row,)) for child in others) else None


def _takes_factors(values: Node, steps: Sequence[Node]) -> bool:
    """Whether ``values`` may be rounded to their dtype after ``steps``: it has the exponents of float32, the steps are
    selections, or ``values`` are codes of fewer bits, whose products with their scales are what they stand for."""
    if values.dtype != "float16" or all(step.op == "where" for step in steps):
        return True
    return is_widening(under_views(values))


def _is_sum_of_such_powers(row_sum: Node, exponent: Node) -> bool:
    """Whether ``exponent`` is x - m and ``row_sum`` the sum of exp(y - m) over a row, with m the maximum of y; y is x,
    or x and others beside it."""
    summed = row_sum.inputs[0] if row_sum.op == "view" and row_sum.attrs[0] == "expand" else row_sum
    last = len(exponent.shape) - 1
    if exponent.op != "sub" or summed.op != "reduce" or summed.attrs != ("sum", (last,)):
        return False
    (power,) = summed.inputs
    if power.op != "exp" or power.inputs[0].op != "sub":
        return False
    operand, most = power.inputs[0].inputs
    scores, base = exponent.inputs
    is_beside = operand is scores or (
        operand.op == "cat" and operand.attrs == (last,) and any(each is scores for each in operand.inputs)
    )
    sources = [each.inputs[0] if each.op == "view" else each for each in (most, base)]
    return is_beside and is_maximum(most, operand) and sources[0] is sources[1]


def _is_softmax(node: Node) -> bool:
    """Whether ``node`` is exp(x - max(x)) times the reciprocal of its sum over the last dimension."""
    if node.op != "mul" or node.inputs[0].op != "exp" or node.inputs[1].op != "reciprocal":
        return False
    power, row_sum = node.inputs[0], node.inputs[1].inputs[0]
    if power.inputs[0].op != "sub" or not is_maximum(power.inputs[0].inputs[1], power.inputs[0].inputs[0]):
        return False
    summed = row_sum.inputs[0] if row_sum.op == "view" and row_sum.attrs[0] == "expand" else row_sum
    return summed.op == "reduce" and summed.inputs[0] is power and summed.attrs == ("sum", (len(node.shape) - 1,))
