"""Random mixtures of experts (``tests/routing_programs.py``) on the CPU, and their gradients, against float64."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from tests.routing_programs import UNCLEAR, judged, program

FOUND = (25,)
"""Seeds that once failed: one token that chooses one quantised matrix."""


def check(seed: int, gradients: bool) -> None:
    """AssertionError where the program of ``seed`` gives what float64 does not."""
    drawn = program(seed)
    kind, told = judged(drawn, jitgen.jit, gradients)
    assert kind in ("right", UNCLEAR), f"{seed}: {told}\n{drawn}"


@pytest.mark.parametrize("gradients", [False, True], ids=["results", "gradients"])
@pytest.mark.parametrize("seed", FOUND)
def test_programs_that_once_were_wrong(seed: int, gradients: bool) -> None:
    check(seed, gradients)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_programs(seed: int, gradients: bool) -> None:
    check(seed, gradients)
