"""The backward of attention in Triton: each check against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_attention_backward
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_attention_backward") as process:
        yield process


@pytest.mark.parametrize("check", triton_attention_backward.CHECKS)
@pytest.mark.quick(where=lambda check: check not in triton_attention_backward.SLOW)
def test_attention_backward(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
