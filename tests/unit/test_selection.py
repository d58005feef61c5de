"""Few ranks of short rows are one kernel in CUDA with what is reduced over the row before and over the ranks behind, as
routers of mixtures of experts have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import jitgen
from tests.cuda_on_host import run
from tests.numeric import mismatch
from tests.selections import (
    FUNCTIONS,
    among_all,
    biased,
    distinct,
    first,
    limited,
    limited_greedy,
    of_deviations,
    of_softmax,
    softmax_behind,
)
from tests.sorts import FLOATS, INTEGERS, first_ranks, same, sample

Tensor = torch.Tensor


def families(function: Callable[..., Any], *arguments: Any, **route: str) -> list[str]:
    lowered = jitgen.jit(function).lower(*arguments, **{"backend": "cuda", "target": "sm_90a"} | route).lowered
    return [kernel.family for kernel in lowered.program.kernels]


ROWS = (((5, 128), 8, torch.float32), ((2, 3, 7), 2, torch.float32), ((1, 33), 4, torch.float16))


@pytest.mark.parametrize(
    ("function", "shape", "k", "dtype"),
    [
        (function, *row)
        for function, row in itertools.product(FUNCTIONS, ROWS)
        if function is not of_deviations or torch.float16 not in row  # it is rounded, and then nearly cancels
    ],
)
@pytest.mark.covering(1)
def test_one_kernel_and_its_values(
    function: Callable[..., Any], shape: tuple[int, ...], k: int, dtype: torch.dtype
) -> None:
    logits = distinct(shape, dtype)
    assert families(lambda x: function(x, k), logits) == ["sort"]
    got = run(lambda x: function(x, k), logits)
    exact, eager = function(logits.double(), k), function(logits, k)
    assert torch.equal(got[1], exact[1])
    assert got[0].dtype == eager[0].dtype
    assert mismatch(got[0], exact[0], eager[0], magnitude=4.0) is None


@pytest.mark.parametrize(("shape", "k"), [((5, 128), 8), ((2, 3, 7), 2), ((1, 33), 4), ((3, 512), 16)])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.covering(1)
def test_on_a_cpu(function: Callable[..., Any], shape: tuple[int, ...], k: int) -> None:
    """The same in C++, where a thread has the row."""
    logits = distinct(shape, torch.float32)
    run = jitgen.jit(lambda x: function(x, k))
    assert families(lambda x: function(x, k), logits, backend="cpp", target="cpu") == ["sort"]
    got, exact, eager = run(logits), function(logits.double(), k), function(logits, k)
    assert torch.equal(got[1], exact[1])
    assert got[0].dtype == eager[0].dtype
    assert mismatch(got[0], exact[0], eager[0], magnitude=4.0) is None


LIMITED: tuple[tuple[Callable[..., Any], dict[str, int]], ...] = (
    (limited, {}),
    (limited, {"groups": 4, "kept": 1, "k": 3}),
    (limited_greedy, {}),
    (biased, {}),
)


def settled(function: Callable[..., Any], sizes: dict[str, int], rows: int, length: int) -> list[Tensor]:
    """Draws arguments at which no two scores are so near that rounding them to float32 may swap their ranks."""
    while True:
        arguments = [distinct((rows, length), torch.float32)]
        arguments += [distinct((1, length), torch.float32)[0] * 0.01] if function is not limited_greedy else []
        nearby = [a.double() * (1 + 2**-16 * torch.rand_like(a)) for a in arguments]
        ranks, others = (function(*inputs, **sizes, dtype=torch.float64)[1] for inputs in (arguments, nearby))
        if torch.equal(ranks, others):
            return arguments


@pytest.mark.parametrize(("rows", "length"), [(5, 256), (2, 512), (7, 32), (1, 64)])
@pytest.mark.parametrize(("function", "sizes"), LIMITED)
@pytest.mark.covering(1)
def test_groups_of_a_row_and_elements_at_the_places_of_ranks(
    function: Callable[..., Any], sizes: dict[str, int], rows: int, length: int
) -> None:
    """Routers of DeepSeek are one kernel, in CUDA and in C++, and have eager torch's experts."""
    arguments = settled(function, sizes, rows, length)
    wanted = function(*arguments, **sizes, dtype=torch.float64)

    def run_of(*tensors: Any) -> Any:
        return function(*tensors, **sizes)

    if (rows, function) != (1, limited_greedy):  # a size that is 1 is another one's in a guard alone
        assert families(run_of, *arguments) == families(run_of, *arguments, backend="cpp", target="cpu") == ["sort"]
    for got in (run(run_of, *arguments), jitgen.jit(run_of)(*arguments)):
        assert torch.equal(got[1], wanted[1])
        assert mismatch(got[0], wanted[0], wanted[0].float(), magnitude=4.0) is None


@pytest.mark.parametrize(
    ("length", "groups", "kept", "k"), [(100, 5, 2, 3), (96, 6, 2, 4), (384, 12, 5, 9), (66, 22, 7, 2)]
)
def test_groups_that_are_no_power_of_two(length: int, groups: int, kept: int, k: int) -> None:
    """Of 20, 16, 32 and 3 elements, which 4, 4, 2 and 1 lanes look through."""
    sizes = {"groups": groups, "kept": kept, "k": k}
    for function in (limited, limited_greedy):
        arguments = settled(function, sizes, 3, length)
        got, wanted = run(lambda *x, f=function: f(*x, **sizes), *arguments), function(*arguments, **sizes)
        assert torch.equal(got[1], wanted[1])


def test_equal_groups_keep_their_order_and_one_with_nan_comes_first() -> None:
    logits, bias = torch.zeros(3, 64), torch.zeros(64)
    logits[1, 37] = float("nan")
    logits[2, 20:22] = 1
    for got in (run(limited, logits, bias), jitgen.jit(limited)(logits, bias)):
        wanted = limited(logits, bias)
        assert torch.equal(got[1], wanted[1])
        assert torch.allclose(got[0], wanted[0], equal_nan=True)


def test_groups_of_long_rows_and_of_other_dialects_are_computed_as_they_stand() -> None:
    for length, groups, kept, k in ((1024, 8, 4, 8), (64, 8, 8, 40), (66, 33, 20, 4)):
        logits, bias = distinct((3, length), torch.float32), torch.zeros(length)
        wanted = limited(logits, bias, groups, kept, k, torch.float64)
        got = jitgen.jit(lambda x, y, g=groups, n=kept, k=k: limited(x, y, g, n, k))(logits, bias)
        assert torch.equal(got[1], wanted[1])
    assert "scatter" in families(limited, logits[:, :64], bias[:64], backend="triton")


def test_equal_elements_keep_their_order_and_nan_comes_first() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, -2.0, 3.0, 1.0], [0.0] * 6, [5.0, float("nan"), 1.0, 7.0, float("nan"), 2.0]]
    )
    got = run(lambda x: softmax_behind(x, 4), logits)
    wanted = softmax_behind(logits, 4)
    assert torch.equal(got[1], wanted[1])
    assert torch.allclose(got[0], wanted[0], equal_nan=True)
    got = run(lambda x: of_softmax(x, 3), logits[:2])
    assert torch.equal(got[1], of_softmax(logits[:2], 3)[1])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.covering(1)
def test_elements_of_every_kind_keep_their_order(dtype: torch.dtype, largest: bool) -> None:
    x = sample((4, 300), dtype)
    function = partial(among_all, k=12, largest=largest)
    assert families(function, x) == ["sort"]
    for found, wanted in zip(run(function, x), first_ranks(x, 12, 1, largest), strict=True):
        assert same(found, wanted)


def test_as_many_ranks_as_lanes_of_strided_rows() -> None:
    logits = torch.rand(64, 12).argsort(0).float().t()[::2]
    got, wanted = run(lambda x: of_softmax(x, 32), logits), of_softmax(logits.double(), 32)
    assert torch.equal(got[1], wanted[1])
    assert mismatch(got[0], wanted[0], of_softmax(logits, 32)[0], magnitude=4.0) is None


def test_others_are_kernels_of_their_own() -> None:
    several = {"sort", "reduction"}
    assert set(families(lambda x: of_softmax(x, 8), torch.randn(4, 1000))) == several  # a long row
    assert set(families(lambda x: of_softmax(x, 40), torch.randn(4, 100))) == several  # many ranks
    assert set(families(lambda x: of_softmax(x, 8), torch.randn(4, 100, dtype=torch.float64))) <= {"sort", "reduction"}
    assert set(families(lambda x: of_softmax(x, 8), torch.randn(4, 100), backend="triton")) == several

    def of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.softmax(0).topk(2, 0)
        return values / values.sum(0), indices

    def with_others(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = first(x, 4)
        return values / values.sum(-1, keepdim=True) + y, indices

    assert set(families(of_columns, torch.randn(64, 4))) == several
    assert len(families(with_others, torch.randn(4, 64), torch.randn(4, 4))) > 1
    assert families(lambda x: first(x, 4), torch.randn(4, 64)) == ["sort"]


def test_the_same_program_serves_other_lengths_or_is_made_anew() -> None:
    function = jitgen.jit(lambda x: of_softmax(x, 8))
    kernels = []
    for length in (128, 1000, 64, 2000, 300):
        lowered = function.lower(torch.randn(4, length), backend="cuda", target="sm_90a").lowered
        kernels.append(len(lowered.program.kernels))
    assert kernels == [1, 3, 1, 3, 1]
