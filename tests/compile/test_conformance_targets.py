"""torch's own operator samples compile for GPUs, in both dialects; ``tests/device/test_conformance.py`` runs them."""

from __future__ import annotations

import random

import pytest

from jitgen.compilers import nvrtc
from tests.conformance import refusals
from tests.conformance.samples import operators
from tests.conformance.targets import ROUTES, faults

PARTITIONS = 12
"""Tests that all operators are divided among."""
SAMPLED = {"cuda sm_90a": 5, "triton sm_90a": 2, "triton gfx942": 2}
"""Operators of the quick test, by route; a Triton kernel compiles in half a second, one of NVRTC in a tenth."""


def supported() -> list[str]:
    return sorted(set(operators()) - set(refusals.expected()))


@pytest.fixture(autouse=True)
def _compilers(route: str) -> None:
    if route.startswith("cuda") and nvrtc.toolchain() is None:
        pytest.skip("needs NVRTC")


@pytest.mark.parametrize("route", ROUTES)
def test_a_sample_of_operators(route: str) -> None:
    assert not list(faults(random.Random(f"20 {route}").sample(supported(), SAMPLED[route]), route, count=1))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_every_operator(partition: int, route: str) -> None:
    assert not list(faults(supported()[partition::PARTITIONS], route, count=2))
