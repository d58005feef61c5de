"""Random attention of a grammar (``tests/attention_programs.py``) on the CPU, against the same function in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from tests.attention import failure
from tests.attention_programs import program

FOUND = (59, 78, 149, 267, 9127, 78755)
"""Seeds that once failed: sums of rows behind the product of split heads, indices without keys, 16-bit products that
float32 sums divide, scores of 16 bits."""


def check(seed: int) -> None:
    """AssertionError where the program of ``seed`` gives what float64 does not."""
    drawn = program(seed)
    compiled = jitgen.jit(drawn.function)
    in_one = "keys of a row walked once" in compiled.lower(*drawn.args).explain()
    found = compiled(*drawn.args)
    wanted = drawn.function(*(arg.double() if arg.is_floating_point() else arg for arg in drawn.args))
    beside = (found[1], wanted[1]) if isinstance(found, tuple) else None
    found, wanted = (found[0], wanted[0]) if isinstance(found, tuple) else (found, wanted)
    q, k, v = drawn.args[:3]
    # Where it is products and a softmax, weights and the product are rounded to the dtype of the values, as in torch.
    k, v = k.repeat_interleave(q.shape[1] // k.shape[1], 1), v if in_one else 2 * v
    assert failure(found, wanted, q, k, v, rounded=not in_one) is None, f"{seed}: {drawn.words}"
    if beside is not None:
        # Scores of a product on its own are rounded to its dtype, as in torch, and no score moves their sum by more.
        scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        rounding = 0.0 if in_one or not scores.numel() else float(scores.abs().max()) * torch.finfo(q.dtype).eps / 2
        torch.testing.assert_close(beside[0].double(), beside[1], atol=1e-4 + rounding, rtol=1e-6, equal_nan=True)


@pytest.mark.quick(where=lambda seed: seed in FOUND[:2])
@pytest.mark.parametrize("seed", FOUND)
def test_programs_that_once_were_wrong(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_programs(seed: int) -> None:
    check(seed)
