"""Scans in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import triton_scans


@pytest.fixture(scope="module")
def failures(interpreted: Callable[[str], dict[str, list[str]]]) -> dict[str, list[str]]:
    return interpreted("tests.triton_scans")


@pytest.mark.parametrize("check", triton_scans.CHECKS)
def test_scans(check: str, failures: dict[str, list[str]]) -> None:
    assert failures[check] == []
