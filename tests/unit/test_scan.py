"""Cumulative functions on the CPU: every kind, dtype, length, dimension and stride, what is fused, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from tests import scans
from tests.cuda_on_host import run
from tests.scans import FLOATS, INTEGERS, SLICES, every_kind, sample, wrong_slices

LENGTHS = (0, 1, 2, 3, 7, 16, 17, 1000, 1025, 4097)
Function = Callable[..., Any]


@jitgen.jit
def along_last(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return every_kind(x, -1)


@jitgen.jit
def along_first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return every_kind(x, 0)


def few_kinds(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """A sum and an extremum with its place; small numbers, so that eager torch is near enough."""
    values, places = torch.cummin(x, dim)
    return torch.cumsum(x, dim) + 100, values, places


def kernels(function: Function, *arguments: Any) -> list[str]:
    """The templates' folders of the kernels that a call launches."""
    return [kernel.template.split("/")[0] for kernel in jitgen.jit(function).lower(*arguments).kernels]


@pytest.mark.parametrize("lengths", [LENGTHS[1:2], LENGTHS[2:]], ids=["1", "longer"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.quick(where=lambda dtype, lengths: dtype == torch.float32 and len(lengths) > 1)
def test_every_kind_of_every_length(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """A size of 1 is a kernel of its own; torch has no extrema of nothing, see below."""
    for length in lengths:
        x = sample((3, length), dtype, length)
        assert scans.failures(along_last(x), x, -1) == []
        x = sample((length, 20), dtype, length)
        assert scans.failures(along_first(x), x, 0) == []


@pytest.mark.parametrize("shape", [(5,), (2, 3, 70), (2, 3, 4, 5), (4, 1, 3)])
@pytest.mark.quick(where=lambda shape: shape == (2, 3, 70))
def test_every_dimension(shape: tuple[int, ...]) -> None:
    x = sample(shape, torch.float32)
    for dim in range(len(shape)):
        got = jitgen.jit(lambda x, dim=dim: few_kinds(x, dim - len(shape)))(x)
        assert all(map(torch.allclose, got, few_kinds(x, dim)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_grid_of_shapes_and_strides(length: int, dtype: torch.dtype) -> None:
    for rank in (1, 2, 3, 4):
        for dim in range(rank):
            shape = tuple(length if d == dim else (2, 3, 5, 4)[d] for d in range(rank))
            x = sample(shape, dtype, length)
            views = [x, x.transpose(0, -1).contiguous().transpose(0, -1), torch.stack([x, x], -1)[..., 0], x.flip(dim)]
            for view in views:
                got = jitgen.jit(lambda x, dim=dim: every_kind(x, dim))(view)
                assert scans.failures(got, view, dim) == []


STRIDES: dict[str, Function] = {
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[::3, 1::2],
    "backwards": lambda x: x.flip(1),
    "expanded": lambda x: x[:, :1].expand(12, 9),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.quick(where=lambda strides: strides == "every other")
def test_strides(strides: str) -> None:
    view = STRIDES[strides](sample((12, 40), torch.float32))
    for dim in (0, 1):
        got = jitgen.jit(lambda x, dim=dim: few_kinds(x, dim))(view)
        assert all(map(torch.allclose, got, few_kinds(view, dim)))


@pytest.mark.parametrize("length", [2, 33, 1025, 3000])
def test_special_values(length: int) -> None:
    x = scans.special_rows(length)
    assert scans.same_special(along_last(x), x, -1) == []
    assert scans.same_special(along_first(x.t().contiguous()), x.t(), 0) == []


def test_nothing_and_single_elements() -> None:
    sums = jitgen.jit(lambda x: (x.cumsum(-1), x.cumprod(0), x.logcumsumexp(-1)))
    for shape in ((0,), (0, 3), (3, 0), (1,), (1, 1)):
        x = torch.ones(shape)
        for got, want in zip(sums(x), (x.cumsum(-1), x.cumprod(0), x.logcumsumexp(-1)), strict=True):
            assert torch.equal(got, want)
    empty = torch.ones(0, 3)
    assert [t.shape for t in jitgen.jit(lambda x: tuple(x.cummax(0)))(empty)] == [(0, 3), (0, 3)]
    for dtype in (torch.float32, torch.int8, torch.bool):
        x = torch.ones((), dtype=dtype)
        got = jitgen.jit(lambda x: (x.cumsum(0), x.cumprod(-1), *x.cummax(0), *torch.cummin(x, -1)))(x)
        want = (x.cumsum(0), x.cumprod(-1), *x.cummax(0), *torch.cummin(x, -1))
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
    x = torch.tensor(2.5)
    assert jitgen.jit(lambda x: x.cumsum(0))(x).data_ptr() != x.data_ptr()


def test_dtypes_are_torchs() -> None:
    x = sample((3, 50), torch.int8)
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        function = jitgen.jit(lambda x, dtype=dtype: (x.cumsum(1, dtype=dtype), torch.cumprod(x, 1, dtype=dtype)))
        for mine, theirs in zip(function(x), (x.cumsum(1, dtype=dtype), x.cumprod(1, dtype=dtype)), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.allclose(mine.double(), theirs.double(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    half = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert jitgen.jit(lambda x: x.cumsum(0))(half)[-1] == 4096  # in bfloat16 it would stop at 256
    with pytest.raises(jitgen.UnsupportedError):
        jitgen.jit(lambda x: x.logcumsumexp(0))(x)
    with pytest.raises(jitgen.UnsupportedError):
        jitgen.jit(lambda x: x.cumsum(0))(half.to(torch.float8_e5m2))


def test_long_sums_are_as_exact_as_short_ones() -> None:
    """What is carried from block to block is carried in float64."""
    x = torch.full((2**22,), 0.1)
    got = jitgen.jit(lambda x: x.cumsum(0))(x)
    exact = x.double().cumsum(0)
    assert ((got.double() - exact).abs() / exact).max() < 2e-6
    columns = jitgen.jit(lambda x: x.cumsum(0))(x.view(-1, 4))
    exact = x.view(-1, 4).double().cumsum(0)
    assert ((columns.double() - exact).abs() / exact).max() < 2e-6


FUSED: dict[str, tuple[Function, list[str]]] = {
    "before and after": (lambda x, y: torch.cumsum(x * y, -1) * 2 + x, ["scan"]),
    "several scans": (lambda x, y: torch.cumsum(x, 0) / torch.cumprod(1 + y / 64, 0), ["scan"]),
    "several results": (lambda x, y: (torch.cumsum(x, 1), *torch.cummax(x * y, 1), x + y), ["scan"]),
    "exclusive": (lambda x, y: torch.cumsum(x, 1) - x, ["scan"]),
    "an index": (lambda x, y: torch.cumsum(x, 1) / torch.arange(1, 101), ["scan"]),
    "a value for each row": (lambda x, y: (x * y[:, :1]).cumsum(1) + y[:, 1:2] + y[0], ["scan"]),
    "from the other end": (lambda x, y: x.flip(1).cumsum(1).flip(1) + y, ["scan"]),
    "flattened": (lambda x, y: (x + y).reshape(-1).cumsum(0), ["scan"]),
    "transposed": (lambda x, y: x.t().cumsum(0) * y.t(), ["scan"]),
    "repeated": (lambda x, y: x[:, :1].expand(64, 100).cumsum(1) + y, ["scan"]),
    "a view of one": (lambda x, y: x.cumsum(1)[:, 1:-1], ["scan"]),
    "a scan of a scan": (lambda x, y: torch.cumsum(torch.cumsum(x, 0), 1), ["scan", "scan"]),
    "a scan and what is scanned of it": (lambda x, y: (lambda c: c + c.cumsum(1))(x.cumsum(1)), ["scan", "scan"]),
    "two directions": (lambda x, y: x.cumsum(1) + x.cumsum(0), ["scan", "scan"]),
    "a reduction of one": (lambda x, y: x.cumsum(1).sum(1), ["scan", "reduction"]),
    "beside a reduction": (lambda x, y: x.cumsum(1) / (1 + x.abs().sum(1, keepdim=True)), ["reduction", "scan"]),
    "before a product": (lambda x, y: x.cumsum(-1) @ y.t(), ["scan", "gemm"]),
    "behind a product": (lambda x, y: (x @ y.t()).cumsum(-1), ["gemm", "scan"]),
    "concatenated": (lambda x, y: torch.cat([x.cumsum(0), y], 0), ["scan", "elementwise"]),
    "of a concatenation": (lambda x, y: torch.cat([x, y], 1).cumsum(1), ["elementwise", "scan"]),
    "spread": (lambda x, y: x.cumsum(1)[None] * torch.ones(3, 1, 1), ["scan", "elementwise"]),
}


@pytest.mark.parametrize("name", FUSED)
def test_fusion(name: str) -> None:
    function, want = FUSED[name]
    x, y = sample((64, 100), torch.float32, 1), sample((64, 100), torch.float32, 2)
    assert kernels(function, x, y) == want


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.quick(where=lambda name: name in ("several results", "from the other end", "beside a reduction"))
def test_fused_values(name: str) -> None:
    function, _ = FUSED[name]
    x, y = sample((64, 100), torch.float32, 1), sample((64, 100), torch.float32, 2)
    got, exact = jitgen.jit(function)(x, y), function(x.double(), y.double())
    for mine, theirs in zip(_tuple(got), _tuple(exact), strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_many_scans_are_several_kernels() -> None:
    """Shared memory and registers hold the states of a few."""
    x = sample((6, 40), torch.float32)

    def apart(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x * k).cumsum(1) for k in range(1, 8))

    def together(x: torch.Tensor) -> torch.Tensor:
        return sum((x * k).cumsum(1) for k in range(1, 7))  # type: ignore[return-value]

    assert kernels(apart, x) == 2 * ["scan"]
    assert set(kernels(together, x)) == {"scan"}
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(jitgen.jit(apart)(x), apart(x), strict=True))
    assert torch.allclose(jitgen.jit(together)(x), together(x), atol=1e-3)


@pytest.mark.slow
def test_trapezoids() -> None:
    y, x = sample((6, 40), torch.float32, 3), sample((6, 40), torch.float32, 4)

    def function(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = torch.cumulative_trapezoid
        return whole(y), whole(y, dx=0.5, dim=0), whole(y, x), whole(y, x[0]), whole(y, x[:, 0], dim=0)

    for mine, theirs in zip(jitgen.jit(function)(y, x), function(y.double(), x.double()), strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_in_place(dtype: torch.dtype) -> None:
    def sums(x: torch.Tensor) -> None:
        x.cumsum_(1)

    def products(x: torch.Tensor) -> None:
        x.cumprod_(0)

    def both_ends(x: torch.Tensor) -> None:
        x += x.cumsum(1).flip(1)

    for function, want in ((sums, 1), (products, 1), (both_ends, 2))[: 3 if dtype == torch.float32 else 1]:
        x = (sample((9, 33), dtype) * 0.5 + 1).to(dtype)
        mine, theirs = x.clone(), x.clone()
        jitgen.jit(function)(mine)
        function(theirs)
        assert len(kernels(function, x)) == want
        assert torch.allclose(mine.double(), theirs.double(), rtol=3e-2 if dtype == torch.bfloat16 else 1e-5)


def test_into_memory_of_the_callers() -> None:
    x = sample((20, 30), torch.float32)
    function = jitgen.jit(lambda x: x.cumsum(1) + 1)
    room = torch.full((22, 66), 7.0)
    target = room[1:-1, 3:63:2]
    function.bind(x)(x, out=target)
    assert torch.allclose(target, x.cumsum(1) + 1, atol=1e-5)
    target.fill_(7.0)
    assert (room == 7.0).all()
    own = x.clone()
    function.bind(own)(own, out=own)
    assert torch.allclose(own, x.cumsum(1) + 1, atol=1e-5)


@pytest.mark.parametrize(("shape", "dim"), [((1, 200_000), 1), ((150_001,), 0), ((40_000, 3), 0), ((2, 70_001), 1)])
@pytest.mark.quick(where=lambda shape, dim: shape in ((1, 200_000), (40_000, 3)))
def test_threads_share_long_rows(shape: tuple[int, ...], dim: int) -> None:
    x = sample(shape, torch.float32)
    function = jitgen.jit(lambda x: (x.cumsum(dim), *x.cummax(dim), x.logcumsumexp(dim)))
    exact = x.double()
    bound = scans.roundings(shape[dim]) * scans.unit(x.dtype) * exact.abs().cumsum(dim)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = function(x)
            assert ((got[0] - exact.cumsum(dim)).abs() <= bound + 1e-6 * exact.cumsum(dim).abs()).all()
            assert torch.equal(got[1], x.cummax(dim)[0])
            assert torch.equal(got[2], x.cummax(dim)[1])
            assert torch.allclose(got[3].double(), exact.logcumsumexp(dim), rtol=1e-5)
            assert all(map(torch.equal, got, function(x)))
    finally:
        torch.set_num_threads(before)


def test_it_says_what_it_does() -> None:
    x = sample((64, 100), torch.float32)
    low = jitgen.jit(lambda x: torch.cumsum(x, -1)).lower(x)
    assert "scan by sum along a row" in low.explain()
    body = low._lowered.program.kernels[0].bodies[0]
    assert list(map(str, body.stages)) == ["scan over j0"]
    body = jitgen.jit(FUSED["before and after"][0]).lower(x, x)._lowered.program.kernels[0].bodies[0]
    assert list(map(str, body.stages)) == ["map", "scan over j0", "map"]


def test_results_past_the_cache() -> None:
    """So large that they are streamed, with rows that end within a cache line."""
    x = sample((2100, 4099), torch.float32)
    got = jitgen.jit(lambda x: (x.cumsum(1), x.cummax(0)[0]))(x)
    assert torch.allclose(got[0], x.cumsum(1), atol=1e-2)
    assert torch.equal(got[1], x.cummax(0)[0])


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


# ------------------------------------------------------------------------------- where the order of combining matters


def _repeated(pattern: list[float], times: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(pattern, dtype=dtype).repeat(times)


def _extreme_rows(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows whose elements are so large or small that another order of combining them overflows or becomes 0."""
    large = torch.finfo(dtype).max
    root = large**0.75
    pieces = [1.5, 1 / 1.5, 1 / 1.5, 1.5]
    return {
        "products that come back": _repeated([1 / root, root, root, 1 / root, 1 / root, root], 200, dtype),
        "zero first": torch.cat([torch.zeros(1, dtype=dtype), _repeated([root], 300, dtype)]),
        "sums that come back": _repeated([-0.9 * large, 0.9 * large, 0.9 * large, -0.9 * large], 300, dtype),
        "infinity behind": torch.cat(
            [_repeated([0.9 * large, -0.9 * large], 9, dtype), _repeated([math.inf], 5, dtype)]
        ),
        "pieces of threads": torch.cat([torch.full((50000,), each, dtype=dtype) for each in pieces]),
        "short": torch.tensor([1 / root, root, root, 1 / root, 0, root, root], dtype=dtype),
    }


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(_extreme_rows(torch.float32)))
@pytest.mark.quick(where=lambda name, dtype, columns: not columns or name == "products that come back")
def test_what_is_finite_in_torch_is_finite(name: str, dtype: torch.dtype, columns: bool) -> None:
    """Another order of combining would overflow, or multiply 0 by infinity, where the row's order does not."""
    row = _extreme_rows(dtype)[name]
    x, dim = (row[:, None].repeat(1, 5), 0) if columns else (row, -1)
    function = jitgen.jit(lambda x: (torch.cumsum(x, dim), torch.cumprod(x, dim)))
    for found, wanted in zip(function(x), (torch.cumsum(x, dim), torch.cumprod(x, dim)), strict=True):
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), finite)
        # Of every step the rounding of the largest intermediate; what is carried in float64 is rounded in blocks only.
        most = 2048 if dtype == torch.float32 else len(row)
        steps = torch.arange(1, len(row) + 1, dtype=torch.float64).reshape(-1, *[1] * columns)
        largest = x.abs().amax(dim, keepdim=True).double()
        half = torch.finfo(dtype).eps / 2
        bound = 4 * steps.clamp(max=most) * half * torch.maximum(largest, wanted.double().abs())
        bound += torch.finfo(dtype).smallest_normal
        assert ((found.double() - wanted.double()).abs() <= bound)[finite].all()


@pytest.mark.optimised  # 26 million exponentials take 20 s without
def test_a_long_logcumsumexp_does_not_drift() -> None:
    """The sum of exponentials is carried in float64, or 20 million terms would no longer count."""
    for shape, dim in (((20_000_000,), 0), ((3_000_000, 2), 0)):
        last = jitgen.jit(lambda x, dim=dim: torch.logcumsumexp(x, dim))(torch.zeros(shape)).select(dim, -1)
        wanted = math.log(shape[0])
        assert (last.double() - wanted).abs().max() <= 4 * wanted * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("length", [1, 2, 7, 31, 32])
@pytest.mark.quick(where=lambda length: length == 7)
def test_short_rows(length: int) -> None:
    for shape in ((length,), (50, length), (3, 2, length)):
        x = torch.randn(shape)
        function = jitgen.jit(lambda x: (x.cumsum(-1), x.cumprod(-1), *x.cummax(-1), x.logcumsumexp(-1)))
        wanted = (x.cumsum(-1), x.cumprod(-1), *x.cummax(-1), x.logcumsumexp(-1))
        for mine, theirs in zip(function(x), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
        ints = jitgen.jit(lambda x: (torch.cumsum(x, -1) * 2 + x, torch.cummin(x, -1)[1]))
        y = torch.randint(-5, 5, shape)
        for mine, theirs in zip(ints(y), (torch.cumsum(y, -1) * 2 + y, torch.cummin(y, -1)[1]), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("function", SLICES)
@pytest.mark.parametrize("shape", [(5, 33), (3, 4), (1, 3), (0, 9), (2, 3000), (1, 70_000)])
@pytest.mark.quick(where=lambda shape: shape in ((5, 33), (0, 9), (1, 70_000)))
def test_slices_are_stored_by_the_kernel_of_the_scan(function: Function, shape: tuple[int, int]) -> None:
    for turned in (False, True):
        x, y = sample(shape, torch.float32, 1), sample(shape, torch.float32, 2)
        if turned:
            x, y = x.t().contiguous().t(), y.t().contiguous().t()
        scale = torch.tensor(2.5)
        assert kernels(function, x, y, scale) == ["scan"]
        assert wrong_slices(jitgen.jit(function)(x, y, scale), function, x, y, scale) == []


@pytest.mark.parametrize("function", SLICES)
@pytest.mark.parametrize(("shape", "turned"), [((3, 33), False), ((2, 256), False), ((9, 20), True)])
@pytest.mark.quick(where=lambda shape: shape == (2, 256))
def test_slices_in_cuda(function: Function, shape: tuple[int, int], turned: bool) -> None:
    x, y = sample(shape, torch.float32, 1), sample(shape, torch.float32, 2)
    if turned:
        x, y = x.t().contiguous().t(), y.t().contiguous().t()
    scale = torch.tensor(2.5)
    assert wrong_slices(tuple(run(function, x, y, scale)), function, x, y, scale) == []


def test_a_scan_that_others_read_is_in_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scanned = x.cumsum(1)
        return scanned[:, :4].relu(), scanned[:, 4:].softmax(1), scanned[:, 2:8] + x[:, :6]

    x = torch.randn(5, 12, dtype=torch.float64)
    assert kernels(function, x).count("scan") == 1
    torch.testing.assert_close(jitgen.jit(function)(x), function(x))


@pytest.mark.parametrize("turned", [False, True])
def test_slices_of_a_scan_of_what_reads_other_elements(turned: bool) -> None:
    """What a scanned value reads of its row, or of the tensor, is in memory, as where the scan is returned whole."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        centred, shared = x - x.mean(-1, keepdim=True), x + x.sum()
        pieces = torch.cat([centred.cumsum(-1)[:, 1:] * 2, shared.cumsum(-1)[:, :1]], -1)
        return centred.cumsum(-1)[:, 1:], shared.cumsum(-1)[:, :-1], pieces

    x = torch.randint(-8, 9, (4, 16)).double()  # the mean is exact
    x = x.t().contiguous().t() if turned else x
    cuda = [] if turned else [run(function, x.float())]
    for got in (jitgen.jit(function)(x), *cuda):
        for mine, theirs in zip(got, function(x), strict=True):
            assert torch.equal(mine.double(), theirs)


@pytest.mark.parametrize("chosen", ["cumsum", "cummax", "sort", "topk", "median"])
def test_a_row_of_no_dimension_is_cast_to_a_smaller_dtype(chosen: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        row = x.sum()
        found = row.topk(1, 0) if chosen == "topk" else getattr(row, chosen)(0)
        return (found if chosen == "cumsum" else found[0]).to(torch.int8)

    x = torch.arange(5.0)
    assert torch.equal(jitgen.jit(function)(x), function(x))
