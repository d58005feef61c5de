"""Attention in Triton: each check against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_attention
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_attention") as process:
        yield process


@pytest.mark.parametrize("check", triton_attention.CHECKS)
@pytest.mark.quick(where=lambda check: check not in triton_attention.SLOW)
def test_attention(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
