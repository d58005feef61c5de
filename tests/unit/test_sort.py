"""Sorted rows on the CPU: every dtype, length, dimension and stride, what is fused, and what is composed of sorts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import jitgen
from tests import sorts
from tests.sorts import FLOATS, INTEGERS, both_ways, sample

LENGTHS = (1, 2, 3, 17, 48, 49, 100, 1000, 1025)
Function = Callable[..., Any]


@jitgen.jit
def along_last(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return both_ways(x, -1)


def kernels(function: Function, *arguments: Any) -> list[str]:
    """The templates' folders of the kernels that a call launches."""
    return [kernel.template.split("/")[0] for kernel in jitgen.jit(function).lower(*arguments).kernels]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.quick(where=lambda dtype: dtype in (torch.float32, torch.bfloat16, torch.bool))
def test_every_length(dtype: torch.dtype) -> None:
    for length in LENGTHS[1:]:
        x = sample((3, length), dtype, length)
        assert sorts.failures(along_last(x), x, 1) == []


def test_every_dimension_and_stride() -> None:
    x = sample((4, 3, 30), torch.float32)
    for dim in range(3):
        assert sorts.failures(jitgen.jit(lambda x, dim=dim: both_ways(x, dim))(x), x, dim) == []
    y = sample((12, 40), torch.float32)
    for view in (y.t(), y[::3, 1::2], y.flip(1), y[:, :1].expand(12, 9)):
        assert sorts.failures(along_last(view), view, 1) == []


def test_nothing_and_single_elements() -> None:
    for shape in ((0,), (0, 3), (3, 0), (1,), (1, 1), ()):
        x = torch.ones(shape)
        assert sorts.failures(along_last(x), x, -1) == []
    x = torch.ones(3, 5)
    assert jitgen.jit(lambda x: torch.topk(x, 0).values)(x).shape == (3, 0)


@pytest.mark.parametrize("length", [10, 600, 5000])
@pytest.mark.quick(where=lambda length: length == 600)
def test_first_ranks(length: int) -> None:
    """Few ranks of many, where not all of a row is sorted, in every order of the row, and most of them."""
    rows = sample((4, length), torch.float32)
    for x in (rows, rows.sort().values, rows.sort(descending=True).values, torch.zeros(2, length)):
        for k in {1, min(length, 50), length // 8, length - 1, length}:
            for largest in (True, False):
                got = jitgen.jit(lambda x, k, largest=largest: torch.topk(x, k, 1, largest))(x, k)
                for mine, want in zip(got, sorts.first_ranks(x, k, 1, largest), strict=True):
                    assert sorts.same(mine, want)


def test_names_of_results() -> None:
    x = sample((3, 20), torch.float32)
    got = jitgen.jit(lambda x: (x.sort().values, torch.topk(x, 2).indices, x.argsort(), torch.msort(x)))(x)
    want = (x.sort(stable=True)[0], sorts.first_ranks(x, 2, 1, True)[1], x.argsort(stable=True), torch.msort(x))
    assert all(map(sorts.same, got, want))


FUSED: dict[str, tuple[Function, list[str]]] = {
    "values and indices": (lambda x: torch.sort(x), ["sort"]),
    "a prologue": (lambda x: torch.topk(x / 0.7 + x[:, :1], 5), ["sort"]),
    "a slice": (lambda x: torch.sort(x, descending=True)[0][:, 2:7], ["sort"]),
    "a transpose": (lambda x: torch.sort(x).values.t(), ["sort"]),
    "an epilogue": (lambda x: torch.topk(x, 5).values * 2, ["sort"]),
    "a softmax": (lambda x: torch.topk(x, 5).values.softmax(-1), ["sort"]),
    "an epilogue of many ranks": (lambda x: torch.topk(x, 40).values * 2, ["sort", "elementwise"]),
    "a sort of a sort": (lambda x: torch.sort(torch.sort(x, 0)[0], 1)[0], ["sort", "sort"]),
    "behind a product": (lambda x: torch.topk(x @ x.t(), 3).values, ["gemm", "sort"]),
    "behind a reduction": (lambda x: torch.sort(x.sum(0))[0], ["reduction", "sort"]),
    "a running sum": (lambda x: torch.sort(x)[0].cumsum(1), ["sort", "scan"]),
    "a median": (lambda x: torch.median(x.int(), 1), ["sort"]),
}


@pytest.mark.parametrize("case", FUSED)
def test_what_is_one_kernel(case: str) -> None:
    function, expected = FUSED[case]
    x = torch.randn(20, 50)
    assert kernels(function, x) == expected
    got, want = jitgen.jit(function)(x), function(x)
    for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_pointwise_work_of_many_ranks(dtype: torch.dtype) -> None:
    """On a CPU the kernel that sorts computes it, of values and of indices."""
    for shape in [(3, 256), (1, 3001), (2, 3, 999)]:
        x, y = sample(shape, dtype), sample(shape, torch.float32, 1)
        function = partial(sorts.behind_ranks, k=shape[-1])
        assert kernels(function, x, y) == ["sort"]
        assert all(map(sorts.same, jitgen.jit(function)(x, y), function(x, y)))


@pytest.mark.parametrize("length", [20, 300])
def test_elements_at_the_places_of_ranks_into_their_row(length: int) -> None:
    """A rank that is stored is an element that another rank may take."""

    def function(x: torch.Tensor) -> torch.Tensor:
        values, indices = x.sort(stable=True)
        return values + (x * 2).gather(-1, indices)

    x = torch.randn(5, length)
    want = function(x)
    jitgen.jit(function).bind(x)(x, out=x)
    assert torch.allclose(x, want, rtol=1e-6, atol=0)


def test_in_place_and_into_its_operand() -> None:
    x = sample((5, 60), torch.float32)
    mine, want = x.clone(), x.sort(dim=0)[0]
    jitgen.jit(lambda x: x.copy_(x.sort(dim=0)[0]))(mine)
    assert sorts.same(mine, want)


def same_place(x: torch.Tensor, got: Any, want: Any, dim: int, keepdim: bool) -> bool:
    """Equal values, and indices of elements that have them."""
    values, indices = (part if keepdim else part.unsqueeze(dim) for part in got)
    return equal(got[0], want[0]) and got[1].shape == want[1].shape and equal(x.gather(dim, indices), values)


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal in dtype and elements. Which of two zeros an order statistic is, is open."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.allclose(got, want, 0, 0, equal_nan=True)


STATISTICS: dict[str, Function] = {
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "kthvalue": lambda x, dim, keepdim=False: torch.kthvalue(x, 2, dim, keepdim),
    "mode": torch.mode,
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.quick(where=lambda name: name == "nanmedian")
def test_order_statistics(name: str) -> None:
    function = STATISTICS[name]
    for dtype in (torch.float32, torch.int16):
        x = sample((4, 3, 17), dtype) + (0 if dtype.is_floating_point else 1)
        x = x.nan_to_num(0.5) if name == "mode" else x
        for dim, keepdim in ((1, False), (2, True), (-1, False)):
            got = jitgen.jit(lambda x, dim=dim, keepdim=keepdim: function(x, dim, keepdim))(x)
            assert same_place(x, got, function(x, dim, keepdim), dim, keepdim)
    if "median" in name:
        x = sample((4, 5), torch.float32)
        assert equal(jitgen.jit(lambda x: function(x))(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantiles(interpolation: str) -> None:
    x = torch.randn(3, 4, 17)
    x[0, 1, 2] = x[2, 0] = float("nan")
    q = torch.tensor([0.0, 0.25, 0.77, 1.0])
    for function in (torch.quantile, torch.nanquantile):
        for dim, keepdim, of in ((None, False, 0.3), (1, True, q), (-1, False, q), (None, True, q)):

            def whole(x: Any, of: Any, f: Function = function, dim: Any = dim, keepdim: bool = keepdim) -> Any:
                return f(x, of, dim, keepdim, interpolation=interpolation)

            got, want = jitgen.jit(whole)(x, of), whole(x, of)
            assert got.shape == want.shape
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_quantile() -> None:
    x = torch.randn(3, 17)
    got = jitgen.jit(lambda x: torch.quantile(x, 0.3, 1))(x)
    assert torch.allclose(got, torch.quantile(x, 0.3, 1), rtol=1e-6, atol=1e-6)


REFUSED: dict[str, Function] = {
    "more than there are": lambda x: torch.topk(x, 51),
    "a rank of none": lambda x: torch.kthvalue(x, 0),
    "a median of bool": lambda x: torch.median(x > 0),
    "a quantile of float16": lambda x: torch.quantile(x.half(), 0.5),
    "a quantile above 1": lambda x: torch.quantile(x, 1.5),
    "sorting float8": lambda x: torch.sort(x.to(torch.float8_e5m2)),
    "a median of nothing": lambda x: torch.median(x[:, :0], 1),
    "a dimension too many": lambda x: torch.sort(x, 2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises((jitgen.TraceError, jitgen.UnsupportedError), match=r"test_sort\.py"):
        jitgen.jit(REFUSED[case])(torch.randn(20, 50))
