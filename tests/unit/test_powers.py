"""Exponentials of a row less its maximum as powers of two: which bodies are rewritten, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from tests import triton_powers
from tests.interpreter import Interpreter

SHAPE, LONG = (300, 1000), (64, 20_000)
"""Rows of a block, and of a cluster."""


def lowered(
    function: Callable[..., Any], dtype: torch.dtype, backend: str = "cuda", shape: tuple[int, int] = SHAPE
) -> str:
    source: str = jitgen.jit(function).lower(TensorSpec(shape, dtype), target="sm_90a", backend=backend).source
    return source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_exponent_takes_one_operation(dtype: torch.dtype) -> None:
    """From the elements as they were read; and the sum's unit goes with that of the powers it divides."""
    for backend, call, shape in (("cuda", "jitgen::exp2_normal(", LONG), ("triton", "tl.exp2(", SHAPE)):
        source = lowered(lambda x: F.softmax(x, -1), dtype, backend, shape)
        assert source.count(call) == 1
        assert "exp(" not in source
        assert "v0 - " not in source
        assert " / " not in source.split("Pass 0", 1)[-1]


@pytest.mark.parametrize(
    ("function", "shape"), [(lambda x: F.softmax(x * 0.125, -1), LONG), (lambda x: F.softmax(x, -1), SHAPE)]
)
def test_others_are_measured_from_the_maximum(function: Callable[..., Any], shape: tuple[int, int]) -> None:
    """Elements that are computed, and those of rows that a block has for itself."""
    source = lowered(function, torch.bfloat16, "cuda", shape)
    assert "jitgen::exp2_normal(" in source
    assert " - v" in source.split("Pass 1", 1)[-1]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("float32", lambda x: F.softmax(x.float(), -1)),
        ("less a number", lambda x: (x - 3).exp() / (x - 3).exp().sum(-1, keepdim=True)),
        ("less the minimum", lambda x: (x - x.amin(-1, keepdim=True)).exp()),
        ("less another maximum", lambda x: (x - (2 * x).amax(-1, keepdim=True)).exp()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_exponentials_are_left_alone(name: str, function: Callable[..., Any]) -> None:
    assert "exp2_normal" not in lowered(function, torch.bfloat16)


def test_extrema_are_taken_two_at_a_time() -> None:
    for kind, name in ((torch.amax, "maximum"), (torch.amin, "minimum")):
        source = lowered(lambda x, kind=kind: x - kind(x, -1, keepdim=True), torch.bfloat16)
        assert f"= jitgen::{name}(pair_v1, x0[u]);" in source
        source = lowered(lambda x, kind=kind: x - kind(x, -1, keepdim=True), torch.float32)
        assert "pair" not in source
        source = lowered(lambda x, kind=kind: x - kind(-x, -1, keepdim=True), torch.bfloat16)
        assert "pair" not in source


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_powers") as process:
        yield process


@pytest.mark.parametrize("check", triton_powers.CHECKS)
@pytest.mark.quick(where=lambda check: check == "exponentials")
def test_numbers(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
