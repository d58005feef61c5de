"""Scans in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_scans
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_scans") as process:
        yield process


@pytest.mark.parametrize("check", triton_scans.CHECKS)
@pytest.mark.quick(where=lambda check: check not in triton_scans.SLOW)
def test_scans(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
