"""What a region can say of a kernel: axes that are walked, and stages that run along them."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from jitgen.ir.body_builder import BodyBuilder
from jitgen.ir.graph import Builder, Node
from jitgen.ir.regions import Axis, Region, Stage, Store, stages_of

BATCH, QUERIES, KEYS, WIDTH = 2, 5, 7, 4


def attention(builder: Builder) -> Node:
    """``softmax(q k^T) v``, without its division, of one batch axis."""

    def make(op: str, inputs: list[Node], shape: tuple[int, ...], *attrs: object) -> Node:
        return builder.make(op, inputs, "float32", shape, attrs)

    q = make("input", [], (BATCH, QUERIES, WIDTH), 0)
    k = make("input", [], (BATCH, KEYS, WIDTH), 1)
    v = make("input", [], (BATCH, WIDTH, KEYS), 2)
    scores = make("contract", [q, k], (BATCH, QUERIES, KEYS), "amk,ank->amn", "float32", "ieee")
    powers = make("exp", [scores], scores.shape)
    return make("contract", [powers, v], (BATCH, QUERIES, WIDTH), "amk,ank->amn", "float32", "ieee")


AXES = (
    Axis("b", BATCH),
    Axis("m", QUERIES),
    Axis("e", WIDTH),
    Axis("n", KEYS, "sequential", inner=True),
    Axis("d", WIDTH, "sequential", inner=True),
)


def test_the_region_of_attention() -> None:
    """Keys are walked in sequence, reduced and then summed over; the results have no dimension of them."""
    stages = (
        Stage("contract", ("d",)),
        Stage("map"),
        Stage("reduce", ("n",)),
        Stage("contract", ("n",)),
        Stage("map"),
    )
    region = Region("attention", AXES, (Store(0, attention(Builder())),), stages)
    assert region.stages == stages
    assert region.shape == (BATCH, QUERIES, WIDTH)
    assert region.row_rank == 0
    words = ["contract over d", "map", "reduce over n", "contract over n", "map"]
    assert list(map(str, region.stages)) == words


def test_a_stage_has_axes_of_its_region() -> None:
    store = Store(0, attention(Builder()))
    for wrong in (Stage("contract", ("z",)), Stage("attend", ("n",))):
        with pytest.raises(AssertionError, match="has no stage"):
            Region("attention", AXES, (store,), (wrong,))


def test_a_product_of_a_product_is_not_taken_for_one() -> None:
    """Neither the stages nor the instructions lose the inner product."""
    value = attention(Builder())
    with pytest.raises(AssertionError, match="has to state the stages"):
        stages_of([value], AXES)
    region = Region("gemm", AXES, (Store(0, value),), (Stage("contract", ("d",)),))
    shapes = [(BATCH, QUERIES, WIDTH)] * 4
    with pytest.raises(AssertionError, match="a contract in the activation of a product"):
        BodyBuilder(shapes, []).lower(region, [3])


def test_products_of_products_are_kernels_of_their_own() -> None:
    function = jitgen.jit(lambda q, k, v: torch.tanh(q @ k) @ v)
    low = function.lower(TensorSpec((2, 5, 4)), TensorSpec((2, 4, 7)), TensorSpec((2, 7, 4)), target="cpu")
    assert len(low.kernels) == 2
