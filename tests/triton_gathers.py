"""Gathers and scatters in Triton, under Triton's interpreter on CPU tensors.

``tests/unit/test_gathers.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

import jitgen
from jitgen.families.scatter import by_element as by_element_of_scatters
from tests import gathers
from tests.interpreter import Check, serve


def by_element() -> Iterator[str | None]:
    """Scatters of which each element is compared with every index, which GPUs compute so where walks are long."""
    arguments = gathers.write_arguments(6, 8, 5, 7)
    with patch.object(by_element_of_scatters, "SHORT_WALK", 0):
        for name in ("index_add", "scatter_add", "amax", "scatter of a number", "index_put of two"):
            kind, function = gathers.COMBINED[name]
            yield gathers.judged(name, kind, function, arguments, "triton", "cpu")


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_fill": lambda x: x.index_fill(0, torch.arange(3), 2),
    "index_add": lambda x: x.index_add(0, torch.arange(3), x[:3]),
    "scatter_add": lambda x: x.scatter_add(0, torch.arange(3) * 0, x[:3]),
    "index_put": lambda x: x.index_put((torch.arange(3) - 3,), x[4:]),
}


def computed_indices() -> Iterator[str | None]:
    x = torch.randn(7)
    for name, function in COMPUTED.items():
        found = jitgen.jit(function, backend="triton")(x)
        yield None if torch.allclose(found, function(x)) else f"{name}: {found}, expected {function(x)}"


CHECKS: dict[str, Check] = {
    "by element": by_element,
    "reads": lambda: gathers.read_failures("triton"),
    "reads of nothing": lambda: gathers.empty_failures("triton"),
    "integers": lambda: gathers.integer_failures("triton"),
    "updates": lambda: gathers.update_failures("triton"),
    "writes": lambda: gathers.write_failures("triton"),
    "computed indices": computed_indices,
    "assignments": lambda: gathers.assignment_failures("triton"),
    "searches": lambda: gathers.search_failures("triton", sizes=gathers.SEARCHED[:1]),
    "histograms": lambda: gathers.histogram_failures("triton"),
}

if __name__ == "__main__":
    serve(CHECKS)
