"""The pattern matcher, and the patterns of attention and its backward: what each matches, and what it leaves alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from jitgen.families.attention.backward.match import ORIENTATIONS, oriented
from jitgen.families.attention.forward.match import Attention, matched, maxima, sums
from jitgen.families.attention.forward.spellings import SPELLINGS
from jitgen.families.gemm.integer_products import LONGEST, PRODUCTS
from jitgen.ir.exponentials import linear_operand
from jitgen.ir.graph import Builder, Node, topological
from jitgen.ir.patterns import (
    ZERO,
    Operation,
    Pattern,
    Rewrite,
    Rewriter,
    Rewrites,
    Through,
    exp,
    maybe_view,
    operation,
    row_max,
    row_sum,
    wildcards,
)
from jitgen.ir.views import Mover

x, y, z = wildcards("x y z")
ROWS, KEYS = 7, 5


class Graph(Builder):
    """Shorthands for nodes of shape (ROWS, KEYS)."""

    def input(self, index: int, *shape: int, dtype: str = "float32") -> Node:
        return self.make("input", (), dtype, shape or (ROWS, KEYS), (index,))

    def op(self, op: str, *inputs: Node, dtype: str = "float32") -> Node:
        return self.make(op, inputs, dtype, inputs[0].shape)

    def over(self, node: Node, kind: str, dim: int | None = None) -> Node:
        """The reduction of ``node`` over ``dim``, of which its last one is the default."""
        dim = len(node.shape) - 1 if dim is None else dim
        shape = (*node.shape[:dim], 1, *node.shape[dim + 1 :])
        return self.make("reduce", (node,), node.dtype, shape, (kind, (dim,)))

    def spread(self, node: Node, *shape: int) -> Node:
        return self.make("view", (node,), node.dtype, shape or (ROWS, KEYS), ("expand",))

    def view(self, node: Node, kind: str, *shape: int) -> Node:
        return self.make("view", (node,), node.dtype, shape, (kind,))

    def softmax(self, scores: Node) -> Node:
        shape = scores.shape
        power = self.op("exp", self.op("sub", scores, self.spread(self.over(scores, "max"), *shape)))
        total = self.spread(self.over(power, "sum"), *shape)
        return self.op("mul", power, self.op("reciprocal", total))

    def product(self, left: Node, right: Node, equation: str = "mk,nk->mn") -> Node:
        """(..., M, K) times (..., N, K)."""
        shape = (*left.shape[:-1], right.shape[-2])
        return self.make("contract", (left, right), left.dtype, shape, (equation, "float32", "ieee"))


@pytest.fixture
def g() -> Graph:
    return Graph()


# ------------------------------------------------------------------------------------------------------------- matching


def test_a_name_is_one_node_wherever_it_stands(g: Graph) -> None:
    a, b = g.input(0), g.input(1)
    pattern = x / exp(x)
    assert pattern.match(g.op("div", a, g.op("exp", a))) == {"x": a}
    assert pattern.match(g.op("div", b, g.op("exp", a))) is None


def test_products_and_sums_match_in_either_order_and_others_do_not(g: Graph) -> None:
    a, power = g.input(0), g.op("exp", g.input(1))
    for op, pattern in (("mul", exp(x) * y), ("add", exp(x) + y)):
        for operands in ((power, a), (a, power)):
            assert pattern.match(g.op(op, *operands)) == {"x": power.inputs[0], "y": a}
    assert (exp(x) - y).match(g.op("sub", a, power)) is None
    assert (exp(x) / y).match(g.op("div", a, power)) is None
    assert operation("mul", exp(x), y).match(g.op("mul", a, power)) is None


def test_an_order_that_fails_later_is_taken_back(g: Graph) -> None:
    """The first order binds x to what does not match at its second place."""
    a, b = g.op("exp", g.input(0)), g.op("exp", g.input(1))
    node = g.op("sub", g.op("mul", a, b), b)
    assert (exp(x) * exp(y) - exp(x)).match(node) == {"x": b.inputs[0], "y": a.inputs[0]}


def test_both_orders_are_matches_and_one_operand_twice_is_one(g: Graph) -> None:
    a, b = g.input(0), g.input(1)
    assert list((x * y).matches(g.op("mul", a, b), {})) == [{"x": a, "y": b}, {"x": b, "y": a}]
    assert list((x * y).matches(g.op("mul", a, a), {})) == [{"x": a, "y": a}]


def test_alternatives_are_tried_in_their_order(g: Graph) -> None:
    power = g.op("exp", g.input(0))
    assert (exp(x) | y).match(power) == {"x": power.inputs[0]}
    assert (y | exp(x)).match(power) == {"y": power}
    assert (exp(x) | operation("log", x)).match(g.op("sqrt", power)) is None
    assert (exp(x) | operation("log", x)).operations == {"exp", "log"}
    assert (exp(x) | y).operations is None


def test_conditions_on_dtype_shape_and_attrs(g: Graph) -> None:
    half, single = g.input(0, dtype="float16"), g.input(1)
    assert x.where(lambda node: node.dtype == "float16").match(half) is not None
    assert x.where(lambda node: node.dtype == "float16").match(single) is None
    maximum, total, column = g.over(single, "max"), g.over(single, "sum"), g.over(single, "max", 0)
    assert [pattern.match(node) is not None for pattern in (row_max(x), row_sum(x)) for node in (maximum, total)] == [
        True,
        False,
        False,
        True,
    ]
    assert row_max(x).match(column) is None
    assert ZERO.match(g.const(0, "int64")) is not None
    assert ZERO.match(g.const(float("nan"), "float32")) is None
    assert ZERO.match(g.op("exp", single)) is None


def test_a_number_of_operands(g: Graph) -> None:
    a = g.input(0)
    three = g.make("cat", (a, a, a), "float32", (3 * ROWS, KEYS), (0,))
    assert operation("cat", x, y).match(three) is None
    assert Operation(op="cat").match(three) == {}


def test_one_view_or_a_chain_of_casts_between(g: Graph) -> None:
    row = g.input(0, ROWS, 1)
    once = g.spread(row)
    pattern = exp(maybe_view(x.where(lambda node: node.op == "input")))
    assert pattern.match(g.op("exp", row)) == pattern.match(g.op("exp", once)) == {"x": row}
    twice = g.view(once, "reshape", ROWS * KEYS)
    assert pattern.match(g.op("exp", twice)) is None
    assert exp(maybe_view(x, "reshape")).match(g.op("exp", once)) == {"x": once}
    below = row
    for number in range(40):
        below = g.op("cast", below, dtype=("float32", "bfloat16")[number % 2])
    through = Through(inner=x, skip=lambda node: node.op == "cast")
    assert through.match(below) == {"x": row}


def test_a_deep_chain_takes_no_longer_than_a_shallow_one(g: Graph) -> None:
    """A pattern looks as deep as it is; what is shared behind that, 2**400 paths, is not walked."""
    node = g.input(0)
    for _ in range(400):
        node = g.op("mul", node, g.op("add", node, node))
    looked: list[Node] = []

    def look(node: Node) -> bool:
        looked.append(node)
        return False

    last = Pattern("z", (look,))
    pattern: Pattern = (x * (y + last)) * (x + y)
    started = time.perf_counter()
    assert pattern.match(node) is None
    assert time.perf_counter() - started < 1
    assert len(looked) <= 2**4


# ------------------------------------------------------------------------------------------------------------- rewrites


def test_the_first_rewrite_that_applies_is_done_and_named(g: Graph) -> None:
    a, b = g.input(0), g.input(1)
    rewrites = Rewrites(
        Rewrite("never", x * y, x, lambda context, x: False),
        Rewrite("nothing", x * y, lambda context, node: None),
        Rewrite("right", x * y, y, lambda context, y: y is context),
        Rewrite("left", x * y, x),
    )
    product = g.op("mul", a, b)
    assert rewrites.apply(product, b) == ("right", b)
    assert rewrites.apply(product, a) == ("right", a), "the other order"
    assert rewrites.apply(product, None) == ("left", a)
    assert rewrites.apply(g.op("add", a, b)) is None


def test_a_rewriter_rewrites_inputs_first_and_remembers_names(g: Graph) -> None:
    a = g.input(0)
    rewrites = Rewrites(
        Rewrite("x - 0", x - ZERO, x),
        Rewrite("log(exp(x))", operation("log", exp(x)), x),
        Rewrite("itself", exp(x), lambda rewriter, node: node),
    )
    mover = Mover(g)
    root = g.op("log", g.op("sub", g.op("exp", g.op("sub", a, g.const(0.0, "float32"))), g.const(0.0, "float32")))
    assert Rewriter(rewrites, mover).again(root) is a
    assert list(mover.fired) == ["x - 0", "log(exp(x))"], "what changes nothing has not fired"


# ------------------------------------------------------------------------------------------------------------ spellings


def _zero(g: Graph) -> Node:
    return g.const(0.0, "float32")


def _scores(g: Graph, rows: int = ROWS, keys: int = KEYS) -> Node:
    return g.product(g.input(0, rows, 16), g.input(1, keys, 16))


def _less_a_row_value(g: Graph, along: tuple[int, int] = (ROWS, 1)) -> Node:
    return g.over(g.op("sub", _scores(g), g.spread(g.input(2, *along))), "max")


def _power_by_logarithm(g: Graph, summed: str = "sum", of: int = 0) -> Node:
    scores = _scores(g)
    exponent = g.op("sub", scores, g.spread(g.over(scores, "max")))
    powers = [g.op("exp", exponent), g.op("exp", scores)]
    total = g.spread(g.over(powers[of], summed))
    return g.op("exp", g.op("sub", exponent, g.op("log", total)))


def _power_by_logarithm_of_others(g: Graph) -> Node:
    """The sum is of exponentials of other scores, relative to their own maximum."""
    maximum = g.spread(g.over(g.input(4), "max"))
    total = g.spread(g.over(g.op("exp", g.op("sub", g.input(4), maximum)), "sum"))
    return g.op("exp", g.op("sub", g.op("sub", _scores(g), maximum), g.op("log", total)))


def _power_of_two(g: Graph, kind: str = "max") -> Node:
    scores = _scores(g)
    return g.op("exp2", g.op("sub", scores, g.spread(g.over(scores, kind))))


def _selected(g: Graph, op: str, number: float, replacement: float = 0.0) -> Node:
    probabilities = g.softmax(_scores(g))
    operands = (probabilities,) if op == "isnan" else (probabilities, g.const(number, "float32"))
    condition = g.op(op, *operands, dtype="bool")
    return g.make("where", (condition, g.const(replacement, "float32"), probabilities), "float32", (ROWS, KEYS))


def _without_rows(g: Graph, op: str = "exp") -> Node:
    powers, values = g.op(op, g.input(0, 3, KEYS)), g.input(1, 3, 8, KEYS)
    return g.make("contract", (powers, values), "float32", (3, 8), ("bk,bnk->bn", "float32", "ieee"))


def _weighted(g: Graph, along: tuple[int, int] = (1, KEYS), dtype: str = "float32", op: str = "mul") -> Node:
    weights = g.op(op, g.softmax(_scores(g)), g.spread(g.input(2, *along)))
    weights = weights if dtype == "float32" else g.op("cast", weights, dtype=dtype)
    return g.product(weights, g.input(3, 8, KEYS, dtype=dtype))


def _reshaped_product(g: Graph, *shape: int) -> Node:
    return g.view(_scores(g), "reshape", *shape)


def _regrouped(g: Graph, kind: str, keys: int) -> Node:
    scores = g.input(0, 6, 4)
    row = g.spread(g.over(scores, "max"), 6, 4)
    return g.view(row, kind, 24 // keys, keys)


Made = Callable[[Graph], Node]
CASES: dict[str, tuple[Made, list[Made]]] = {
    "a reshape of a product to its own sizes is a product of reshaped operands": (
        lambda g: _reshaped_product(g, ROWS, KEYS),
        [lambda g: _reshaped_product(g, KEYS, ROWS), lambda g: g.view(g.input(0), "reshape", ROWS, KEYS)],
    ),
    "rows are regrouped before they are reduced": (
        lambda g: g.view(g.spread(g.over(g.input(0, 6, 4), "max"), 6, 4), "reshape", 2, 3, 4),
        [
            lambda g: _regrouped(g, "reshape", 2),
            lambda g: g.view(g.spread(g.over(g.input(0, 6, 4), "max", 0), 6, 4), "reshape", 2, 3, 4),
        ],
    ),
    "max(x - y) is max(x) - y, with y one value for a row": (
        _less_a_row_value,
        [lambda g: _less_a_row_value(g, (1, KEYS))],
    ),
    "a reduction less itself is 0": (
        lambda g: g.op("sub", g.over(g.input(0), "max"), g.over(g.input(0), "max")),
        [
            lambda g: g.op("sub", g.over(g.input(0), "max"), g.over(g.input(0), "min")),
            lambda g: g.op("sub", g.over(g.input(0), "max"), g.over(g.input(1), "max")),
        ],
    ),
    "x - 0 is x": (
        lambda g: g.op("sub", g.input(0), g.spread(_zero(g))),
        [lambda g: g.op("sub", _zero(g), g.input(0)), lambda g: g.op("sub", g.input(0), g.const(1.0, "float32"))],
    ),
    "exp(x - log(sum(exp(x)))) is exp(x) / sum(exp(x))": (
        _power_by_logarithm,
        [
            lambda g: _power_by_logarithm(g, "max"),
            lambda g: _power_by_logarithm(g, of=1),
            _power_by_logarithm_of_others,
        ],
    ),
    "exp2(x - max(x)) is exp(ln2 x - max(ln2 x))": (_power_of_two, [lambda g: _power_of_two(g, "min")]),
    "nan_to_num of a softmax is a selection by whether its sum is NaN": (
        lambda g: _selected(g, "isnan", 0.0),
        [lambda g: _selected(g, "isnan", 0.0, replacement=1.0)],
    ),
    "a softmax is not infinite": (
        lambda g: _selected(g, "eq", float("inf")),
        [lambda g: _selected(g, "eq", 1.0), lambda g: _selected(g, "ne", float("inf"))],
    ),
    "a product without rows has one row": (_without_rows, [lambda g: _without_rows(g, "sqrt")]),
    "(e * w) @ v is e @ (w * v), with w one value for a key": (
        _weighted,
        [
            lambda g: _weighted(g, (ROWS, 1)),
            lambda g: _weighted(g, (ROWS, KEYS)),
            lambda g: _weighted(g, op="add"),
            lambda g: _weighted(g, dtype="float16"),
        ],
    ),
}


def test_every_spelling_has_a_case() -> None:
    assert list(CASES) == list(SPELLINGS.names)


@pytest.mark.parametrize("name", CASES)
def test_a_spelling_is_rewritten(name: str, g: Graph) -> None:
    mover = Mover(g)
    root = CASES[name][0](g)
    image = Rewriter(SPELLINGS, mover).again(root)
    assert name in mover.fired
    assert image is not root
    assert (image.shape, image.dtype) == (root.shape, root.dtype)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in CASES for number in range(len(CASES[name][1]))]
)
def test_a_near_miss_is_left_alone(name: str, number: int, g: Graph) -> None:
    mover = Mover(g)
    Rewriter(SPELLINGS, mover).again(CASES[name][1][number](g))
    assert name not in mover.fired


def test_factors_of_keys_are_at_the_values(g: Graph) -> None:
    image = Rewriter(SPELLINGS, Mover(g)).again(_weighted(g))
    probabilities, values = image.inputs
    factor = next(node for node in topological([image]) if node.op == "input" and node.attrs == (2,))
    assert factor not in topological([probabilities])
    assert values.op == "mul"
    assert factor in topological([values])


# ------------------------------------------------------------------------------------------- products of a function's


def _function(g: Graph, tile: Node) -> Node:
    """A function of ``tile`` that is proportional to no exponential, as those of a backward are."""
    return g.op("mul", g.op("exp", tile), tile)


def _transposed(g: Graph, node: Node) -> Node:
    return g.make("view", (node,), node.dtype, node.shape[::-1], ("permute", (1, 0)))


def _round_trip(g: Graph, dtype: str, wide: str, last: str) -> Node:
    return g.op("cast", g.op("cast", g.input(0, dtype=dtype), dtype=wide), dtype=last)


VIEWED, TURNED, ROUND_TRIP = ORIENTATIONS.names
ORIENTED: list[tuple[str, bool, Made]] = [
    (VIEWED, True, lambda g: g.product(_function(g, _transposed(g, _scores(g))), g.input(2, 8, ROWS))),
    (VIEWED, False, lambda g: g.product(_transposed(g, _scores(g)), g.input(2, 8, ROWS))),
    (TURNED, True, lambda g: g.product(g.input(2, 8, KEYS), _function(g, _scores(g)))),
    (TURNED, False, lambda g: g.product(_function(g, _scores(g)), g.input(2, 8, KEYS))),
    (TURNED, False, lambda g: g.product(g.input(2, 8, KEYS), g.op("tanh", _scores(g)))),
    (ROUND_TRIP, True, lambda g: _round_trip(g, "bfloat16", "float32", "bfloat16")),
    (ROUND_TRIP, False, lambda g: _round_trip(g, "bfloat16", "float32", "float16")),
    (ROUND_TRIP, False, lambda g: _round_trip(g, "float32", "bfloat16", "float32")),
]


@pytest.mark.parametrize("case", range(len(ORIENTED)))
def test_orientations(case: int, g: Graph) -> None:
    name, fires, made = ORIENTED[case]
    mover = Mover(g)
    root = made(g)
    image = oriented([root], mover)[id(root)]
    assert (name in mover.fired) == fires
    assert (image is not root) == fires
    assert (image.shape, image.dtype) == (root.shape, root.dtype)


# --------------------------------------------------------------------------------------- maxima and sums of attention's


def _attention(g: Graph) -> Attention:
    found = matched(g.product(g.softmax(_scores(g)), g.input(9, 8, KEYS)))
    assert found is not None
    return found


def _beside(g: Graph, *others: Node) -> Node:
    pieces = (_scores(g), *others)
    return g.make("cat", pieces, "float32", (ROWS, sum(each.shape[1] for each in pieces)), (1,))


def test_the_exponent_is_scores_less_one_value_for_a_row(g: Graph) -> None:
    attention = _attention(g)
    assert attention.scores is attention.product is _scores(g)
    assert attention.base is g.spread(g.over(_scores(g), "max"))
    uneven = g.op("exp", g.op("sub", _scores(g), g.spread(g.input(2, 1, KEYS))))
    found = matched(g.product(uneven, g.input(9, 8, KEYS)))
    assert found is not None
    assert (found.base, found.scores) == (None, uneven.inputs[0])
    assert matched(g.product(g.op("tanh", _scores(g)), g.input(9, 8, KEYS))) is None


def test_maxima_of_scores_and_of_what_is_beside_them(g: Graph) -> None:
    attention, sink, two = _attention(g), g.input(2, ROWS, 1), g.input(3, ROWS, 2)
    assert maxima(g.over(_scores(g), "max"), attention) == []
    assert maxima(g.over(_beside(g, sink), "max"), attention) == [sink]
    for other in (g.over(_scores(g), "min"), g.over(_scores(g), "max", 0), g.over(_beside(g, two), "max"), sink):
        assert maxima(other, attention) is None


def test_sums_of_exponentials_of_scores(g: Graph) -> None:
    attention, sink = _attention(g), g.input(2, ROWS, 1)
    row, key = g.spread(g.input(4, ROWS, 1)), g.spread(g.input(5, 1, KEYS))
    power = g.op("exp", g.op("sub", _scores(g), row))
    rounded = g.op("cast", g.op("cast", power, dtype="bfloat16"))
    counted = g.op("cast", g.op("cast", power, dtype="int32"))
    for node in (power, rounded):
        found = sums(g.over(node, "sum"), attention)
        assert found is not None
        assert (found.base, found.others) == (row, [])
    plain = sums(g.over(g.op("exp", _beside(g, sink)), "sum"), attention)
    assert plain is not None
    assert (plain.base, plain.others) == (None, [sink])
    uneven = g.op("exp", g.op("sub", _scores(g), key))
    for node in (g.over(uneven, "sum"), g.over(counted, "sum"), g.over(power, "max"), g.over(power, "sum", 0)):
        assert sums(node, attention) is None


# --------------------------------------------------------------------------------------------------------- exponentials


def _where(g: Graph, *operands: Node) -> Node:
    return g.make("where", operands, "float32", (ROWS, KEYS))


def _proportional(g: Graph) -> dict[str, tuple[Node, Node | None]]:
    weights, row, key = g.input(0), g.spread(g.input(1, ROWS, 1)), g.spread(g.input(2, 1, KEYS))
    rows, keys = (g.op("gt", node, g.op("neg", node), dtype="bool") for node in (row, key))
    return {
        "cast": (g.op("cast", weights, dtype="bfloat16"), weights),
        "cast of an integer": (g.op("cast", g.input(3, dtype="int32")), None),
        "product": (g.op("mul", weights, row), weights),
        "product, the other order": (g.op("mul", row, weights), weights),
        "product with a key's value": (g.op("mul", weights, key), None),
        "product of row values": (g.op("mul", row, g.op("exp", row)), None),
        "quotient": (g.op("div", weights, row), weights),
        "quotient the other way": (g.op("div", row, weights), None),
        "selection": (_where(g, rows, weights, _zero(g)), weights),
        "selection, the other order": (_where(g, rows, _zero(g), weights), weights),
        "selection of zeros": (_where(g, rows, _zero(g), _zero(g)), None),
        "selection of ones": (_where(g, rows, weights, g.const(1.0, "float32")), None),
        "selection by keys": (_where(g, keys, weights, _zero(g)), None),
    }


@pytest.mark.parametrize("case", _proportional(Graph()))
def test_what_is_proportional(case: str, g: Graph) -> None:
    node, operand = _proportional(g)[case]
    assert linear_operand(node) is operand


@pytest.mark.parametrize(
    ("dtype", "accumulator", "length", "rewritten"),
    [
        ("int16", "int32", 5, True),
        ("uint8", "int32", 5, True),
        ("int64", "int64", 5, True),
        ("int8", "int32", 5, False),
        ("int8", "int32", LONGEST, False),
        ("int8", "int32", LONGEST + 1, True),
        ("float32", "float32", LONGEST + 1, False),
        ("bfloat16", "float32", 5, False),
    ],
)
def test_products_of_integers_without_a_mainloop(
    dtype: str, accumulator: str, length: int, rewritten: bool, g: Graph
) -> None:
    rows, columns = g.input(0, 3, length, dtype=dtype), g.input(1, 4, length, dtype=dtype)
    product = g.make("contract", (rows, columns), accumulator, (3, 4), ("mk,nk->mn", accumulator, "ieee"))
    rewriter = Rewriter(PRODUCTS, Mover(g))
    image = rewriter.images([product])[id(product)]
    assert (image is not product) == rewritten == bool(rewriter.mover.fired)
    if rewritten:
        assert (image.dtype, image.shape) == (product.dtype, product.shape)
        reduction = image.under_views
        assert (reduction.op, reduction.attrs.kind, reduction.inputs[0].op) == ("reduce", "sum", "mul")
        assert reduction.inputs[0].shape == (3, 4, length)
    assert rewriter.images([rows])[id(rows)] is rows


@pytest.mark.parametrize(
    ("op", "operands", "error"),
    [("lgo", (x,), KeyError), ("log", (x, y), AssertionError), ("cat", (x,), AssertionError)],
)
def test_a_pattern_that_no_node_can_match_is_refused(
    op: str, operands: tuple[Pattern, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        operation(op, *operands)


@pytest.mark.parametrize(
    ("result", "given"),
    [(lambda _, y: y, None), (wildcards("y")[0], None), (wildcards("x")[0], lambda _, x, y: True)],
    ids=["result", "wildcard", "condition"],
)
def test_a_rewrite_asks_for_named_nodes_alone(result: Any, given: Any) -> None:
    with pytest.raises(AssertionError, match=r"does not name: \['y'\]"):
        Rewrite("a sum", operation("exp", wildcards("x")[0]), result, given)
