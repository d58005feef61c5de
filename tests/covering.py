"""Covering arrays: few cases of a test of several parameters that together have every combination of a few of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def covering_array(cases: Sequence[Mapping[str, object]], strength: int) -> set[int]:
    """Few of ``cases``, by number, that have all combinations of the values of ``strength`` parameters that occur.

    The next one is always that with most combinations that were missing, and of several such that with the rarest ones.

    Args:
        cases: the parameters of each, by name; equal values are one object.
    """
    values = [sorted((name, id(value)) for name, value in case.items()) for case in cases]
    has = [set(itertools.combinations(each, strength)) for each in values]
    counts: Counter[Any] = Counter()
    chosen: set[int] = set()
    while missing := set().union(*has) - counts.keys():
        best = max(range(len(cases)), key=lambda n: (len(has[n] & missing), -sum(counts[each] for each in has[n])))
        chosen.add(best)
        counts.update(has[best])
    return chosen
