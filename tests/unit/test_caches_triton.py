"""Caches in Triton: each check against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import triton_caches
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_caches") as process:
        yield process


@pytest.mark.quick(where=lambda check: check == "ring")
@pytest.mark.parametrize("check", triton_caches.CHECKS)
def test_caches(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
