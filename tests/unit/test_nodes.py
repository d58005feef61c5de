"""The node table: every kind has its row wherever kinds have rows, and the columns are true of the nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jitgen_cases import lowered_graph

import jitgen
from jitgen.deploy import node_schema
from jitgen.gradients.rules import RULES
from jitgen.gradients.structured import DERIVATIVES
from jitgen.ir import graph as graphs
from jitgen.ir.attributes import MOVEMENTS
from jitgen.ir.batched import batched
from jitgen.ir.graph import Builder, Graph, InputSpec, input_shape
from jitgen.ir.nodes import (
    BITS,
    BLOCKED,
    CAST,
    CAT,
    CONST,
    CONTRACT,
    CONVOLVE,
    COUNTED,
    CUSTOM_GRADIENT,
    DEQUANTIZE,
    GATHER,
    GROUPED,
    INPUT,
    IOTA,
    KINDS,
    LARGEST,
    LAUNCH,
    LIMITED,
    OWN,
    REDUCE,
    SCALAR,
    SCAN,
    SCATTER,
    SORT,
    STRUCTURED,
    TAKEN,
    VIEW,
    Kind,
    Reads,
)
from jitgen.ir.ops import OPS
from jitgen.ir.views import Mover

LEAVES = {INPUT, CONST, SCALAR, IOTA}


def test_names_are_the_vocabulary_of_graphs() -> None:
    assert list(KINDS) == [kind.name for kind in KINDS.values()]
    assert set(KINDS) == {kind.name for kind in STRUCTURED} | set(OPS)
    assert len(KINDS) == len(STRUCTURED) + len(OPS)
    assert all(kind.doc for kind in KINDS.values())


def test_arithmetic_has_operations_and_movement_has_none() -> None:
    """Decoding a weight, sorting and casts count none, as in the work of a kernel."""
    x, one = Builder().make("input", (), "float32", (6, 5), (0,)), (1,)
    nodes = Builder()
    assert nodes.make("exp", (x,), "float32", x.shape).kind.flops(x) == OPS["exp"].flops
    for node, count in (
        (nodes.make("reduce", (x,), "float32", (6, 1), ("sum", one)), 5),
        (nodes.make("contract", (x, x), "float32", (6, 6), ("mk,nk->mn", "float32", "ieee")), 10),
        (nodes.make("scan", (x,), "float32", x.shape, ("sum", 1, False)), 1),
        (nodes.make("view", (x,), "float32", (5, 6), ("permute", (1, 0))), 0),
        (nodes.make("cast", (x,), "float16", x.shape), 0),
    ):
        assert node.kind.flops(node) == count, node.kind


def test_a_manifest_holds_every_kind_but_marks_for_gradients() -> None:
    """``test_manifest_schema.test_marks_for_gradients_are_not_recorded`` shows that none is recorded."""
    assert set(node_schema.CHECKS) == set(KINDS.values()) - {CUSTOM_GRADIENT, BLOCKED, COUNTED, LARGEST, LIMITED, TAKEN}
    assert set(node_schema.VIEWS) == set(MOVEMENTS)


def test_a_gradient_flows_through_every_kind_with_operands() -> None:
    """A quantised weight has no gradient, plans alone count numbers, integers and predicates have none, and two
    operations come from rewrites that no gradient is computed of."""
    assert set(DERIVATIVES) == set(STRUCTURED) - LEAVES - {DEQUANTIZE, BLOCKED, COUNTED, LARGEST, LIMITED, TAKEN}
    without = {name for name in set(OPS) - set(RULES) if not OPS[name].predicate and "float32" in OPS[name].domain}
    assert without == {"fma", "exp2_normal"}
    assert all(len(RULES[name]) == OPS[name].arity for name in RULES)


def test_every_kind_with_operands_is_computed_over_a_batch() -> None:
    assert {kind for kind in KINDS.values() if kind.batch is None} == LEAVES | {
        DEQUANTIZE,
        GROUPED,
        LAUNCH,
        BLOCKED,
        COUNTED,
        LARGEST,
        LIMITED,
        TAKEN,
    }


def test_views_move_by_a_rule_or_by_commuting() -> None:
    """A view of anything else is read from memory: of tensors, indices, weights, convolutions, and of what a scatter or
    a user's kernel writes."""
    assert not [kind for kind in KINDS.values() if kind.commutes and kind.move]
    stay = {kind for kind in KINDS.values() if not kind.commutes and kind.move is None}
    assert stay == {INPUT, IOTA, VIEW, CONVOLVE, SCATTER, LAUNCH, COUNTED, TAKEN, LARGEST, BLOCKED, DEQUANTIZE}


def test_pointwise_kinds_are_the_operations_and_casts() -> None:
    assert {kind for kind in KINDS.values() if kind.is_pointwise} == {KINDS[name] for name in OPS} | {BITS, CAST, OWN}
    assert {kind for kind in KINDS.values() if kind.is_number} == {CONST, SCALAR}
    elsewhere = {CAT, CONTRACT, GROUPED, CONVOLVE, GATHER, SCATTER, LAUNCH, SORT, COUNTED, LARGEST, DEQUANTIZE}
    assert {kind for kind in KINDS.values() if kind.reads_elsewhere} == elsewhere
    assert {kind for kind in KINDS.values() if kind.reads_others} == elsewhere | {REDUCE, SCAN, LIMITED, TAKEN, BLOCKED}
    assert {kind for kind in KINDS.values() if kind.reads is Reads.NOTHING} == LEAVES
    assert {kind for kind in KINDS.values() if kind.operands == (0, 0)} == LEAVES


# A node of each kind that moves, over inputs of (4, 6): its operands, its shape and its attributes.
CASES: dict[Kind, tuple[int, tuple[int, ...], tuple[Any, ...]]] = {
    CAT: (2, (4, 12), (1,)),
    REDUCE: (1, (4, 1), ("sum", (1,))),
    SCAN: (1, (4, 6), ("sum", 1, False)),
    SORT: (1, (4, 6), ("values", 1, False, 0)),
    CONTRACT: (2, (4, 4), ("mk,nk->mn", "float32", "ieee")),
    KINDS["add"]: (2, (4, 6), ()),
    CAST: (1, (4, 6), ()),
}


def _made(builder: Builder, kind: Kind) -> graphs.Node:
    count, shape, attrs = CASES[kind]
    inputs = [builder.make("input", (), "float32", (4, 6), (number,)) for number in range(count)]
    return builder.make(kind.name, inputs, "float32", shape, attrs)


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_a_permutation_moves_to_the_operands(kind: Kind) -> None:
    mover = Mover(Builder())
    node = _made(mover.builder, kind)
    swapped = mover.move(node, ("permute", (1, 0)), (node.shape[1], node.shape[0]))
    # A product of (M, K) and (N, K) with rows and columns swapped is the view of a temporary.
    assert swapped.kind is (VIEW if kind is CONTRACT else kind)
    assert all(child.kind is VIEW for child in swapped.inputs) or kind is CONTRACT
    lifted = mover.move(node, ("unsqueeze", 0), (1, *node.shape))
    assert lifted.kind is kind
    assert lifted.shape == (1, *node.shape)


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_a_batch_is_a_first_dimension(kind: Kind) -> None:
    count, _, _ = CASES[kind]
    node = _made(Builder(), kind)
    specs = tuple(InputSpec("float32", input_shape(number, (4, 6))) for number in range(count))
    found = batched(Graph("f", specs, (node,)), [True] * count, single=False)
    assert found is not None
    (result,), whole = found[0].outputs, found[1]
    assert whole == (True,)
    assert result.kind is kind
    assert result.shape[1:] == node.shape
    assert [child.under_views.kind for child in result.inputs] == [INPUT] * count
    if kind in (REDUCE, CAT, SCAN, SORT):
        named = result.attrs.dims if kind is REDUCE else (result.attrs.dim,)
        assert named == (2,)


def test_attributes_have_names_and_stay_tuples() -> None:
    builder = Builder()
    reduction, product = _made(builder, REDUCE), _made(builder, CONTRACT)
    assert (reduction.attrs.kind, reduction.attrs.dims) == reduction.attrs == ("sum", (1,))
    assert product.attrs.equation == "mk,nk->mn"
    assert hash(reduction.attrs) == hash(("sum", (1,)))
    view = builder.make("view", (reduction,), "float32", (4, 6), ("expand",))
    assert view.attrs.kind == "expand"
    again = graphs.from_json(graphs.to_json(Graph("f", (InputSpec("float32", (4, 6)),), (view,))))
    assert again.outputs[0].inputs[0].attrs.dims == (1,)
    assert graphs.to_json(again) == graphs.to_json(Graph("f", (InputSpec("float32", (4, 6)),), (view,)))


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "error"),
    [
        ("no_such_kind", 1, (), KeyError),
        ("add", 1, (), AssertionError),
        ("cat", 1, (0,), AssertionError),
        ("reduce", 2, ("sum", (0,)), AssertionError),
        ("reduce", 1, ("sum",), TypeError),
        ("add", 2, (1,), TypeError),
        ("view", 1, ("permute",), TypeError),
        ("view", 1, ("transpose", 0, 1), KeyError),
    ],
)
def test_a_node_that_its_row_does_not_describe_is_not_made(
    op: str, operands: int, attrs: tuple[Any, ...], error: type[Exception]
) -> None:
    builder = Builder()
    inputs = [builder.make("input", (), "float32", (4, 6), (number,)) for number in range(operands)]
    with pytest.raises(error):
        builder.make(op, inputs, "float32", (4, 6), attrs)


def test_nodes_say_where_their_values_are() -> None:
    builder = Builder()
    tensor = builder.make("input", (), "float32", (4, 6), (0,))
    view = builder.make("view", (tensor,), "float32", (6, 4), ("permute", (1, 0)))
    doubled = builder.make("add", (view, view), "float32", (6, 4))
    one = builder.make("view", (tensor,), "float32", (4, 1), ("slice", 1, 0, 1))
    repeated = builder.make("view", (one,), "float32", (4, 6), ("expand",))
    assert view.under_views is tensor
    assert tensor.is_in_memory
    assert view.is_in_memory
    assert not doubled.is_in_memory
    assert not view.is_weight
    assert repeated.under_expand is one
    assert one.under_expand is one
    assert doubled.kinds == {INPUT, VIEW, KINDS["add"]}


def test_a_traced_weight_is_one_through_its_views() -> None:
    weight = jitgen.quantize(torch.randn(32, 64), "int4", group_size=32)
    graph = lowered_graph(torch.nn.functional.linear, torch.randn(2, 64), weight)
    products = [node for node in graphs.topological(graph.results) if node.kind is CONTRACT]
    assert [(product.inputs[0].is_weight, product.inputs[1].is_weight) for product in products] == [(False, True)]
