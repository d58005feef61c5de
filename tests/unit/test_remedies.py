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


def ordered(x: Any) -> Any:
    ordered = x.flatten().sort()[0]
    return ordered, ordered[1:] != ordered[:-1]


def where_new(found: Any) -> Any:
    """The numbers of which ``found`` says where new ones begin."""
    numbers, is_new = found
    return numbers[torch.cat([torch.tensor([True]), is_new])]


def renormed(x: Any, n: Any) -> Any:
    return F.embedding(n, x * (1.0 / x.norm(dim=1, keepdim=True)).clamp(max=1.0))


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
    "embedding_renorm_": (lambda x, n: F.embedding(n, x.clone(), max_norm=1.0), renormed, (X, N % 6)),
    "empty_permuted": (
        lambda x: torch.empty_permuted((6, 4), (1, 0)).copy_(x),
        lambda x: torch.empty(4, 6).permute(1, 0).copy_(x),
        (X,),
    ),
    "empty_strided": (
        lambda x: torch.empty_strided((6, 3), (1, 8)).copy_(x[:, :3]),
        lambda x: torch.empty(3, 8)[:, :6].t().copy_(x[:, :3]),
        (X,),
    ),
    "equal": (lambda x: torch.equal(x, x), lambda x: (x == x).all(), (X,)),
    "histogram": (
        lambda x: torch.histogram(x, 4, range=(-3.0, 3.0)),
        lambda x: (torch.histc(x, 4, -3.0, 3.0), torch.linspace(-3.0, 3.0, 5)),
        (X,),
    ),
    "masked_select": (
        lambda x: torch.masked_select(x, x > 0),
        lambda x: (torch.where(x > 0, x, 0), x > 0),
        (X,),
    ),
    "new_empty_strided": (
        lambda x: x.new_empty_strided((6, 4), (1, 6)).copy_(x),
        lambda x: x.new_empty(4, 6).t().copy_(x),
        (X,),
    ),
    "resize_": (lambda x: x.clone().resize_(3, 4), lambda x: x[:3].clone(), (X,)),
    "resize_as_": (
        lambda x, y: x.clone().resize_as_(y).index_fill_(0, torch.tensor([6, 7]), 0),
        lambda x, y: torch.cat([x, torch.zeros(2, 4)]),
        (X, torch.randn(8, 4)),
    ),
    "unique": (lambda n: torch.unique(n), ordered, (N,)),
    "unique_consecutive": (lambda n: torch.unique_consecutive(n), lambda n: (n, n[1:] != n[:-1]), (N // 4,)),
}
FOUND: dict[str, Callable[[Any], Any]] = {
    "masked_select": lambda found: found[0][found[1]],
    "unique": where_new,
    "unique_consecutive": where_new,
}
"""What to compute outside of the function, of sizes that depend on data."""

BEYOND: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "combinations": (
        lambda x: torch.combinations(x),
        lambda x: x[PAIRS],
        (LONG,),
        "which are torch.combinations(torch.arange(140), 2), and write x[indices]",
    ),
    "windows": (
        lambda x: F.avg_pool1d(x[None, None], 130, 5).flatten(),
        lambda x: x.unfold(0, 130, 5).mean(-1),
        (torch.randn(180),),
        "reduce x.unfold(dim, size, step) along its last dimension",
    ),
    "adaptive": (
        lambda x: F.adaptive_avg_pool1d(x, 140),
        lambda x: x.unflatten(1, (140, -1)).mean(2),
        (torch.randn(2, 280),),
        "reduce x.unflatten(dim, (outputs, -1)) along its dimension dim + 1",
    ),
}
"""Sizes beyond what a function takes, with the remedies in their messages."""


def test_each_remedy_is_tried() -> None:
    assert set(CASES) == set(REMEDIES)


@pytest.mark.quick(where=lambda name: name in ("bincount", "as_strided_scatter", "histogram"))
@pytest.mark.parametrize("name", [*CASES, *BEYOND])
def test_a_remedy_has_the_result_of_what_is_refused(name: str) -> None:
    refused, written, arguments, remedy = (*CASES[name], REMEDIES[name]) if name in CASES else BEYOND[name]
    with pytest.raises(JitgenError) as error:
        jitgen.jit(refused)(*arguments)
    assert remedy in str(error.value)
    wanted, found = refused(*arguments), jitgen.jit(written)(*arguments)
    if name in FOUND:
        found = FOUND[name](found)
    if isinstance(wanted, bool):
        wanted = torch.tensor(wanted)
    torch.testing.assert_close(
        tuple(found) if isinstance(found, tuple) else found, wanted if torch.is_tensor(wanted) else tuple(wanted)
    )
    if name.endswith(("empty_strided", "empty_permuted")):
        assert written(*arguments).stride() == wanted.stride()


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
