"""Random programs (``tests/programs.py``) are right, or refused by name and line: never wrong, never another error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from programs import Program, draw, verdict

import jitgen

QUICK = 15
"""Programs of ``make test``."""
CHUNK, CHUNKS = 50, 40
"""Programs of one further test of ``make test-all``, and the number of these tests."""


@st.composite
def programs(pick: Callable[[Any], Any]) -> Program:
    return draw(lambda options: pick(st.sampled_from(options)))


def check(number: int, count: int) -> None:
    """That ``count`` programs, the same ones in every run, are right or refused. A failure shows the shortest one."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def right_or_refused(program: Program) -> None:
        kind, found = verdict(program, jitgen.jit(program.function()))
        assert kind in ("right", "refused"), f"{kind}: {found}"

    right_or_refused()


@pytest.mark.optimised
def test_programs() -> None:
    check(0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, CHUNKS + 1))
def test_more_programs(number: int) -> None:
    check(number, CHUNK)
