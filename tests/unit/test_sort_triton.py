"""Sorted rows in Triton: each against torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_sorts
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_sorts") as process:
        yield process


@pytest.mark.parametrize("check", triton_sorts.CHECKS)
def test_sorts(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
