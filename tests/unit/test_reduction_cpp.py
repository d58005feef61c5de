"""Row reductions in C++: against float64 torch, at every length where the generated code changes its way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import lowered
from numeric import reference

import jitgen
from jitgen.runtime import cpu

FIRST, SHORT = (3,), (1, 2, 7, 8, 15)
"""Lengths of which each is a kernel of its own."""
LONG = (16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 20000)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FLOATS = tuple(TOLERANCE)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
QUICK = ((torch.bfloat16, LONG), (torch.int64, LONG))
"""Every way of a kernel, in the dtypes that are computed in other ways."""


def rows(length: int, dtype: torch.dtype, count: int = 7) -> torch.Tensor:
    """Random rows; of floats: all -inf, with a NaN, with one huge outlier, denormal, positive."""
    if dtype == torch.bool:
        return torch.rand(count, length) < 0.9
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, (count, length)).to(dtype)
    x = torch.randn(count, length).to(dtype)
    x[1] = -math.inf
    x[2, length // 2] = math.nan
    x[3, length - 1] = 1e4
    x[4] = torch.finfo(dtype).tiny / 4
    x[5] = x[5].abs()
    return x


def check(function: Callable[..., Any], *arguments: torch.Tensor, terms: int = 1) -> None:
    """Results of ``function`` have torch's dtypes and shapes, and float64's values.

    ``terms``: of a sum of numbers around 1, which may itself be 0. Its partial sums grow as their root, and each is
    rounded: in float32 the error of 20000 terms is 2.4e-5 (one sigma), torch's 1.9e-5.
    """
    got, plain, exact = jitgen.jit(function)(*arguments), function(*arguments), reference(function, *arguments)
    for number, (a, b, c) in enumerate(zip(*map(_leaves, (got, plain, exact)), strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), number
        if a.is_floating_point():
            spread = TOLERANCE[a.dtype]
            computed = min(spread, TOLERANCE[torch.float32])
            least = max(spread, computed * terms**0.5 / 8)
            close = torch.isclose(a.double(), c.to(a.dtype).double(), spread, least, equal_nan=True)
        else:
            close = a == c
        assert close.all(), f"result {number}: {a[~close][:4]} for {c[~close][:4]}"


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _leaves(part)


def plain(x: torch.Tensor) -> Any:
    found = (x != 0).any(-1), (x != 0).all(-1)
    return (x.sum(-1), x.amax(-1), x.amin(-1, keepdim=True), x.argmax(-1), x.argmin(-1, keepdim=True), *found)


def truths(x: torch.Tensor) -> Any:
    """torch has no argmax of bool."""
    return x.any(-1), x.all(-1), x.amax(-1), x.amin(-1), x.sum(-1)


def statistics(x: torch.Tensor) -> Any:
    spread = x.std(-1, correction=0), x.var(-1, correction=0)
    return x.mean(-1), x.prod(-1), spread, x.norm(1, -1), x.norm(dim=-1), x.norm(math.inf, -1), x.logsumexp(-1)


def normalisations(x: torch.Tensor) -> Any:
    soft, size = F.softmax(x, -1), (x.shape[-1],)
    return soft, F.log_softmax(x, -1), F.rms_norm(x, size, eps=1e-5), F.layer_norm(x, size), F.normalize(x, dim=-1)


@pytest.mark.parametrize("lengths", [FIRST, SHORT, LONG], ids=["first", "short", "long"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.quick(where=lambda dtype, lengths: (dtype, lengths) in QUICK)
def test_plain_reductions_are_exact_or_close(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        check(plain, rows(length, dtype), terms=length)


@pytest.mark.parametrize("lengths", [(100, 1000), (*FIRST, *SHORT, *LONG)], ids=["few", "all"])
@pytest.mark.quick(where=lambda lengths: len(lengths) == 2)
def test_reductions_of_bool(lengths: tuple[int, ...]) -> None:
    for length in lengths:
        check(truths, rows(length, torch.bool))


@pytest.mark.parametrize("lengths", [FIRST, SHORT, LONG], ids=["first", "short", "long"])
@pytest.mark.parametrize("function", [statistics, normalisations])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.quick(where=lambda dtype, lengths: (dtype, lengths) == (torch.float32, LONG))
def test_compositions_are_close(dtype: torch.dtype, function: Callable[..., Any], lengths: tuple[int, ...]) -> None:
    for length in lengths:
        check(function, rows(length, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    "shapes", [((1, 5), (3, 1)), ((63, 64), (129, 1000), (5000, 3), (64, 4097))], ids=["1", "more"]
)
@pytest.mark.quick(where=lambda dtype, shapes: dtype == torch.float32 and len(shapes) > 2)
def test_columns(dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]) -> None:
    def columns(x: torch.Tensor) -> Any:
        return x.sum(0), x.amax(0, keepdim=True), x.argmin(0), (x > 0).all(0)

    for shape in shapes:
        check(columns, rows(shape[1], dtype, max(shape[0], 7))[: shape[0]], terms=shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", [9, 257, 20_011])
@pytest.mark.parametrize("widths", [(1,), (3, 7, 32, 129)], ids=["1", "more"])
@pytest.mark.quick(where=lambda dtype, length, widths: dtype == torch.float32 and length == 257 and len(widths) > 1)
def test_narrow_columns(dtype: torch.dtype, length: int, widths: tuple[int, ...]) -> None:
    """Few columns in one piece are walked several rows of memory at a time, and what is left over at the end apart."""

    def columns(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x.mean(0), x.amax(0), x.amin(0, keepdim=True), (x * w).mean(0), x.var(0), F.softmax(x, 0), x - x.mean(0)

    for width in widths:
        x = rows(length, dtype, max(7, width)).t()[:, :width].contiguous()
        check(columns, x, torch.randn(width).to(dtype))
    check(lambda x: x.mean(1), torch.randn(5, length, 3).to(dtype))
    check(lambda x: (x.mean(0), x.argmax(0)), torch.randn(length, 8).to(dtype)[:, :3])


def test_columns_in_several_passes() -> None:
    def columns(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return F.softmax(x, 0), ((x - x.mean(0)) * w[:, None] + b, x.var(0, correction=0))

    for shape in ((2, 5), (129, 1000), (3000, 3)):
        check(columns, torch.randn(shape), torch.randn(shape[0]), torch.randn(shape[1]))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((4, 5, 6), (1, 2)), ((4, 5, 6), (0, 2)), ((4, 5, 6), 1), ((4, 5, 6), (0, 1)), ((4, 1, 6), 1), ((2, 3, 4, 5), -2)],
)
@pytest.mark.quick(where=lambda dims: dims in ((0, 2), -2))
def test_dimensions(shape: tuple[int, ...], dims: Any) -> None:
    check(lambda x: (x.sum(dims), x.amax(dims, keepdim=True)), torch.randn(shape))


@pytest.mark.parametrize("dims", [(1, 2), 1, (0, 1), 0, (0, 2)])
@pytest.mark.quick(where=lambda dims: dims in ((1, 2), 0))
def test_elements_less_their_mean(dims: Any) -> None:
    check(lambda x: x - x.mean(dims, keepdim=True), torch.randn(4, 5, 6))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[::2, ::3],
    "columns of more": lambda x: x[:, 5:],
    "one row": lambda x: x[3:4].expand(9, 80),
    "rows backwards": lambda x: x.flip(0),
    "one column": lambda x: x[:, :1].expand(60, 40),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.quick(where=lambda view: view == "every other")
def test_inputs_that_are_not_contiguous(view: str) -> None:
    check(lambda x: (F.softmax(x, -1), x.argmax(-1), x.sum()), VIEWS[view](torch.randn(60, 80)))


@pytest.mark.parametrize("length", [1, 1000, 4096, 100_000, 1_000_003])
@pytest.mark.quick(where=lambda length: length in (1000, 1_000_003))
def test_whole_tensors(length: int) -> None:
    # Around 3: a sum that cancels has errors relative to the magnitudes, not to itself.
    check(lambda x: (x.sum(), x.amax(), x.argmin(), x.mean()), torch.randn(length) + 3)


def test_softmax_of_one_long_row() -> None:
    """Longer than what keeps its exponentials, and shared by the threads."""
    check(lambda x: F.softmax(x, -1), torch.randn(1, 300_001))
    check(lambda x: F.log_softmax(x, -1), torch.randn(3, 300_001))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 70), (2, 4097), (9, 130), (33, 9001), (4, 262_144), (3, 262_145)])
@pytest.mark.quick(where=lambda dtype, shape: dtype == torch.float32 and shape == (33, 9001))
def test_a_row_is_stored_beside_the_next(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What a row keeps must outlast the next one's passes: several results, results of rows, and in place."""
    x = torch.randn(shape).to(dtype)
    check(lambda x: (F.softmax(x, -1), F.log_softmax(x, -1) * 2), x)
    check(lambda x: (F.softmax(x, -1) * torch.sigmoid(x), torch.logsumexp(x, -1), x.argmax(-1)), x)
    wanted = F.softmax(x.double(), -1).to(dtype)
    jitgen.jit(lambda x: F.softmax(x, -1)).bind(x)(x, out=x)
    torch.testing.assert_close(x, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.quick(where=lambda dtype, together: dtype == torch.float32 and together)
def test_functions_behind_a_reduction(dtype: torch.dtype, together: bool) -> None:
    """Whether the compiler has vectors for a function or calls it element by element, whole groups and the rest."""
    x = torch.randn(3, 4097 + 70).to(dtype)
    functions = (torch.sigmoid, torch.tanh, torch.exp, torch.erf, torch.sin, torch.atan, torch.expm1, F.gelu)
    if together:
        check(lambda x: tuple(function(x) / x.abs().amax(-1, keepdim=True) for function in functions), x)
    for function in () if together else functions:
        check(lambda x, function=function: function(x) * x.abs().mean(-1, keepdim=True), x)


@pytest.mark.parametrize("shape", [(1, 300_001), (2, 300_000), (3, 500_000)])
@pytest.mark.quick(where=lambda shape: shape[0] != 2)
def test_few_long_rows_are_one_kernel(shape: tuple[int, ...]) -> None:
    def long(x: torch.Tensor) -> Any:
        return F.softmax(x, -1), (x * x).sum(-1), x.argmax(-1)

    assert len(lowered(long, torch.randn(shape)).program.kernels) == 1
    check(long, torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [16, 100, 255, 256, 1000, 4097, 40_000])
@pytest.mark.quick(
    where=lambda dtype, length: (dtype, length) in ((torch.float32, 100), (torch.float32, 4097), (torch.bfloat16, 255))
)
def test_results_past_the_cache(dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed results: of rows at addresses that allow it, of rows that go by way of a buffer, of rows with others
    between them."""
    monkeypatch.setattr(cpu, "last_level_cache", lambda: 0)
    count = max(9, 30_000 // length)
    x, weight = torch.randn(count, length).to(dtype), torch.randn(length).to(dtype)
    shifted, apart = torch.empty(count * length + 2, dtype=dtype), torch.empty(count, length + 3, dtype=dtype)
    outs = (torch.empty_like(x), None), (shifted[1:-1].view(count, length), shifted), (apart[:, 1:-2], apart)
    for out, around in outs:
        for function, inputs in ((lambda x: F.softmax(x, -1), (x,)), (lambda x, w: x * w / x.norm(), (x, weight))):
            (out if around is None else around).fill_(math.nan)
            jitgen.jit(function).bind(*inputs)(*inputs, out=out)
            exact = function(*(tensor.double() for tensor in inputs))
            torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert around is None or around.isnan().sum() == around.numel() - out.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("length", [16, 23, 100, 255])
@pytest.mark.parametrize("name", ["plain", "statistics", "normalisations"])
@pytest.mark.quick(where=lambda length, dtype, name: (length, dtype, name) == (23, torch.float32, "plain"))
def test_short_rows_together_are_as_they_are_alone(length: int, dtype: torch.dtype, name: str) -> None:
    """To the bit, however many there are."""
    if name != "plain" and not dtype.is_floating_point:
        pytest.skip("of floats")
    function, x = jitgen.jit(globals()[name]), rows(length, dtype, 19)
    alone = [list(_leaves(function(x[row : row + 1]))) for row in range(len(x))]
    for count in (2, 7, 8, 9, 16, 19):
        for place, got in enumerate(_leaves(function(x[:count]))):
            assert_same_bits(got, torch.cat([alone[row][place] for row in range(count)]))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))
    assert torch.equal(got.isnan(), want.isnan())


def test_short_rows_of_several_dimensions() -> None:
    """Rows that lie apart, of operands of other strides, with values of their own for each row."""
    x, y = torch.randn(3, 5, 7, 50)[:, ::2], torch.randn(7, 3, 3, 40).permute(1, 2, 0, 3)
    scale = torch.randn(3, 3, 1, 1).expand(3, 3, 7, 1)
    check(lambda x, y, s: (F.softmax(x[..., 4:44] * s + y, -1), (x[..., :40] * y).sum(-1) * s[..., 0]), x, y, scale)


@pytest.mark.parametrize("where", [0, 17, 63, 64, 4096, 4999])
def test_nan_of_any_kind_reaches_the_extremes(where: int) -> None:
    """It is looked for by its bits: negative ones, and ones with a payload."""
    for bits in (0x7FC00000, -0x400000, 0x7F800001, -1):
        x = torch.randn(2, 5000)
        x[0, where], x[1, where] = torch.tensor(bits, dtype=torch.int32).view(torch.float32), math.inf
        top, bottom = jitgen.jit(lambda x: (x.amax(-1), x.amin(-1)))(x)
        assert torch.equal(top.isnan(), torch.tensor([True, False]))
        assert torch.equal(bottom.isnan(), torch.tensor([True, False]))
        assert top[1] == math.inf


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 5), (0,)])
@pytest.mark.quick(where=lambda shape: shape == (5, 0))
def test_nothing_to_reduce(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    check(lambda x: (x.sum(-1), x.prod(-1), x.logsumexp(-1), (x > 0).any(-1), (x > 0).all(-1)), x)
    check(lambda x: F.softmax(x, -1), x)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
@pytest.mark.quick(where=lambda shape: shape == (5, 0))
def test_the_mean_of_nothing(shape: tuple[int, ...]) -> None:
    check(lambda x: (x.mean(), x.sum()), torch.empty(shape))


def test_extrema_of_nothing_raise_as_in_torch() -> None:
    with pytest.raises(jitgen.TraceError, match="amax"):
        jitgen.jit(lambda x: x.amax(-1))(torch.empty(5, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_add_and_norm_in_one_kernel(dtype: torch.dtype) -> None:
    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return total, F.rms_norm(total, (total.shape[-1],), weight, 1e-6)

    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((37, 5000), (37, 5000), (5000,)))
    assert len(lowered(add_norm, x, residual, weight).program.kernels) == 1
    check(add_norm, x, residual, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [16, 17, 24, 31, 100, 255, 300])
@pytest.mark.quick(where=lambda length, dtype: (length, dtype) in ((24, torch.bfloat16), (255, torch.float32)))
def test_results_in_the_place_of_operands(length: int, dtype: torch.dtype) -> None:
    """To the bit as elsewhere: no element is read after a result has taken its place."""

    def add_norm(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return x + residual, F.rms_norm(x + residual, (x.shape[-1],), eps=1e-6)

    x, residual = torch.randn(70, length).to(dtype), torch.randn(70, length).to(dtype)
    function = jitgen.jit(add_norm)
    total, normal = function(x, residual)
    function.bind(x, residual)(x, residual, out=(residual, x))
    assert torch.equal(residual, total)
    assert torch.equal(x, normal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("length", [16, 17, 31, 64, 100, 255])
@pytest.mark.quick(where=lambda length, dtype: (length, dtype) in ((17, torch.float32), (255, torch.float32)))
def test_the_first_of_equal_elements_is_found(length: int, dtype: torch.dtype) -> None:
    """The first NaN where there are any, and the first element of all where they are all alike."""
    x = torch.randint(0, 3, (70, length)).to(dtype)
    if dtype.is_floating_point:
        x[1], x[2], x[3], x[4] = math.inf, -math.inf, math.nan, -0.0
        x[4, 5], x[5, length - 1], x[6, length // 2] = 0.0, math.nan, math.nan
        x[6, length - 1], x[7, : length - 1] = math.nan, -math.inf
    for function in (lambda x: (x.argmax(-1), x.argmin(-1)), lambda x: (x * 2, x.argmax(-1), x.argmin(-1))):
        for got, want in zip(jitgen.jit(function)(x), function(x), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_quantisation_in_one_kernel() -> None:
    def quantise(x: torch.Tensor) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    x = torch.randn(50, 4100)
    assert len(lowered(quantise, x).program.kernels) == 1
    codes, scale = jitgen.jit(quantise)(x)
    expected, expected_scale = quantise(x)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)


def test_cross_entropy() -> None:
    logits, target = torch.randn(40, 5000), torch.randint(0, 5000, (40,))
    target[3] = -100
    for reduction in ("mean", "sum", "none"):
        got = jitgen.jit(lambda x, y, r=reduction: F.cross_entropy(x, y, reduction=r))(logits, target)
        torch.testing.assert_close(got, F.cross_entropy(logits, target, reduction=reduction))


def test_a_long_sum_is_as_careful_as_torch() -> None:
    x = torch.rand(3, 2_000_001)
    exact = x.double().sum(-1)
    sums = jitgen.jit(lambda x: x.sum(-1))(x), x.sum(-1)
    errors = [((total.double() - exact) / exact).abs().max().item() for total in sums]
    assert errors[0] <= max(2 * errors[1], 2 * torch.finfo(torch.float32).eps)
    column = x.reshape(-1, 3).contiguous()
    exact = column.double().sum(0)
    got = jitgen.jit(lambda x: x.sum(0))(column)
    assert ((got.double() - exact) / exact).abs().max() <= 8 * torch.finfo(torch.float32).eps


def test_softmax_of_far_apart_logits() -> None:
    """The exponential of what is not above 0: exact to an ulp or two down to the denormals, and 0 below."""
    x = torch.cat((torch.zeros(1), -torch.rand(5000) * 110, torch.tensor([-math.inf])))[None]
    got = jitgen.jit(lambda x: F.softmax(x, -1))(x).double()
    exact = F.softmax(x.double(), -1)
    assert ((got - exact).abs() <= 4e-7 * exact + 3e-45).all()


@pytest.mark.parametrize("shape", [(64, 1000), (2, 500_000), (1, 300_000), (40_000, 2), (2000, 1100), (5000, 80)])
@pytest.mark.quick(where=lambda shape: shape in ((2000, 1100), (5000, 80)))
def test_bits_do_not_depend_on_the_threads(shape: tuple[int, int]) -> None:
    def function(x: torch.Tensor) -> Any:
        return x.sum(-1), F.softmax(x, -1), x.sum(0), x.sum()

    x, before, results = torch.randn(shape), torch.get_num_threads(), []
    jitted = jitgen.jit(function)
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(jitted(x))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    check(function, x, terms=x.numel())


@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.quick(where=lambda target, dim: target == "x86-64-v4" and dim == 1)
def test_compiles_for_every_level(target: str, dim: int) -> None:
    low = jitgen.jit(lambda x: F.softmax(x, dim)).lower(torch.randn(64, 64), target=target)
    assert low.compile().asm["asm"]
