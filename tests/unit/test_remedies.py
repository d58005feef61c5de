"""Refused functions name a remedy (``trace/remedies.py``), and what it says to write has torch's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import JitgenError
from jitgen.trace.remedies import REMEDIES

X = torch.randn(6, 4)
N = torch.randint(0, 9, (40,))
LONG = torch.arange(140.0)
PAIRS = torch.combinations(torch.arange(140), 2)


def scattered(x: Any) -> Any:
    positions = torch.arange(24).as_strided((2, 3), (4, 1))
    return x.flatten().index_copy(0, positions.flatten(), x[2:4, :3].flatten()).view(x.shape)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "allclose": (lambda x: torch.allclose(x, x), lambda x: torch.isclose(x, x).all(), (X,)),
    "argwhere": (
        lambda n: torch.argwhere(n),
        lambda n: torch.nonzero_static(n, size=3),
        (torch.tensor([0, 2, 1, 0, 3]),),
    ),
    "as_strided_copy": (
        lambda x: torch.as_strided_copy(x, (2, 3), (4, 1)),
        lambda x: torch.as_strided(x, (2, 3), (4, 1)).clone(),
        (X,),
    ),
    "as_strided_scatter": (lambda x: torch.as_strided_scatter(x, x[2:4, :3], (2, 3), (4, 1)), scattered, (X,)),
    "bincount": (
        lambda n: torch.bincount(n, minlength=9),
        lambda n: torch.zeros(9, dtype=torch.int64).index_add(0, n, torch.ones_like(n, dtype=torch.int64)),
        (N,),
    ),
    "equal": (lambda x: torch.equal(x, x), lambda x: (x == x).all(), (X,)),
    "histogram": (
        lambda x: torch.histogram(x, 4, range=(-3.0, 3.0)),
        lambda x: (torch.histc(x, 4, -3.0, 3.0), torch.linspace(-3.0, 3.0, 5)),
        (X,),
    ),
    "combinations": (lambda x: torch.combinations(x), lambda x, pairs: x[pairs], (LONG, PAIRS)),
    "windows": (
        lambda x: F.avg_pool1d(x[None, None], 130, 5).flatten(),
        lambda x: x.unfold(0, 130, 5).mean(-1),
        (torch.randn(180),),
    ),
    "adaptive": (
        lambda x: F.adaptive_avg_pool1d(x, 140),
        lambda x: x.unflatten(1, (140, -1)).mean(2),
        (torch.randn(2, 280),),
    ),
}


@pytest.mark.quick(where=lambda name: name in ("bincount", "as_strided_scatter", "histogram"))
@pytest.mark.parametrize("name", CASES)
def test_a_remedy_has_the_result_of_what_is_refused(name: str) -> None:
    refused, written, arguments = CASES[name]
    with pytest.raises(JitgenError) as error:
        jitgen.jit(refused)(*arguments[:1])
    assert REMEDIES.get(name, "write") in str(error.value) or name not in REMEDIES
    wanted, found = refused(*arguments[:1]), jitgen.jit(written)(*arguments)
    if isinstance(wanted, bool):
        wanted = torch.tensor(wanted)
    torch.testing.assert_close(
        tuple(found) if isinstance(found, tuple) else found, wanted if torch.is_tensor(wanted) else tuple(wanted)
    )


def test_the_nuclear_norm_is_refused_as_such() -> None:
    with pytest.raises(JitgenError, match=r"singular values.*take p='fro'"):
        jitgen.jit(lambda x: torch.norm(x, "nuc"))(X)


def test_windows_of_many_elements_overlap() -> None:
    x = torch.randn(3, 400)
    for size, step in ((129, 1), (200, 7)):
        assert torch.equal(
            jitgen.jit(lambda x, size=size, step=step: x.unfold(1, size, step))(x), x.unfold(1, size, step)
        )
    assert torch.equal(
        jitgen.jit(lambda x: x.unfold(0, 2, 1).unfold(1, 150, 100))(x), x.unfold(0, 2, 1).unfold(1, 150, 100)
    )
