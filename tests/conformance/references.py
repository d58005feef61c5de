"""Right values of functions that eager torch computes inexactly in float64 too, by mpmath, element by element, or not
at all.

``torch.special.ndtr`` adds erf to 1, which cancels; ``torch.polygamma(1, x)`` has 9 digits, and a large number at its
poles; ``torch.sinc`` has the roundoff of pi in place of 0 at integers. ``torch._scaled_mm`` is of 8-bit floats alone,
and on a CPU gives NaN where casts of the same torch give the largest number (docs/semantics.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import torch
from torch.utils import _pytree as pytree

from tests.conformance.samples import Sample

DIGITS = 40


def _ndtr(x: float) -> Any:
    return mpmath.erfc(-mpmath.mpf(x) / mpmath.sqrt(2)) / 2


def _polygamma(x: float, order: int) -> Any:
    if x <= 0 and x == math.floor(x):
        return (-1) ** (order + 1) * math.inf
    return mpmath.polygamma(order, x)


def _sinc(x: float) -> Any:
    return mpmath.sincpi(x)


REFERENCES: dict[str, Callable[..., Any]] = {
    "special.ndtr": _ndtr,
    "sinc": _sinc,
    **{f"polygamma.polygamma_n_{order}": _polygamma for order in range(5)},
    "special.polygamma.special_polygamma_n_0": _polygamma,
}
"""By operator: the function of an element and of the other arguments."""


def reference(sample: Sample) -> torch.Tensor | None:
    """The result of ``sample`` in float64, or None where eager torch's float64 is the reference."""
    function = REFERENCES.get(sample.operator)
    if function is None and sample.operator != "torch._scaled_mm":
        return None
    (x, *numbers), _ = pytree.tree_unflatten(sample.leaves, sample.tree)
    if function is None:
        y, *scales = (value.double() for value in numbers)
        return math.prod(scales) * (x.double() @ y)
    return evaluated(function, x, *numbers)


def evaluated(function: Callable[..., Any], x: torch.Tensor, *numbers: Any) -> torch.Tensor:
    """``function``, which computes with mpmath, of each element of ``x``; in float64."""
    with mpmath.workdps(DIGITS):
        found = [
            float(mpmath.re(function(each, *numbers))) if math.isfinite(each) else math.nan
            for each in x.double().flatten().tolist()
        ]
    return torch.tensor(found, dtype=torch.float64).reshape(x.shape)
