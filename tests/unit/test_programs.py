"""Random programs (``tests/programs.py``) are right, or refused by name and line: never wrong, never another error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from programs import Program, draw, verdict

import jitgen

QUICK = 10
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


def test_a_reference_computes_in_float64_after_a_conversion_to_float32() -> None:
    text = "def program(x0):\n    v1 = x0.float()\n    return v1, F.gelu(v1)"
    program = Program(text, [torch.tensor(-3)], {torch.float32})
    whole, value, _ = program.run_exactly(program.exact_function())
    assert value.dtype == torch.float64
    assert abs(value.item() + 3 * 0.0013498980316300945) < 1e-16
    assert whole.item() == -3
