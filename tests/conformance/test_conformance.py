"""torch's own operator tests: none is wrong, none crashes, and only those of ``refusals.txt`` are refused.

``make test`` runs a seeded sample of the operators that jitgen computes, ``make test-all`` every operator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.conformance import refusals, report
from tests.conformance.judgement import Verdict, judge
from tests.conformance.samples import operators, samples

SAMPLED = 10
"""Operators of the quick test, with a sample each: about 6 s of processor time where their kernels are compiled."""
PARTITIONS = 24
"""Tests that all operators are divided among, so that several workers share them."""


def run(names: Sequence[str], **options: object) -> list[Verdict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [judge(sample) for name in names for sample in samples(name, **options)]  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)


def test_the_figures_are_those_of_the_refusals() -> None:
    told = report.DOCUMENT.read_text()
    assert f"| refused | {len(refusals.expected())} |" in told
    assert f"{len(operators())} operators" in told


@pytest.mark.optimised
def test_a_sample_of_operators() -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    verdicts = run(random.Random(20).sample(supported, SAMPLED), count=1)
    assert not report.faults(verdicts)
    assert sum(verdict.verdict == "right" for verdict in verdicts) > SAMPLED * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_every_operator(partition: int) -> None:
    names = sorted(operators())[partition::PARTITIONS]
    verdicts = run(names)
    assert not report.faults(verdicts)
    found = {name for name, kind in report.classes(names, verdicts).items() if kind == "refused"}
    expected = {name for name in refusals.expected() if name in names}
    assert found == expected, "python -m tests.conformance --write brings refusals.txt up to date"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("partition", range(PARTITIONS // 4))
def test_other_dtypes(dtype: torch.dtype, partition: int) -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    verdicts = run(supported[partition :: PARTITIONS // 4], dtype=dtype, count=2)
    assert not report.faults(verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS // 4))
def test_methods_and_updates_in_place(partition: int) -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    verdicts = run(supported[partition :: PARTITIONS // 4], variants=("method", "inplace"), count=2)
    assert not report.faults(verdicts)
