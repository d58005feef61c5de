"""What the model of wgmma's tiles chooses, beside the fastest candidates that were timed on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import pytest

from bench.judged import CLASSES, Problem, judge, label_of, launch_of, read, worth

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
RECORD = MEASURED / "h100-candidates.json"
UNTIMED = ((30, 1536, 3200),)
"""Products that are launched with a number of splits that the records have no timing of."""
KINDS = {"dense": ("wgmma_dense",), "int4": ("wgmma_quantized", "wgmma_quantized g64", "wgmma_quantized g32")}


@pytest.fixture(scope="module")
def problems() -> Sequence[Problem]:
    return read(RECORD)


# The figures are those of docs/devices.md, which are of what the model chose when it was fitted.
@pytest.mark.parametrize(
    ("kind", "mean", "worst"),
    [("dense", 0.96, 0.87), pytest.param("int4", 0.97, 0.74, marks=pytest.mark.slow)],
)
def test_choices_are_near_the_fastest(problems: Sequence[Problem], kind: str, mean: float, worst: float) -> None:
    ratios = [ratio for ratio, *_ in judge(problem for problem in problems if problem.kind in KINDS[kind])]
    assert len(ratios) >= 18
    assert round(geometric_mean(ratios), 2) >= mean
    assert round(min(ratios), 2) >= worst


# K is any multiple of 8 in the dense products of an H200, and rows begin within a line of the cache. The figures of the
# first two records, to which nothing was fitted, are those of docs/devices.md: the choice beside the fastest candidate,
# by the geometric mean, at the 5th percentile and at worst, and beside cuBLAS. Dense products of older records were
# timed before blocks of a cluster found their copies at once, and say nothing of what is chosen since.
@pytest.mark.parametrize(
    ("record", "kind", "count", "mean", "fifth", "worst", "peer"),
    [
        ("held-out-3", "dense", 70, 0.973, 0.88, 0.79, 0.996),
        ("held-out-2", "int4", 57, 0.976, 0.84, 0.83, 1.061),
        pytest.param("held-out", "int4", 48, 0.977, 0.87, 0.81, 1.088, marks=pytest.mark.slow),
    ],
)
def test_choices_on_an_h200(
    record: str, kind: str, count: int, mean: float, fifth: float, worst: float, peer: float
) -> None:
    check(f"h200-candidates-{record}", kind, count, mean, fifth, worst, peer)


def check(record: str, kind: str, count: int, mean: float, fifth: float, worst: float, peer: float) -> None:
    """Fails where the choices for the products of a record have less than these figures."""
    problems = [one for one in read(MEASURED / f"{record}.json") if one.kind in KINDS[kind]]
    judged = judge(one for one in problems if (one.rows, one.columns, one.length) not in UNTIMED)
    ratios = sorted(ratio for ratio, *_ in judged)
    assert len(ratios) == count
    assert round(geometric_mean(ratios), 3) >= mean
    assert round(ratios[count // 20], 2) >= fifth
    assert round(ratios[0], 2) >= worst
    assert round(geometric_mean(problem.torch / problem.times[name] for _, problem, name in judged), 3) >= peer


# An H100 has the constants of an H200. Nothing was fitted to these products either.
def test_choices_on_an_h100() -> None:
    check("h100-candidates-held-out", "int4", 50, 0.974, 0.91, 0.79, 1.087)


def test_a_choice_without_a_timing_is_an_error(problems: Sequence[Problem]) -> None:
    problem = next(problem for problem in problems if launch_of(problem) is not None)
    launch = launch_of(problem)
    assert launch is not None
    others = {name: time for name, time in problem.times.items() if name != label_of(launch.tiling, launch.splits)}
    with pytest.raises(KeyError, match=f"{problem.rows} x {problem.columns} x {problem.length}"):
        judge([Problem(problem.kind, problem.rows, problem.columns, problem.length, problem.torch, others)])


def test_a_kind_is_worth_what_the_others_take_longer() -> None:
    times = {"64 x 64": 2.0, "64 x 64, split 2": 1.0, "128 x 64": 3.0}
    problems = [
        Problem("wgmma_dense", 65, 64, 64, 1.0, times),
        Problem("wgmma_dense", 65, 64, 64, 1.0, {"128 x 64": 3.0}),
    ]
    mean, most, count = worth(problems, CLASSES["blocks of a cluster that share K"])
    assert (round(mean, 6), most, count) == (round(2**0.5, 6), 2.0, 1)
    assert worth(problems, CLASSES["tiles of 64 rows"])[1:] == (3.0, 1)
