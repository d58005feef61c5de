"""Operands and results whose strides a kernel cannot walk: each goes through a temporary, and every result is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen


def _checked(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> jitgen.inspect.Lowered:
    """The kernels of ``function``, whose result is compared with float64."""
    jitted = jitgen.jit(function)
    exact = function(*(tensor.double() for tensor in tensors))
    torch.testing.assert_close(jitted(*tensors).double(), exact, rtol=1e-5, atol=1e-5)
    return jitted.lower(*tensors)


TRANSPOSED = torch.randn(7, 5).T
CHANNELS_LAST = torch.randn(2, 3, 6, 7).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        pytest.param(lambda a: a.tril().sum(), (torch.randn(5, 7),), id="indices"),
        pytest.param(lambda a: a.tril().sum(), (TRANSPOSED,), id="indices beside a transpose", marks=pytest.mark.slow),
        pytest.param(lambda a: (a * torch.arange(7)).sum(), (torch.randn(5, 7),), id="an index for each column"),
        pytest.param(
            lambda a, b: (a * b).sum(),
            (torch.randn(5, 7), torch.randn(7)),
            id="a broadcast vector",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda a, b: (a * b).sum(), (torch.randn(5, 7), TRANSPOSED), id="two orders"),
        pytest.param(
            lambda a: a - a.mean((0, 1), keepdim=True),
            (TRANSPOSED,),
            id="a transpose as the result",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda a: a.T - a.mean(), (torch.randn(5, 7),), id="a transposed result"),
        pytest.param(lambda a: a / a.norm(), (torch.randn(6, 9)[1:, 2:],), id="a piece", marks=pytest.mark.slow),
        pytest.param(lambda a: F.layer_norm(a, (7, 6)), (torch.randn(4, 6, 7).transpose(1, 2),), id="layer_norm"),
        pytest.param(
            lambda a: F.layer_norm(a, (3, 6, 7)), (CHANNELS_LAST,), id="channels last", marks=pytest.mark.slow
        ),
        pytest.param(lambda a: F.group_norm(a, 1), (CHANNELS_LAST,), id="group_norm", marks=pytest.mark.slow),
        pytest.param(
            lambda a: a.flip(0).sum() + a.flip((0, 1)).amax(),
            (torch.randn(5, 7),),
            id="flipped",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda a: a.sum((0, 2)) * a.amax((0, 2)), (torch.randn(3, 4, 5).permute(2, 0, 1),), id="two of 3"),
        pytest.param(lambda a: a.roll(1), (TRANSPOSED,), id="roll"),
        pytest.param(
            lambda a: a.roll(3) + 1, (torch.randn(4, 5, 6).permute(2, 0, 1),), id="roll of 3", marks=pytest.mark.slow
        ),
        pytest.param(lambda a: torch.softmax(a.reshape(-1), 0).reshape(a.shape), (TRANSPOSED,), id="softmax of all"),
    ],
)
def test_rows_of_uneven_strides(function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> None:
    _checked(function, *tensors)


def test_the_sum_of_a_transpose_copies_nothing() -> None:
    assert not _checked(lambda a: (a - a.mean((0, 1), keepdim=True)).amax(), TRANSPOSED)._lowered.program.temporaries


def test_a_copied_operand_has_no_more_elements_than_it_has() -> None:
    x, weight = torch.randn(50, 6, 7).transpose(1, 2), torch.randn(7, 6)
    lowered = _checked(lambda x, weight: F.layer_norm(x, (7, 6), weight), x, weight)._lowered
    [temporary] = lowered.memories[2:3]
    assert temporary.view.sizes == (1, 6, 7)


def test_a_mask_is_copied_and_not_its_indices() -> None:
    lowered = _checked(lambda a: a.tril().sum(), torch.randn(5, 7))._lowered
    assert [buffer.dtype for buffer in lowered.program.temporaries] == ["bool"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, w, c, v: (x @ w) * (c @ v)[:, None], marks=pytest.mark.slow),
        lambda x, w, c, v: F.silu(x @ w) * (c @ v).unsqueeze(1) + (c @ v).unsqueeze(1),
        lambda x, w, c, v: ((x @ w) * (c @ v)[:, None]).softmax(-1),
        pytest.param(lambda x, w, c, v: x @ w + x[0] @ v, marks=pytest.mark.slow),
        lambda x, w, c, v: (x @ w).sum(1) - c @ v,
    ],
)
def test_products_that_broadcast(function: Callable[..., torch.Tensor]) -> None:
    _checked(function, torch.randn(2, 5, 8), torch.randn(8, 6), torch.randn(2, 8), torch.randn(8, 6))


def test_results_are_written_to_any_strides() -> None:
    x, w, a = torch.randn(2, 5, 8), torch.randn(6, 8), torch.randn(5, 7)
    for function, tensors, out in [
        (F.linear, (x, w), torch.empty(5, 2, 6).transpose(0, 1)),
        (lambda a: a - a.mean(), (a,), torch.empty(7, 5).T),
        (lambda a: a - a.mean(), (a,), torch.empty(5, 14)[:, ::2]),
        (lambda a: a.roll(2), (a,), torch.empty(7, 5).T),
        (lambda a: a.cumsum(0), (a,), torch.empty(7, 5).T),
    ]:
        jitted = jitgen.jit(function)
        for _ in range(2):
            out.fill_(torch.nan)
            assert jitted(*tensors, out=out) is out
            torch.testing.assert_close(out, function(*tensors))


def test_an_update_in_place_of_uneven_rows() -> None:
    def centred(a: torch.Tensor) -> torch.Tensor:
        return a.sub_(a.mean())

    whole = torch.randn(5, 14)
    expected = whole.clone()
    jitgen.jit(centred)(whole[:, ::2])
    centred(expected[:, ::2])
    torch.testing.assert_close(whole, expected)


def _reversed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Makes a tensor of which the first dimension is the innermost in memory."""
    return torch.randn(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))


def test_an_update_that_is_reduced_as_a_whole_and_by_columns() -> None:
    """A temporary of the new value lies in another order than the argument, of which a kernel takes the norm."""

    def centred(x: torch.Tensor) -> Any:
        x.sub_(x.mean())
        return torch.softmax(x, 0), x.norm()

    x = _reversed(8, 3, 2, dtype=torch.bfloat16)
    exact = x.double()
    for got, want in zip(jitgen.jit(centred)(x), centred(exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "function",
    [
        lambda scale, x: torch.where(x > scale, x, scale),
        lambda scale, x: torch.addcmul(x + torch.arange(8)[:, None], scale, x),
    ],
)
def test_gradients_of_a_scalar_and_of_rows_in_another_order(function: Any) -> None:
    scale, x = torch.randn((), requires_grad=True), _reversed(8, 2).requires_grad_()
    expected = function(scale, x)
    gradient = torch.randn(8, 2)
    found = torch.autograd.grad(jitgen.jit(function)(scale, x), [scale, x], gradient)
    for got, want in zip(found, torch.autograd.grad(expected, [scale, x], gradient), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_same_program_for_the_same_call_whatever_was_called_before() -> None:
    def centred(a: torch.Tensor) -> torch.Tensor:
        return a - a.mean((0, 1), keepdim=True)

    calls = [torch.randn(5, 7), TRANSPOSED, torch.randn(5, 9)[:, :7], torch.randn(7, 5).T.flip(0)]
    fresh = [jitgen.jit(centred).lower(a)._lowered.key for a in calls]
    used = jitgen.jit(centred)
    for order in (calls, calls[::-1]):
        for a in order:
            used(a)
    assert [used.lower(a)._lowered.key for a in calls] == fresh
