"""torch's own operator tests: none is wrong, none crashes, and only those of ``refusals.txt`` are refused.

``make test`` runs a seeded sample of the operators that jitgen computes, ``make test-all`` every operator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.conformance import refusals, report
from tests.conformance.judgement import Verdict, judge, judge_types
from tests.conformance.samples import dtypes, operators, samples

SAMPLED = 10
"""Operators of the quick test, with a sample each: about 6 s of processor time where their kernels are compiled."""
DTYPES_SAMPLED = 0.015
"""Share of the pairs of an operator and a dtype whose results' dtypes and shapes the quick test compares."""
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
    version = torch.__version__.partition("+")[0]
    if f"torch {version}: " not in told:
        pytest.skip(f"the figures are not of torch {version}, which has other operators")
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


def types_of(names: Sequence[str], count: int, chosen: float = 1.0) -> list[Verdict]:
    """Verdicts on the results' dtypes and shapes of ``count`` samples in every dtype of each operator, or in a seeded
    choice of the dtypes."""
    choose = random.Random(33)
    cases = [(name, dtype) for name in names for dtype in dtypes(name) if choose.random() < chosen]
    return [judge_types(sample) for name, dtype in cases for sample in samples(name, dtype, count=count)]


def test_a_sample_of_dtypes() -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    verdicts = types_of(supported, count=1, chosen=DTYPES_SAMPLED)
    assert not report.faults(verdicts)
    assert sum(verdict.verdict == "right" for verdict in verdicts) > len(verdicts) * 9 // 10 > 20


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_dtypes_and_shapes_in_every_dtype(partition: int) -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    assert not report.faults(types_of(supported[partition::PARTITIONS], count=4))


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_values_in_every_dtype(partition: int) -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    for name in supported[partition::PARTITIONS]:
        for dtype in dtypes(name):
            assert not report.faults(run([name], dtype=dtype, count=1))


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS // 4))
def test_methods_and_updates_in_place(partition: int) -> None:
    supported = sorted(set(operators()) - set(refusals.expected()))
    verdicts = run(supported[partition :: PARTITIONS // 4], variants=("method", "inplace"), count=2)
    assert not report.faults(verdicts)
