"""What make test runs of a test marked ``covering`` has every combination of parameters that all of its cases have."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering_array

PARAMETERS = {"name": "abcde", "route": "xyz", "dtype": "pq"}
CASES = [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())]


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 17), (3, 30)])
def test_every_combination_is_there(strength: int, most: int) -> None:
    chosen = [CASES[number] for number in covering_array(CASES, strength)]
    assert len(chosen) <= most
    for names in itertools.combinations(PARAMETERS, strength):
        wanted = set(itertools.product(*(PARAMETERS[name] for name in names)))
        assert {tuple(case[name] for name in names) for case in chosen} == wanted


def test_what_no_case_has_is_not_wanted() -> None:
    without = [case for case in CASES if (case["name"], case["route"]) != ("a", "x")]
    chosen = [without[number] for number in covering_array(without, 2)]
    assert ("a", "y", "p") in {tuple(case.values()) for case in chosen} or ("a", "y", "q") in {
        tuple(case.values()) for case in chosen
    }
    assert all(case in without for case in chosen)


def test_values_take_turns() -> None:
    """Of two dtypes, each is in half of the cases."""
    chosen = [CASES[number] for number in covering_array(CASES, 1)]
    assert sorted(case["dtype"] for case in chosen).count("p") in (2, 3)
