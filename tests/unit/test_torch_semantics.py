"""Results, copies and errors that depend on sizes, memory or torch's settings, as in eager torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import TraceError, UnsupportedError

# ----------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("correction", [0, 1, 2, 3.5, 7])
@pytest.mark.quick(where=lambda rows, correction: (rows, correction) in {(0, 1), (1, 1), (3, 1), (3, 3.5), (5, 3.5)})
def test_variance_of_few_elements(rows: int, correction: float) -> None:
    """One trace for all sizes where ``correction`` is below them, and another where it is not."""
    x = torch.randn(rows, 4)
    for function in (torch.var, torch.std):
        wanted = function(x, 0, correction=correction)
        got = jitgen.jit(lambda x, f=function: f(x, 0, correction=correction))(x)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_variance_after_a_call_with_more_rows() -> None:
    jitted = jitgen.jit(lambda x: x.var(0, correction=3))
    for rows in (9, 3, 2, 0, 8):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(jitted(x), x.var(0, correction=3), equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.cosine_similarity(x, torch.full((), 3.0), 0),
        lambda x: F.cosine_similarity(x.std().zero_(), x, 1),
        lambda x: F.cosine_similarity(x, torch.full((), -2.0), -1),
        lambda x: torch.broadcast_tensors(torch.full((), 3.0), x)[0].sum(0),
        lambda x: (x + 0).copy_(torch.full((), 3.0)).sum(1),
        lambda x: torch.full((), 3.0).expand(4, 2).sum(0) + x[0, 0],
    ],
)
def test_a_broadcast_constant_is_reduced_along_its_dimensions(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(5, 7)
    torch.testing.assert_close(jitgen.jit(function)(x), function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "reduce", [lambda x: x.amax(0), lambda x: x.argmax(0), lambda x: x.max(), lambda x: x.argmin()]
)
def test_an_emptied_dimension_raises_after_a_warm_call(reduce: Callable[[torch.Tensor], Any]) -> None:
    jitted = jitgen.jit(reduce)
    assert torch.equal(jitted(torch.eye(3)), reduce(torch.eye(3)))
    with pytest.raises(TraceError, match="size other than 0"):
        jitted(torch.zeros(0, 3))
    assert torch.equal(jitted(torch.eye(4)), reduce(torch.eye(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 3, 8, 1000])
@pytest.mark.quick(where=lambda dtype, length: length in (3, 8) if dtype == torch.bfloat16 else length == 1000)
def test_log_softmax_is_never_positive(dtype: torch.dtype, length: int) -> None:
    x = (torch.randn(50, length) * 10).to(dtype)
    x[:, 0] += 40
    assert (jitgen.jit(lambda x: x.log_softmax(-1))(x) <= 0).all()
    loss = jitgen.jit(lambda x, t: F.cross_entropy(x, t, reduction="none"))
    assert (loss(x, torch.zeros(50, dtype=torch.int64)) >= 0).all()


def test_a_class_that_does_not_exist_has_no_loss() -> None:
    x = torch.randn(3, 4)
    jitted = jitgen.jit(lambda x, t: F.cross_entropy(x, t, reduction="none"))
    with pytest.raises(IndexError):
        jitted(x, torch.tensor([0, 4, -1]))
    assert jitted(x, torch.tensor([0, -100, 3])).isnan().tolist() == [False, False, False]


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float32),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x.to(torch.float32, False, True),
        lambda x: x.ravel(),
        lambda x: x.t().ravel(),
        lambda x: x[:, 0].ravel(),
        lambda x: x[:, 0].reshape(-1),
        lambda x: x.flatten(),
        lambda x: F.dropout(x, 0.5, False),
        lambda x: torch.as_tensor(x),
        lambda x: x.clone(),
    ],
)
def test_results_share_memory_as_in_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(3, 4)
    eager, got = function(x), jitgen.jit(function)(x)
    assert torch.equal(got, eager)
    assert (got.data_ptr() == x.data_ptr(), got.stride()) == (eager.data_ptr() == x.data_ptr(), eager.stride())


def _negated() -> torch.Tensor:
    """A view of stride 2 whose elements are minus those in memory."""
    return torch.randn(4, dtype=torch.complex64).conj().imag


def test_negated_views_are_refused_in_cold_and_warm_calls() -> None:
    jitted, x, out = jitgen.jit(lambda x: x * 2), torch.randn(8)[::2], torch.empty(4)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="resolve_neg"):
            jitted(_negated())
        with pytest.raises(UnsupportedError, match="resolve_neg"):
            jitted(_negated(), out=out)
        jitted(x)
        jitted(x, out=out)
    with pytest.raises(UnsupportedError, match="resolve_neg"):
        jitted(x, out=_negated())
    plan = jitted.bind(x)
    with pytest.raises(ValueError, match="bound for"):
        plan(_negated())


def test_a_captured_tensor_that_becomes_a_negated_view() -> None:
    class Holder:
        weight = torch.randn(8)[::2]

    holder = Holder()
    jitted = jitgen.jit(lambda x: x * holder.weight)
    x = torch.randn(4)
    assert torch.equal(jitted(x), x * holder.weight)
    holder.weight = _negated()
    with pytest.raises(UnsupportedError, match="resolve_neg"):
        jitted(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_epsilon_of_a_norm_is_that_of_the_dtype_it_is_computed_in(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e-3, -2e-3, 3e-3]], dtype=dtype)
    wanted = torch.rms_norm(x, (3,))
    torch.testing.assert_close(jitgen.jit(lambda x: torch.rms_norm(x, (3,)))(x), wanted, rtol=1.6e-2, atol=0)


def test_attention_of_a_module_with_padding() -> None:
    """torch checks the mask's shape by ``torch._check``, which asks a size of the trace for its truth."""
    module, x = torch.nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 7, 12)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    attend = lambda x: module(x, x, x, key_padding_mask=padding)  # noqa: E731
    for found, wanted in zip(jitgen.jit(attend)(x), attend(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("right", [False, True])
def test_numbers_and_values_of_another_dtype_are_placed_in_the_promoted_one(right: bool) -> None:
    values = (3.5, 2.9999, 3, -1.5, math.nan, math.inf, torch.tensor([3.5, 2.0]), torch.tensor(2.5))

    def places(s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_bucketize = [torch.bucketize(value, s, right=right) for value in values]
        return *by_bucketize, *(torch.searchsorted(s, value, right=right) for value in values)

    for boundaries in (torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([1, 2, 200], dtype=torch.uint8)):
        for found, wanted in zip(jitgen.jit(places)(boundaries), places(boundaries), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("right", [False, True])
def test_places_among_boundaries_that_end_in_nan(right: bool) -> None:
    """torch's search takes NaN for less than a value: where it reads one, it ends behind the last."""
    function = lambda x, s: torch.searchsorted(s, x, right=right)  # noqa: E731
    run = jitgen.jit(function)
    for count in (1, 2, 4, 7, 1024, 1025, 1034, 2047):
        x = torch.cat([torch.arange(-1.0, count), torch.tensor([math.inf, -math.inf, math.nan])])
        for nans in {0, 1, min(3, count), count // 3, count}:
            boundaries = torch.arange(float(count)).masked_fill(torch.arange(count) >= count - nans, math.nan)
            assert torch.equal(run(x, boundaries), function(x, boundaries)), (count, nans)


@pytest.mark.parametrize("bins", [100, 2000])
def test_histc_counts_a_number_that_is_rounded_to_the_end(bins: int) -> None:
    x = torch.tensor([1 - 2**-24, 1.0, -1.0, math.nan, math.inf])
    assert torch.equal(jitgen.jit(lambda x: torch.histc(x, bins, -1, 1))(x), torch.histc(x, bins, -1, 1))


@pytest.mark.parametrize("bounds", [(-1, math.inf), (math.nan, 1), (-math.inf, math.inf)])
def test_bounds_of_histc_are_finite(bounds: tuple[float, float]) -> None:
    with pytest.raises(TraceError, match="the range of histc is not finite"):
        jitgen.jit(lambda x: torch.histc(x, 5, *bounds))(torch.randn(79))


@pytest.mark.parametrize("bins", [10, 2000])
def test_histc_without_bounds_refuses_what_is_not_finite(bins: int) -> None:
    run = jitgen.jit(lambda x: torch.histc(x, bins))
    x = torch.randn(30)
    assert torch.equal(run(x), torch.histc(x, bins))
    for value in (math.inf, -math.inf, math.nan):
        x[7] = value
        with pytest.raises(RuntimeError):
            torch.histc(x, bins)
        with pytest.raises(IndexError, match=__file__):
            run(x)
