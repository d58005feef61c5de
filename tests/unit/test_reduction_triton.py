"""Row reductions in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import triton_reductions


@pytest.fixture(scope="module")
def failures(interpreted: Callable[[str], dict[str, list[str]]]) -> dict[str, list[str]]:
    return interpreted("tests.triton_reductions")


@pytest.mark.parametrize("check", triton_reductions.CHECKS)
def test_reductions(check: str, failures: dict[str, list[str]]) -> None:
    assert failures[check] == []
