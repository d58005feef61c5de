"""Row reductions in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_reductions
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_reductions") as process:
        yield process


@pytest.mark.parametrize("check", triton_reductions.CHECKS)
@pytest.mark.quick(where=triton_reductions.is_quick)
def test_reductions(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
